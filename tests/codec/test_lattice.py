"""Points of a lattice stand for what docs/format.md says, and what is rounded to them has an error that is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.lattice_records import (
    DTYPES,
    MOST_CODE,
    NOTHING,
    SHAPES,
    alike,
    by_the_document,
    codes_of,
    lattice_of,
    lattices,
    nearest,
    points_of,
    squares,
)
from helpers.strategies import bits, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import lattice_record as reference

from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.tensors.dtypes import torch_dtype

SIDE = 256
SEEDS = (1, 77, 0x9E3779B1, 2**32 - 1)


@st.composite
def drawn(draw: st.DrawFn, law: str) -> LatticeTensor:
    shape = draw(st.sampled_from(SHAPES) | shapes())
    codes = codes_of(law, shape, draw(st.sampled_from(["none", "near", "far"])), random=draw(st.integers(0, 99)))
    return LatticeTensor(codes, draw(lattices(law, shape)))


@settings(deadline=None, max_examples=30)
@given(drawn("linear"), st.sampled_from(DTYPES))
def test_multiples_of_a_step_are_what_the_document_says(points, dtype):
    assert bits(points.dequantize(torch_dtype(dtype))) == bits(by_the_document(points, dtype))


@settings(deadline=None, max_examples=30)
@given(drawn("relative"), st.sampled_from(DTYPES))
def test_multiples_of_another_tensor_s_roots_are_what_the_document_says(points, dtype):
    shape, random = tuple(points.codes.shape), torch.Generator().manual_seed(0)
    for other in (squares(shape), torch.rand(shape, generator=random) * 1e-6, torch.full(shape, 1e-42)):
        found = points.dequantize(torch_dtype(dtype), other)
        assert bits(found) == bits(by_the_document(points, dtype, other))


@settings(deadline=None, max_examples=30)
@given(drawn("log"), st.sampled_from(DTYPES))
def test_powers_of_two_are_what_the_document_says(points, dtype):
    assert bits(points.dequantize(torch_dtype(dtype))) == bits(by_the_document(points, dtype))


def test_the_eight_powers_have_the_bits_that_the_document_prints():
    lattice = Lattice("log", torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.int16))
    found = LatticeTensor(torch.arange(8, dtype=torch.int16), lattice).dequantize(torch.float32)
    assert tuple(found.view(torch.int32).tolist()) == reference.EIGHTHS
    exact = np.array([np.float32(2.0 ** (k / 8)) for k in range(8)])
    assert bits(found) == exact.tobytes()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_dither_is_the_hash_that_the_document_gives(seed):
    lattice = lattice_of("linear", (20, 30), seed=seed)
    found = lattice.dither((20, 30))
    assert isinstance(found, torch.Tensor)
    assert bits(found) == reference.dither(seed, (20, 30)).tobytes()
    halves = found * 512
    assert bool((halves % 2 == 1).all()) and float(halves.abs().max()) <= 255


# errors


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([shape for shape in SHAPES if 0 not in shape]),
    st.sampled_from(["linear", "relative"]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-3, 1.0, 30.0]),
    st.integers(0, 99),
)
def test_the_error_of_the_nearest_points_is_at_most_half_a_step(shape, law, seed, spread, random):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(random)) * spread
    other = torch.rand(shape, generator=torch.Generator().manual_seed(5)) + 0.5 if law == "relative" else None
    lattice = lattice_of(law, shape, seed=seed, random=random)
    found = nearest(x, lattice, other).dequantize(torch.float32, other)
    matrix = reference.sides(shape)
    steps = lattice.scales(None if other is None else other.reshape(matrix)).expand(matrix).reshape(shape)
    assert bool(((found - x).abs() <= 0.5 * steps * (1 + 1e-5) + 1e-6 * x.abs()).all())


VALUES = {
    "zeros": lambda place: torch.zeros(SIDE, SIDE),
    "one value": lambda place: torch.full((SIDE, SIDE), 0.3),
    "on the points of no dither": lambda place: torch.randint(-9, 9, (SIDE, SIDE), generator=place).float(),
    "on a coarser grid": lambda place: torch.randint(-9, 9, (SIDE, SIDE), generator=place).float() * 8,
    "on a finer grid": lambda place: torch.randint(-9, 9, (SIDE, SIDE), generator=place).float() / 4,
    "far below a step": lambda place: torch.randn(SIDE, SIDE, generator=place) * 1e-3,
    "far above a step": lambda place: torch.randn(SIDE, SIDE, generator=place) * 1e3,
    "as wide as a step": lambda place: torch.randn(SIDE, SIDE, generator=place),
    "on another dither's points": lambda place: (
        torch.randint(-9, 9, (SIDE, SIDE), generator=place).float()
        + torch.from_numpy(reference.dither(9, (SIDE, SIDE)))
    ),
}


def errors(values: torch.Tensor, seed: int) -> torch.Tensor:
    """In steps; float64."""
    rows, columns = torch.arange(-8, 8).repeat(SIDE // 16).short(), torch.arange(SIDE).sub(SIDE // 2).div(16).short()
    lattice = Lattice("linear", rows, columns, seed=seed)
    steps = lattice.scales().double()
    x = (values.double() * steps).float()
    return (nearest(x, lattice).dequantize(torch.float32).double() - x.double()) / steps


def is_even(error: torch.Tensor) -> bool:
    """Mean 0 and variance 1/12, of the whole, of each row's and column's mean and of each sixteenth of a cell; within
    five standard deviations of what chance does, and half a dither's grain."""
    count, grain = error.numel(), 1 / 512
    if abs(float(error.mean())) > 5 * (12 * count) ** -0.5 + grain:
        return False
    if abs(float(error.square().mean()) * 12 - 1) > 5 * (0.8 / count) ** 0.5 + 4 * grain:
        return False
    if any(float(error.mean(axis).abs().max()) > 5 * (12 * SIDE) ** -0.5 + grain for axis in (0, 1)):
        return False
    shares = torch.histc(error.clamp(-0.5, 0.5), 16, -0.5, 0.5) / count
    return float((shares - 1 / 16).abs().max()) < 5 * (1 / 16 / count) ** 0.5 + 2 * grain


