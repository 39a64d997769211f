"""What code of the user's collects in its objects, as it was before."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch

from shrinkpoint.train.default_evaluation import AttributeSnapshot


class Thing:
    """Whatever it is given."""

    def __init__(self, **held):
        vars(self).update(held)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda x: x.append(2)),
        ([[], []], lambda x: x[1].append(torch.ones(1))),
        (([1],), lambda x: x[0].clear()),
        ({"a": [1]}, lambda x: x["a"].append(2)),
        (defaultdict(lambda: defaultdict(list)), lambda x: x["eval"]["loss"].append(2)),
        (OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
        (Counter("aab"), lambda x: x.update("a")),
        ({1, 2}, lambda x: x.remove(1)),
        (deque([1, 2], maxlen=2), lambda x: x.append(3)),
    ],
)
def test_a_nest_has_again_what_was_in_it(value, change):
    thing, shown = Thing(it=value), repr(value)
    before = AttributeSnapshot([thing])
    for _ in range(2):
        change(value)
        assert repr(value) != shown
        before.restore()
        assert thing.it is value and repr(value) == shown


def test_an_attribute_is_bound_again_to_what_it_was_and_others_are_left():
    tensor = torch.ones(2)
    thing = Thing(count=1, none=None, tensor=tensor, left=1)
    before = AttributeSnapshot([thing], exclude=["left"])
    thing.count, thing.none, thing.tensor, thing.left, thing.new = 2, 2, tensor + 1, 2, 2
    before.restore()
    assert (thing.count, thing.none, thing.left, thing.new) == (1, None, 2, 2) and thing.tensor is tensor


def test_a_nest_that_holds_itself_and_a_long_list_are_served():
    inner = [0]
    nest = [inner] * 1000
    loop = [1]
    loop.append(loop)
    thing = Thing(nest=nest, loop=loop)
    before = AttributeSnapshot([thing])
    nest.pop()
    loop.append(2)
    before.restore()
    assert len(nest) == 1000 and len(loop) == 2 and loop[1] is loop
