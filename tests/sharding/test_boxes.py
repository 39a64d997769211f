"""Boxes that overlap are told from those that do not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.sharding.global_tensors import check_disjoint


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.lists(st.integers(1, 9), max_size=3, unique=True), min_size=1, max_size=3), data=st.data())
def test_boxes_of_any_grid_are_disjoint_and_overlap_when_one_grows(cuts: list[list[int]], data: st.DataObject) -> None:
    sides = [[*zip([0, *sorted(one)], [*sorted(one), 10], strict=True)] for one in cuts]
    boxes = [*itertools.product(*sides)]
    offsets, sizes = ([[pick(*one) for one in box] for box in boxes] for pick in (lambda a, _: a, lambda a, b: b - a))
    check_disjoint(offsets, sizes)
    at, axis = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(cuts) - 1))
    grown = [*map(list, sizes)]
    grown[at][axis] += 1
    if offsets[at][axis] + sizes[at][axis] < 10:
        with pytest.raises(ValueError, match="overlap"):
            check_disjoint(offsets, grown)
    else:
        check_disjoint(offsets, grown)


def test_boxes_that_no_plane_separates_may_still_be_disjoint() -> None:
    wheel = [(0, 0, 2, 1), (0, 1, 1, 2), (1, 2, 2, 1), (2, 0, 1, 2), (1, 1, 1, 1)]
    check_disjoint([box[:2] for box in wheel], [box[2:] for box in wheel])
    with pytest.raises(ValueError, match="overlap"):
        check_disjoint([box[:2] for box in wheel], [box[2:] for box in wheel[:-1]] + [(2, 1)])


def test_scalars_overlap_and_empty_boxes_do_not() -> None:
    check_disjoint([()], [()])
    check_disjoint([(0, 0), (0, 0), (0, 0)], [(2, 0), (2, 3), (0, 3)])
    with pytest.raises(ValueError, match="overlap"):
        check_disjoint([(), ()], [(), ()])