@pytest.mark.parametrize("values", VALUES)
def test_with_a_seed_the_error_is_even_whatever_the_values_are(values):
    for seed in SEEDS:
        x = VALUES[values](torch.Generator().manual_seed(seed % 1000))
        assert is_even(errors(x, seed))


def test_without_a_seed_it_is_not_and_the_measure_of_it_says_so():
    made = {name: is_even(errors(make(torch.Generator().manual_seed(1)), 0)) for name, make in VALUES.items()}
    assert {name for name, even in made.items() if even} <= {"as wide as a step", "far above a step"} | {
        "on another dither's points"
    }
    assert not all(made.values())


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1])


def test_errors_say_nothing_of_their_neighbours_of_the_values_or_of_those_under_another_seed():
    most = 5 / SIDE
    for x in (torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).mul(0.4), torch.zeros(SIDE, SIDE)):
        one, other, next_seed = (errors(x, seed) for seed in (1, 77, 2))
        assert abs(correlation(one, other)) < most and abs(correlation(one, next_seed)) < most
        assert abs(correlation(one[:, 1:], one[:, :-1])) < most and abs(correlation(one[1:], one[:-1])) < most
        assert not bool(x.any()) or abs(correlation(one, x)) < most


def test_an_average_over_seeds_is_the_value_itself():
    """What a run that is restored after every save has: a step a third as large as its points' distance is not lost."""
    x = torch.full((64, 64), 1 / 3)
    lattice = Lattice("linear", torch.zeros(64, dtype=torch.int16), torch.zeros(64, dtype=torch.int16))
    kept = [nearest(x, replace(lattice, seed=seed)).dequantize(torch.float32) for seed in range(1, 101)]
    assert float((torch.stack(kept).mean(0) - x).abs().max()) < 6 * (12 * 100) ** -0.5
    assert float((torch.stack(kept).mean() - 1 / 3).abs()) < 0.003


