"""The paper's search."""

from __future__ import annotations

import math

import pytest
from helpers.search_spaces import Landscape, Wide, landscapes, random_landscape
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.schemes.search.space import Point
from shrinkpoint.schemes.search.strategies import branch_and_bound, diagonal


def search(land: Landscape, width: int = 1, **more):
    return diagonal(land.space, land.size, Wide(land.measure, width), land.threshold, **more)


@settings(deadline=None, max_examples=75)
@given(landscapes("monotone"), st.integers(1, 8))
def test_exact_where_size_is_monotone(land, width):
    outcome = search(land, width)
    assert (outcome.chosen and outcome.chosen.size) == land.smallest()


@settings(deadline=None, max_examples=50)
@given(landscapes(), st.integers(1, 8))
def test_what_it_chooses_holds_and_nothing_is_measured_twice(land, width):
    outcome = search(land, width)
    assert [trial.point for trial in outcome.trials] == land.asked
    assert len(set(land.asked)) == len(land.asked)
    assert (outcome.chosen is None) == (land.smallest() is None)
    assert outcome.chosen is None or outcome.chosen.degradation <= land.threshold


def test_the_main_diagonal_is_measured_first_and_at_once():
    land = random_landscape(1, (6, 6, 6))
    trials = Wide(land.measure, 8)
    diagonal(land.space, land.size, trials, land.threshold)
    assert trials.rounds[0] == [Point("", (i, i, i)) for i in range(6)]


def test_a_single_rank_halves_the_diagonal():
    land = random_landscape(1, (7,), sizes="monotone")
    land.degradations = {point: float(point.index[0] < 5) for point in land.points}
    land.threshold = 0.5
    outcome = search(land)
    assert [trial.point.index[0] for trial in outcome.trials] == [3, 5, 4]
    assert outcome.chosen.point.index == (5,)


def test_where_sizes_are_in_no_order_it_may_miss_what_the_exact_search_finds():
    pairs = []
    for seed in range(30):
        land = random_landscape(seed)
        exact = branch_and_bound(land.space, land.size, Wide(land.measure, 1), land.threshold)
        found = search(land)
        pairs.append((found.chosen and found.chosen.size, exact.chosen and exact.chosen.size))
    assert all(found is None or found >= exact for found, exact in pairs)
    assert any(found != exact for found, exact in pairs)


def test_each_variant_is_searched_and_the_smaller_result_kept():
    land = random_landscape(3, (4, 4), ("a", "b"), "monotone")
    land.degradations = {point: float(sum(point.index) < (5 if point.variant == "a" else 2)) for point in land.points}
    land.sizes = {point: 1.0 + sum(point.index) for point in land.points}
    land.threshold = 0.5
    outcome = search(land)
    assert outcome.chosen.point.variant == "b" and outcome.chosen.size == 3
    assert {point.variant for point in land.asked} == {"a", "b"}
    assert search(land, variants=["a"]).chosen.size == 6


@pytest.mark.parametrize("degradation", [1.0, math.nan])
def test_nothing_is_chosen_where_nothing_holds(degradation):
    land = random_landscape(4)
    land.degradations = dict.fromkeys(land.points, degradation)
    land.threshold = 0.5
    outcome = search(land, 8)
    assert outcome.chosen is None
    assert len(land.asked) == 6  # the safest corner is on the diagonal


@settings(deadline=None, max_examples=25)
@given(landscapes(), st.integers(1, 8))
def test_progress_hears_of_every_trial_and_of_the_end_once(land, width):
    heard = []
    outcome = search(land, width, progress=lambda trial, best, left: heard.append((trial, left)))
    assert [trial for trial, _ in heard] == list(outcome.trials)
    assert [left == 0 for _, left in heard] == [False] * (len(heard) - 1) + [True]
