from collections import Counter, OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch

from shrinkpoint.tensors.nest import iter_tensors, map_nested_tensors

Pair = namedtuple("Pair", "left right")
ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


@dataclass
class Output(OrderedDict):
    """A mapping that takes its items by name, as outputs of models do."""

    loss: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("loss", "scores"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Encoding(UserDict):
    """A mapping that takes a dict and nothing by another name, as those of tokenizers do."""

    def __init__(self, data=None, encoding=None):
        super().__init__(data or {})


@pytest.mark.parametrize(
    "nest",
    [
        ONE,
        [ONE, (TWO, "text")],
        Pair(ONE, [TWO]),
        {"a": ONE, 3: {"b": TWO, "c": None}},
        OrderedDict(a=ONE, b=TWO),
        OrderedDict([(1, ONE), ((2, 3), TWO)]),
        Output(loss=ONE, scores=TWO),
        Encoding({"input_ids": ONE, "mask": TWO}),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_tensors_are_mapped_in_order_and_the_nest_keeps_its_types(nest):
    tensors = [*iter_tensors(nest)]
    mapped = map_nested_tensors(nest, lambda x: x + 1)
    assert type(mapped) is type(nest)
    assert [float(x[0]) for x in iter_tensors(mapped)] == [float(x[0]) + 1 for x in tensors]
    assert [float(x[0]) for x in tensors] == [1.0, 2.0][: len(tensors)]  # what was there is unchanged
    assert str(map_nested_tensors(nest, lambda x: x)) == str(nest)


def test_outputs_by_name_keep_their_attributes():
    mapped = map_nested_tensors(Output(loss=ONE, scores=TWO), lambda x: -x)
    assert torch.equal(mapped.scores, -TWO) and torch.equal(mapped["scores"], -TWO)


def test_a_mapping_whose_type_takes_no_items_becomes_a_dict():
    class Closed(dict):
        def __init__(self):
            super().__init__(a=ONE)

    assert type(map_nested_tensors(Closed(), lambda x: x)) is dict
    assert type(map_nested_tensors(MappingProxyType({"a": ONE}), lambda x: x)) is MappingProxyType


def test_what_holds_no_tensor_stays_as_it_is():
    nest = {"a": 1, "b": [None, "text"], "c": Counter("aab")}
    assert [*iter_tensors(nest)] == []
    assert map_nested_tensors(nest, lambda x: x) == nest
