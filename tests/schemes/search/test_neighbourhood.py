"""The search of the steady state."""

from __future__ import annotations

import math

import pytest
from helpers.search_spaces import Landscape, Wide, landscapes, random_landscape
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.space import Point, is_dominated
from shrinkpoint.schemes.search.strategies import neighbourhood

CENTER = (2, 2)


def plain(variants: tuple[str, ...] = ("",)) -> Landscape:
    """5 x 5; the degradation falls and the size rises by 0.1 and 1 a step; 0.4 at the center."""
    land = random_landscape(0, (5, 5), variants)
    land.degradations = {point: 0.8 - 0.1 * sum(point.index) for point in land.points}
    land.sizes = {point: 10.0 + sum(point.index) + 0.1 * point.index[0] for point in land.points}
    land.threshold = 0.45
    return land


def search(land: Landscape, width: int = 1, last: Point | None = None, **more):
    last = last or Point(land.space.variants[0], CENTER)
    return neighbourhood(land.space, land.size, Wide(land.measure, width), land.threshold, last, **more)


def test_neighbours_are_tried_by_size_and_none_after_the_first_that_holds():
    land = plain()
    outcome = search(land)
    # as large as (2, 2) up to a little, but with less on the first axis, which costs more
    assert [trial.point.index for trial in outcome.trials] == [(1, 3)]
    assert outcome.chosen.point.index == (1, 3)


def test_a_round_tries_as_many_as_there_are_ranks_and_the_smallest_that_holds_wins():
    land = plain()
    land.degradations[Point("", (1, 3))] = 0.5
    outcome = search(land, width=3)
    assert [trial.point.index for trial in outcome.trials] == [(1, 3), (2, 2), (3, 1)]
    assert (outcome.chosen.point.index, outcome.rounds) == ((2, 2), 1)


def test_more_aggressive_points_are_tried_only_if_allowed():
    land = plain()
    land.threshold = 1.0
    assert search(land).chosen.point.index == (1, 3)
    assert search(land, coarser=True).chosen.point.index == (1, 1)


def test_radius_counts_steps_on_each_axis():
    land = plain()
    land.threshold = 1.0
    assert search(land, coarser=True, radius=2).chosen.point.index == (0, 0)
    assert search(land, radius=0).chosen.point.index == CENTER


@settings(deadline=None, max_examples=50)
@given(landscapes(), st.integers(1, 8), st.booleans(), st.data())
def test_the_smallest_neighbour_that_holds_is_found(land, width, coarser, data):
    variant = land.space.variants[0]
    last = data.draw(st.sampled_from(land.space.points(variant)))
    outcome = search(land, width, last, variants=[variant], coarser=coarser)
    near = [
        point
        for point in land.space.points(variant)
        if max(abs(i - j) for i, j in zip(point.index, last.index, strict=True)) <= 1
        and (coarser or not is_dominated(point, last))
    ]
    sizes = (land.sizes[point] for point in near if land.degradations[point] <= land.threshold)
    assert (outcome.chosen and outcome.chosen.size) == min(sizes, default=None)
    assert set(land.asked) <= set(near) and len(set(land.asked)) == len(land.asked)


def test_nothing_is_chosen_where_no_neighbour_holds():
    land = plain()
    land.threshold = 0.15  # (4, 4) would do, (3, 3) does not
    assert search(land).chosen is None


def test_what_is_more_aggressive_than_a_failure_is_not_tried():
    land = plain()
    land.sizes = {point: -size for point, size in land.sizes.items()}  # the safest neighbour first
    land.threshold = 0.1
    assert [trial.point.index for trial in search(land, coarser=True).trials] == [(3, 3)]


def better(land: Landscape, by: float) -> Landscape:
    """The second variant is better than the first at the center by this share of the threshold."""
    land.degradations |= {
        point: land.degradations[Point("a", point.index)] - by * land.threshold
        for point in land.points
        if point.variant == "b"
    }
    return land


@pytest.mark.parametrize(("by", "variant"), [(0.11, "b"), (0.09, "a"), (0.0, "a"), (-0.5, "a")])
def test_the_metric_is_switched_where_another_is_better_by_a_tenth_of_the_threshold(by, variant):
    land = better(plain(("a", "b")), by)
    outcome = search(land)
    assert [trial.point for trial in outcome.trials][:2] == [Point("a", CENTER), Point("b", CENTER)]
    assert outcome.chosen.point.variant == variant


def test_both_metrics_are_measured_in_one_round_and_not_again():
    land = better(plain(("a", "b")), 0.5)
    land.threshold = 0.45
    trials = Wide(land.measure, 2)
    outcome = neighbourhood(land.space, land.size, trials, land.threshold, Point("a", CENTER), radius=0)
    assert trials.rounds == [[Point("a", CENTER), Point("b", CENTER)]]
    assert (outcome.chosen.point, outcome.rounds) == (Point("b", CENTER), 1)


def test_what_the_switch_measured_bounds_the_candidates():
    """The center holds: of the others only the smaller ones are worth a trial."""
    land = better(plain(("a", "b")), 0.0)
    land.degradations[Point("a", (1, 3))] = 0.9
    outcome = search(land, width=8)
    assert [trial.point for trial in outcome.trials] == [Point("a", CENTER), Point("b", CENTER), Point("a", (1, 3))]
    assert outcome.chosen.point == Point("a", CENTER)


@pytest.mark.parametrize(("here", "there", "variant"), [(math.nan, 0.4, "b"), (0.4, math.nan, "a")])
def test_a_metric_that_could_not_be_measured_is_the_worse_one(here, there, variant):
    land = plain(("a", "b"))
    land.degradations |= {Point("a", CENTER): here, Point("b", CENTER): there}
    assert search(land).chosen.point.variant == variant


def test_another_metric_is_left_alone_where_it_is_not_allowed():
    land = better(plain(("a", "b")), 0.9)
    assert search(land, variants=["a"]).chosen.point.variant == "a"
    assert {point.variant for point in land.asked} == {"a"}


@pytest.mark.parametrize("last", [Point("c", CENTER), Point("a", (2,)), Point("a", (2, 5)), Point("a", (-1, 0))])
def test_a_point_outside_of_the_space_is_refused(last):
    with pytest.raises(PolicyError, match="last: "):
        search(plain(("a", "b")), last=last)


def test_a_negative_radius_is_refused():
    with pytest.raises(PolicyError, match="radius: "):
        search(plain(), radius=-1)


@settings(deadline=None, max_examples=25)
@given(landscapes(), st.integers(1, 8), st.data())
def test_progress_hears_of_every_trial_and_of_the_end_once(land, width, data):
    heard = []
    last = data.draw(st.sampled_from(land.points))
    outcome = search(land, width, last, progress=lambda trial, best, left: heard.append((trial, left)))
    assert [trial for trial, _ in heard] == list(outcome.trials)
    assert [left == 0 for _, left in heard] == [False] * (len(heard) - 1) + [True]
