"""Points, their settings, and what is more aggressive than what."""

from __future__ import annotations

import json
import math

import pytest
from helpers.search_spaces import space_of
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.space import Axis, Point, Space, is_dominated
from shrinkpoint.schemes.search.trials import SearchResult, Trial

PAPER = Space(
    (
        Axis("bins", (4, 6, 8, 12, 16, 32)),
        Axis("prune", (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)),
        Axis("protect", (0.0005, 0.005, 0.01)),
    ),
    ("magnitude", "sensitivity"),
)
FIXED = Space((Axis("bins", (4, 8)),))


@given(st.sampled_from([point for variant in PAPER.variants for point in PAPER.points(variant)]))
def test_a_point_comes_back_from_its_settings_as_json(point):
    assert PAPER.point(json.loads(json.dumps(PAPER.settings(point)))) == point


def test_settings_name_the_variant_where_there_is_one():
    assert PAPER.settings(Point("magnitude", (1, 5, 0))) == {
        "bins": 6,
        "prune": 0.0,
        "protect": 0.0005,
        "metric": "magnitude",
    }
    assert FIXED.settings(Point("", (1,))) == {"bins": 8}
    assert Space(FIXED.axes, ("magnitude",)).settings(Point("magnitude", (0,)))["metric"] == "magnitude"


def test_settings_of_another_space_become_the_nearest_safer_point():
    for changed, index in [
        ({"bins": 5}, (1, 3, 1)),  # more bins are safer
        ({"prune": 0.25}, (0, 3, 1)),  # less pruning is
        ({"bins": 2, "protect": 0.0001}, (0, 3, 0)),
        ({"more": 1}, (0, 3, 1)),
        ({"bins": 33}, None),
        ({"prune": -0.1}, None),
        ({"bins": "4"}, None),
        ({"bins": True}, None),
        ({"bins": math.nan}, None),
        ({"bins": None}, None),
        ({"metric": "luck"}, None),
        ({"metric": ["magnitude"]}, None),
    ]:
        settings = {"bins": 4, "prune": 0.2, "protect": 0.005, "metric": "magnitude"}
        assert PAPER.point(settings | changed) == (index and Point("magnitude", index))


def test_settings_without_an_axis_or_the_metric_are_no_point():
    settings = PAPER.settings(PAPER.safest("magnitude"))
    for name in settings:
        assert PAPER.point({key: value for key, value in settings.items() if key != name}) is None


def test_an_axis_without_an_order_of_numbers_knows_only_its_own_values():
    for axis in (Axis("a", (3,)), Axis("a", (1, 3, 2))):
        assert axis.nearest_safe_index(3) is not None and axis.nearest_safe_index(0) is None


def test_points_run_from_the_most_aggressive_to_the_safest():
    points = PAPER.points("sensitivity")
    assert len(points) == 108 and list(points) == sorted(points)
    assert (points[0], points[-1]) == (Point("sensitivity", (0,) * len(PAPER.axes)), PAPER.safest("sensitivity"))


@given(*[st.builds(Point, st.sampled_from("ab"), st.tuples(*[st.integers(0, 2)] * 3))] * 3)
def test_dominated_is_a_strict_order_within_a_variant(a, b, c):
    assert not (is_dominated(a, b) and is_dominated(b, a)) and not is_dominated(a, a)
    assert not (is_dominated(a, b) and is_dominated(b, c)) or is_dominated(a, c)
    assert not is_dominated(a, b) or a.variant == b.variant


def test_dominated_means_no_safer_anywhere():
    assert is_dominated(Point("", (0, 1)), Point("", (1, 1)))
    assert not is_dominated(Point("", (0, 2)), Point("", (1, 1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Axis("bins", ()),
        lambda: Axis("bins", (4, 4)),
        lambda: Axis("metric", (1, 2)),
        lambda: Space((Axis("a", (1,)), Axis("a", (2,)))),
        lambda: Space((), ()),
        lambda: Space((), ("a", "a")),
        lambda: PAPER.resolve_variants(["luck"]),
        lambda: PAPER.resolve_variants([]),
    ],
)
def test_a_space_that_means_nothing_is_refused(make):
    with pytest.raises(PolicyError):
        make()


def test_an_outcome_is_plain_data_without_nan():
    trials = (
        Trial(Point("", (0, 0)), 10.5, math.nan, 0.25),
        Trial(Point("", (1, 1)), 20.0, -math.inf, 0.1234567),
    )
    space = space_of((2, 2))
    document = SearchResult(trials[1], trials, "diagonal", 2).to_json(space)
    assert (
        json.loads(json.dumps(document, allow_nan=False))
        == document
        == {
            "method": "diagonal",
            "rounds": 2,
            "chosen": {"settings": {"axis0": 1, "axis1": 1}, "size": 20.0, "degradation": "-inf", "seconds": 0.123},
            "trials": [
                {"settings": {"axis0": 0, "axis1": 0}, "size": 10.5, "degradation": "nan", "seconds": 0.25},
                {"settings": {"axis0": 1, "axis1": 1}, "size": 20.0, "degradation": "-inf", "seconds": 0.123},
            ],
        }
    )
    assert SearchResult(None, (), "diagonal", 0).to_json(space)["chosen"] is None
