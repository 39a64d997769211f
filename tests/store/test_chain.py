"""Which checkpoint stands on which."""

from __future__ import annotations

import pytest
from helpers.manifests import manifest, run

from shrinkpoint.errors import ChainError, NotFoundError
from shrinkpoint.store import chain

RUN = {one.step: one for one in run(7)}  # keyframes 1, 4 and 7


def test_a_path_leads_from_the_keyframe_to_the_step() -> None:
    paths = [[one.step for one in chain.chain_manifests(RUN, step)] for step in RUN]
    assert paths == [[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [7]]


def test_dependents_are_all_that_stands_above() -> None:
    assert [chain.descendants(RUN, step) for step in RUN] == [(2, 3), (3,), (), (5, 6), (6,), (), ()]


def test_a_missing_step_on_the_way_is_named() -> None:
    without = {step: one for step, one in RUN.items() if step != 5}
    with pytest.raises(ChainError, match=r"step 6, base step 5: no such checkpoint.*compact.*step 6"):
        chain.chain_manifests(without, 6)
    assert chain.ancestors(without, 6) == (4,)


def test_a_step_saved_again_is_no_longer_the_base_it_was() -> None:
    again = {**RUN, 5: manifest(5, again="2")}
    with pytest.raises(ChainError) as caught:
        chain.chain_manifests(again, 6)
    assert again[5].digest in caught.value.found
    assert RUN[5].digest in caught.value.expected
    assert chain.descendants(again, 5) == ()


def test_an_unknown_step_is_named_with_those_there_are() -> None:
    with pytest.raises(NotFoundError, match=r"step 9.*one of 1, 2, 3, 4, 5, 6, 7"):
        chain.chain_manifests(RUN, 9)
    with pytest.raises(NotFoundError, match=r"1, 2, 3, \.\.\., 28, 29, 30"):
        chain.chain_manifests({one.step: one for one in run(30)}, 31)
    with pytest.raises(NotFoundError, match="none yet"):
        chain.chain_manifests({}, 1)