# powers of two


@settings(deadline=None, max_examples=20)
@given(drawn("log"))
def test_powers_of_two_are_zero_where_they_are_nothing_and_above_it_elsewhere(points):
    for dtype in (torch.float32, torch.bfloat16):
        values, nothing = points.dequantize(dtype), points.codes == NOTHING
        assert bits(values[nothing]) == bytes(dtype.itemsize * int(nothing.sum()))
        assert bool((values[~nothing] > 0).all()) and bool(values.isfinite().all())


@pytest.mark.parametrize("step", [1, 8, 24, 1024])
def test_the_error_of_the_nearest_power_is_at_most_half_a_step(step):
    v = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).square() * 1e-8 + 1e-14
    lattice = lattice_of("log", (40, 50), at=-212, step=step)
    exact = v.double().log2() * 8
    codes = ((exact - lattice.exponents()) / step).round()
    found = LatticeTensor(codes.to(torch.int16), lattice).dequantize(torch.float32)
    assert float((found.double().log2() * 8 - exact).abs().max()) <= step / 2 + 1e-4


def test_powers_beyond_the_range_of_floats_are_its_ends():
    lattice = Lattice("log", torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.int16), step=1024)
    found = LatticeTensor(torch.tensor([-9, -1, 0, 1, 9, MOST_CODE, -MOST_CODE], dtype=torch.int16), lattice)
    ends = [2.0**-126, 2.0**-126, 1.0, 2.0**127, 2.0**127, 2.0**127, 2.0**-126]
    assert found.dequantize(torch.float32).tolist() == ends


# what they are


def test_lattices_are_equal_if_all_of_them_is():
    one = lattice_of("log", (5, 6), step=3, seed=4)
    assert one == lattice_of("log", (5, 6), step=3, seed=4)
    others = [
        replace(one, seed=5),
        replace(one, step=4),
        replace(one, rows=one.rows + 1),
        replace(one, columns=one.rows),
        replace(one, spacing="linear", step=1),
        replace(one, columns=one.columns[:-1]),
    ]
    assert all(one != other for other in others) and one != "a lattice"


@given(st.integers(0, 99), st.integers(0, 4), st.integers(0, 4), st.booleans())
def test_exponents_are_rounded_to_few_differences_to_the_parents(seed, by_row, by_column, follows):
    random = np.random.default_rng(seed)
    own, other = (
        Lattice("log", *(torch.from_numpy(random.integers(-90, 90, n).astype(np.int16)) for n in (30, 20)), step=8)
        for _ in range(2)
    )
    found = own.rounded(other if follows else None, (by_row, by_column))
    for side, allowed in (("rows", by_row), ("columns", by_column)):
        x, y, z = (getattr(lattice, side).to(torch.int32) for lattice in (found, own, other))
        assert int((x - y).abs().max()) <= allowed and not (((x - z) if follows else x) % (2 * allowed + 1)).any()
    assert found.rounded(found, (by_row, by_column)) is found
    assert torch.equal(own.rounded(replace(other, step=4), (0, 0)).rows, own.rows)


def test_values_do_not_depend_on_how_codes_and_squares_lie_in_memory():
    points, other = points_of("relative", (6, 8), seed=3), squares((6, 8))
    strided = replace(points, codes=points.codes.t().contiguous().t())
    expected = bits(points.dequantize(torch.float32, other))
    assert bits(strided.dequantize(torch.float32, other.t().contiguous().t())) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("law", ["linear", "relative", "log"])
def test_values_on_a_gpu_are_those_on_the_cpu(law):
    for random, kind in enumerate(("near", "far", "none")):
        points = points_of(law, (60, 70), kind, seed=random, random=random, at=-100, spread=400)
        other = squares((60, 70)) if law == "relative" else None
        there = replace(points, codes=points.codes.cuda())
        for dtype in DTYPES:
            found = there.dequantize(torch_dtype(dtype), None if other is None else other.cuda())
            assert bits(found) == bits(points.dequantize(torch_dtype(dtype), other))
        assert alike(there.cpu(), points)
