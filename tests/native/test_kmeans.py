"""Weighted k-means in one dimension: native core and reference agree, and centers are always in order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import kmeans as reference

from shrinkpoint import _native

Floats = NDArray[np.float64]
several = settings(deadline=None, max_examples=50)


def doubles(*values: float) -> Floats:
    return np.array(values, np.float64)


def run(values: Floats, weights: Floats, centers: Floats, iterations: int, tolerance: float = 0.0) -> Floats:
    return _native.kmeans(values, weights, centers, iterations=iterations, tolerance=tolerance)


@st.composite
def points(draw: st.DrawFn, most: int = 60) -> tuple[Floats, Floats]:
    """Values and weights, of which some are 0 but not all."""
    count = draw(st.integers(1, most))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = np.sort(random.standard_normal(count) * draw(st.sampled_from((1e-30, 1.0, 1e12))))
    weights = random.integers(1, 1000, count) * (random.random(count) < draw(st.sampled_from((0.3, 1.0))))
    weights[random.integers(count)] = 3
    if draw(st.booleans()):
        values = np.repeat(values[: max(1, count // 2)], 2)[:count]
    return values, weights[: values.size].astype(np.float64) + (values.size < count)


@several
@given(points(), st.integers(1, 20), st.integers(0, 2**64 - 1), st.integers(0, 8))
def test_native_moves_centers_as_the_reference_does(some: tuple[Floats, Floats], k: int, seed: int, n: int) -> None:
    values, weights = some
    start = _native.kmeans_plus_plus(values, weights, k, seed=seed, squared=True)
    # From places in between, since a value in the middle of two others may fall to either by a rounding.
    start = np.sort(start + np.random.default_rng(seed).standard_normal(k) * 1e-3 * np.abs(values).max())
    expected = reference.kmeans(values.tolist(), weights.tolist(), start.tolist(), n)
    np.testing.assert_allclose(run(values, weights, start, n), expected, rtol=1e-9, atol=1e-9 * np.abs(values).max())


@several
@given(points(), st.integers(1, 40), st.integers(0, 2**64 - 1), st.booleans())
def test_native_starts_where_the_reference_does(some: tuple[Floats, Floats], k: int, seed: int, squared: bool) -> None:
    values, weights = some
    start = _native.kmeans_plus_plus(values, weights, k, seed=seed, squared=squared)
    assert start.tolist() == reference.start(values.tolist(), weights.tolist(), k, seed, squared)


@several
@given(points(), st.integers(1, 256), st.integers(0, 2**64 - 1), st.booleans())
def test_there_are_always_k_centers_in_order_and_they_only_improve(
    some: tuple[Floats, Floats], k: int, seed: int, squared: bool
) -> None:
    values, weights = some
    start = _native.kmeans_plus_plus(values, weights, k, seed=seed, squared=squared)
    assert set(start) <= set(values[weights > 0])
    costs = []
    for iterations in (0, 1, 2, 50):
        centers = run(values, weights, start, iterations)
        assert centers.shape == (k,) and bool((np.diff(centers) >= 0).all()) and bool(np.isfinite(centers).all())
        costs.append(reference.cost(values.tolist(), weights.tolist(), centers.tolist()))
    scale = float((weights * values**2).sum())
    assert all(later <= before + 1e-12 * scale for before, later in pairwise(costs))


def test_every_value_that_weighs_something_is_a_center_when_there_are_enough() -> None:
    values, weights = doubles(-1, -1, 0, 2, 2, 5), doubles(1, 2, 0, 1, 0, 1e-3)
    for squared in (False, True):
        for seed in range(20):
            start = _native.kmeans_plus_plus(values, weights, 6, seed=seed, squared=squared)
            assert start.tolist() == [-1, 2, 5, 5, 5, 5]
    assert run(values, weights, doubles(-1, 2, 5, 5, 5, 5), 9).tolist() == [-1, 2, 5, 5, 5, 5]


def test_a_value_in_the_middle_of_two_centers_belongs_to_the_lower() -> None:
    assert run(doubles(0, 1, 2), doubles(1, 1, 1), doubles(0, 2), 1).tolist() == [0.5, 2]


def test_an_empty_cell_keeps_its_center() -> None:
    values, weights = doubles(0, 1, 8, 9), doubles(1, 1, 0, 0)
    assert run(values, weights, doubles(-5, 0.5, 4, 8.5, 20), 10).tolist() == [-5, 0.5, 4, 8.5, 20]
    assert run(doubles(), doubles(), doubles(1, 2), 10).tolist() == [1, 2]


def test_iterations_end_when_the_cost_falls_by_less_than_the_tolerance() -> None:
    random = np.random.default_rng(1)
    values = np.sort(random.standard_normal(3000))
    weights = np.ones_like(values)
    start = _native.kmeans_plus_plus(values, weights, 16, seed=1, squared=True)
    one, many = run(values, weights, start, 1), run(values, weights, start, 2000)
    assert run(values, weights, start, 50, tolerance=2.0).tolist() == one.tolist()
    ended = run(values, weights, start, 2000, tolerance=1e-3)
    costs = [reference.cost(values.tolist(), weights.tolist(), c.tolist()) for c in (one, ended, many)]
    assert costs[0] > costs[1] > costs[2]
    np.testing.assert_array_equal(run(values, weights, many, 1), many)  # it stands still at the end


def test_clusters_far_apart_are_found() -> None:
    random = np.random.default_rng(2)
    middles = np.arange(8) * 100.0
    values = np.sort((middles[:, None] + random.standard_normal((8, 50))).ravel())
    weights = random.integers(1, 9, values.size).astype(np.float64)
    start = _native.kmeans_plus_plus(values, weights, 8, seed=3, squared=True)
    centers = run(values, weights, start, 50, 1e-9)
    np.testing.assert_allclose(centers, middles, atol=1)


def test_values_far_from_zero_keep_their_digits() -> None:
    values = 1e9 + np.arange(64.0)
    centers = run(values, np.ones(64), 1e9 + np.arange(8) * 8.0, 100)
    expected = reference.kmeans(values.tolist(), [1.0] * 64, (1e9 + np.arange(8) * 8.0).tolist(), 100)
    np.testing.assert_allclose(centers - 1e9, np.array(expected) - 1e9, atol=1e-6)


ONE = doubles(1.0)
INF, NAN = float("inf"), float("nan")
WRONG: dict[str, Callable[[], Any]] = {
    "values that fall": lambda: run(doubles(2, 1), doubles(1, 1), ONE, 1),
    "centers that fall": lambda: run(ONE, ONE, doubles(2, 1), 1),
    "no centers": lambda: run(ONE, ONE, doubles(), 1),
    "257 centers": lambda: run(ONE, ONE, np.arange(257.0), 1),
    "too few weights": lambda: run(doubles(1, 2), ONE, ONE, 1),
    "a weight below 0": lambda: run(ONE, doubles(-1), ONE, 1),
    **{f"value {x}": lambda x=x: run(doubles(x), ONE, ONE, 1) for x in (NAN, INF, -INF)},
    **{f"weight {x}": lambda x=x: run(ONE, doubles(x), ONE, 1) for x in (NAN, INF, -INF)},
    **{f"center {x}": lambda x=x: run(ONE, ONE, doubles(x), 1) for x in (NAN, INF, -INF)},
    **{f"tolerance {x}": lambda x=x: run(ONE, ONE, ONE, 1, x) for x in (NAN, -1.0)},
    "values whose squares overflow": lambda: run(doubles(-1e200, 1e200), doubles(1, 1), ONE, 1),
    "weights whose sum overflows": lambda: run(doubles(0, 1), doubles(1e308, 1e308), ONE, 1),
    "no value to start from": lambda: _native.kmeans_plus_plus(doubles(), doubles(), 2, seed=0, squared=True),
    "no weight to start from": lambda: _native.kmeans_plus_plus(ONE, doubles(0), 2, seed=0, squared=True),
    "no start": lambda: _native.kmeans_plus_plus(ONE, ONE, 0, seed=0, squared=True),
    "257 starts": lambda: _native.kmeans_plus_plus(ONE, ONE, 257, seed=0, squared=True),
    "start of nan": lambda: _native.kmeans_plus_plus(doubles(NAN), ONE, 1, seed=0, squared=True),
    "start of values that fall": lambda: _native.kmeans_plus_plus(
        doubles(2, 1), doubles(1, 1), 1, seed=0, squared=True
    ),
    "distances that overflow": lambda: _native.kmeans_plus_plus(
        doubles(-1e200, 1e200), doubles(1, 1), 2, seed=0, squared=True
    ),
}


def test_a_wrong_argument_is_refused() -> None:
    for call in WRONG.values():
        with pytest.raises(ValueError):
            call()
