"""The exact search."""

from __future__ import annotations

import math
import statistics

import pytest
from helpers.search_spaces import Landscape, Wide, landscapes, random_landscape, space_of
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.schemes.search.space import Point
from shrinkpoint.schemes.search.strategies import branch_and_bound


def search(land: Landscape, width: int = 1, **more):
    return branch_and_bound(land.space, land.size, Wide(land.measure, width), land.threshold, **more)


@settings(deadline=None, max_examples=75)
@given(landscapes(), st.integers(1, 8))
def test_no_point_that_holds_is_smaller_than_the_chosen_one(land, width):
    outcome = search(land, width)
    assert (outcome.chosen and outcome.chosen.size) == land.smallest()
    if outcome.chosen is not None:
        assert outcome.chosen in outcome.trials
        assert land.degradations[outcome.chosen.point] == outcome.chosen.degradation <= land.threshold


@settings(deadline=None, max_examples=25)
@given(landscapes(), st.integers(1, 8))
def test_no_point_is_measured_twice_and_every_one_that_was_is_reported(land, width):
    outcome = search(land, width)
    assert [trial.point for trial in outcome.trials] == land.asked
    assert len(set(land.asked)) == len(land.asked)


def test_a_tenth_of_the_space_is_measured_at_most():
    counts = [len(search(random_landscape(seed, sizes="monotone")).trials) for seed in range(100)]
    assert statistics.mean(counts) < 12 and max(counts) < 22  # 10.3 and 16 were seen


def test_eight_at_once_need_about_three_rounds():
    rounds = [search(random_landscape(seed, sizes="monotone"), 8).rounds for seed in range(40)]
    assert statistics.mean(rounds) < 3.5 and max(rounds) <= 6


def test_sizes_that_rise_with_aggressiveness_need_one_trial():
    """Then the safest point is the smallest, and nothing can beat it."""
    land = random_landscape(1)
    land.sizes = {point: 100.0 - sum(point.index) for point in land.points}
    land.threshold = math.inf
    assert [trial.point for trial in search(land).trials] == [land.space.safest("")]


@pytest.mark.parametrize("width", [1, 3])
def test_nothing_is_chosen_where_nothing_holds(width):
    land = random_landscape(2, variants=("a", "b"))
    land.degradations, land.threshold = dict.fromkeys(land.points, 1.0), 0.5
    outcome = search(land, width)
    assert outcome.chosen is None
    assert {land.space.safest("a"), land.space.safest("b")} <= set(land.asked)


def test_what_could_not_be_measured_does_not_hold():
    land = random_landscape(3)
    land.degradations = {point: math.nan if point.index[0] < 4 else 0.0 for point in land.points}
    outcome = search(land)
    assert outcome.chosen is not None and outcome.chosen.point.index[0] >= 4
    assert outcome.chosen.size == land.smallest()


def test_only_allowed_variants_are_measured():
    land = random_landscape(4, variants=("magnitude", "sensitivity"))
    outcome = search(land, variants=["magnitude"])
    assert {point.variant for point in land.asked} == {"magnitude"}
    assert (outcome.chosen and outcome.chosen.size) == land.smallest(["magnitude"])


def test_a_point_of_infinite_or_unknown_size_is_never_tried():
    land = random_landscape(5)
    land.threshold = math.inf
    land.sizes = {point: size if point.index[0] == 3 else math.inf for point, size in land.sizes.items()}
    land.sizes[land.space.points("")[0]] = math.nan
    assert search(land).chosen.size == min(size for size in land.sizes.values() if size < math.inf)
    assert all(point.index[0] == 3 for point in land.asked)


def test_a_space_of_one_point_is_measured_once():
    land = Landscape(space_of(()), {Point("", ()): 0.1}, {Point("", ()): 7.0})
    assert search(land).chosen.size == 7.0 and len(land.asked) == 1


@settings(deadline=None, max_examples=25)
@given(landscapes(), st.integers(1, 8))
def test_progress_hears_of_every_trial_and_of_the_end_once(land, width):
    heard = []
    outcome = search(land, width, progress=lambda trial, best, left: heard.append((trial, best, left)))
    assert [trial for trial, _, _ in heard] == list(outcome.trials)
    assert [left == 0 for _, _, left in heard] == [False] * (len(heard) - 1) + [True]
    assert heard[-1][1] == outcome.chosen
