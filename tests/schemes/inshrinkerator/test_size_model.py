"""Predicted sizes put settings in the order in which their files are."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from helpers.round_trip import Written, write
from helpers.small_training import Digits, LettersRun, Run

from shrinkpoint import Inshrinkerator
from shrinkpoint.quantize.statistics import MIN_MAGNITUDE
from shrinkpoint.schemes.evaluate import TrialEvaluator
from shrinkpoint.schemes.inshrinkerator.partition import MAGNITUDE
from shrinkpoint.schemes.inshrinkerator.scheme import SPACE
from shrinkpoint.schemes.search.candidates import PreviousCodes
from shrinkpoint.schemes.search.space import Point
from shrinkpoint.schemes.select import select_tensors
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import flatten

BEFORE = {"bins": 8, "embedding_bins": 32, "prune": 0.2, "protect": 0.005}


@lru_cache
def two_times(name: str) -> list[dict[str, torch.Tensor]]:
    run = Run(lambda: Digits(width=512), steps=40) if name == "digits" else LettersRun(steps=40)
    return [{k: v.clone() for k, v in run.steps(20).model.state_dict().items()} for _ in range(2)]


@lru_cache
def before(name: str) -> Written:
    return write(two_times(name)[0], scheme=Inshrinkerator(config=BEFORE))


def predicted(state, points: list[Point], parent: Written | None) -> list[float]:
    flat = flatten(state)
    tensors = select_tensors(flat, GlobalTensors.from_state(flat)).tensors
    earlier = PreviousCodes() if parent is None else PreviousCodes.from_codebooks(parent.reference().quantized, tensors)
    found = Inshrinkerator(config=BEFORE).candidates(
        tensors, earlier, TrialEvaluator(flat, None), GlobalStats(GlobalTensors.from_state(flat), tensors)
    )
    return [found.size(point) for point in points]


def real(state, point: Point, parent: Written | None) -> int:
    settings = SPACE.settings(point)
    written = write(state, parent, scheme=Inshrinkerator(config=settings))
    quantized = [one for one in written.records() if one.recipe["kind"] == "quantized"]
    return sum(memoryview(part).nbytes for one in quantized for part in one.parts.values())


def some_points(name: str) -> list[Point]:
    """A dozen settings, spread over the space."""
    found = [
        Point(MAGNITUDE, (b, e, p, q))
        for b in range(6)
        for e in range(2)
        for p in range(6)
        for q in range(3)
        if (b + 2 * p + q + e) % 7 == 0
    ]
    return [point for point in found if name == "letters" or point.index[1] == 1][:: 1 if name == "digits" else 2]


def correlation(a, b) -> float:
    ranks = [np.argsort(np.argsort(np.asarray(one))) for one in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("name", ["digits", "letters"])
def test_the_order_of_predictions_is_the_order_of_files(name, delta):
    parent = before(name) if delta else None
    state, points = two_times(name)[1], some_points(name)
    assert len(points) >= 12
    guesses = predicted(state, points, parent)
    sizes = [real(state, point, parent) for point in points]
    assert correlation(guesses, sizes) > 0.9, [*zip(guesses, sizes, strict=True)]
    assert all(0.6 < guess / size < 1.7 for guess, size in zip(guesses, sizes, strict=True)), [
        *zip(guesses, sizes, strict=True)
    ]


def test_the_smallest_by_prediction_is_nearly_the_smallest():
    for delta in (False, True):
        parent, state, points = before("digits") if delta else None, two_times("digits")[1], some_points("digits")
        guesses = predicted(state, points, parent)
        sizes = [real(state, point, parent) for point in points]
        assert sizes[int(np.argmin(guesses))] <= 1.05 * min(sizes)


def test_predictions_are_finite_and_rise_where_they_must():
    """More is protected: more bits. More centers: more bits, as long as nothing is taken over from before."""
    state, points = two_times("letters")[0], [*SPACE.points(MAGNITUDE)]
    sizes = dict(zip(points, predicted(state, points, None), strict=True))
    assert all(math.isfinite(size) and size > 0 for size in sizes.values())
    for point, size in sizes.items():
        for axis in (0, 1, 3):
            index = list(point.index)
            index[axis] += 1
            above = sizes.get(Point(MAGNITUDE, tuple(index)))
            assert above is None or above > size * 0.995, (SPACE.settings(point), axis)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(64, 64),
        torch.ones(64, 64),
        torch.eye(64),
        torch.full((64, 64), 1e-38),
        torch.full((64, 64), 3e38),
        torch.tensor([-1.0, 1.0]).repeat(64, 32),
        torch.randn(64, 65).half(),
        torch.randn(100, 70).bfloat16() * 1e30,
    ],
)
def test_odd_weights_have_a_size_and_a_file(x):
    points = [*SPACE.points(MAGNITUDE)][1::2]
    assert all(not math.isnan(size) and size > 0 for size in predicted({"a.weight": x}, points, None))
    for point in points[::20]:
        written = write({"a.weight": x}, scheme=Inshrinkerator(config=SPACE.settings(point)))
        found = written.read()["a.weight"]
        assert found.dtype == x.dtype and bool(found.isfinite().all())
        assert float((found.float() - x.float()).abs().max()) <= float(x.float().abs().max()) + 1.1 * MIN_MAGNITUDE


def test_after_what_did_not_change_hardly_anything_is_to_be_stored():
    state, points = two_times("digits")[0], [Point(MAGNITUDE, (2, 1, 3, 1))]
    assert SPACE.settings(points[0]).items() >= BEFORE.items()
    (fresh,), (again,) = predicted(state, points, None), predicted(state, points, before("digits"))
    assert again < 0.1 * fresh
