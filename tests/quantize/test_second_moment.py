"""Second moments: sums and codes of the native core are torch's, on all instruction sets."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.adam_states import normal, squares
from helpers.parameters import each_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import ZERO_CODE, Lattice, as_matrix
from shrinkpoint.quantize import lattice as lattices
from shrinkpoint.quantize import statistics
from shrinkpoint.quantize.lattice import (
    ErrorWeights,
    PowerZones,
    quantization_error_sums,
    quantize_second_moment,
    quantize_to_lattice,
    quantize_with_errors,
)
from shrinkpoint.quantize.statistics import (
    LOG_UNITS_PER_OCTAVE,
    relative_squares,
    second_moment_sums,
    value_sums,
)

SHAPES = [(1, 1), (7,), (1, 3000), (300, 5), (259, 1030), (3, 2, 3, 3), (2050, 1), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16]
NEAREST = PowerZones(0.5)


def moments(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """First and second moments over many octaves, some of them zero, some denormal."""
    v = squares(*shape, seed=seed, octaves=6)
    m = normal(*shape, seed=seed + 1) * v.sqrt()
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    v, m = v.masked_fill(chosen < 0.2, 0.0), m.masked_fill((chosen > 0.1) & (chosen < 0.3), 0.0)
    return m.to(dtype), v.masked_fill((chosen > 0.9) & (chosen < 0.92), 1e-41).to(dtype)


def lattice_of(shape: tuple[int, ...], step: int, seed: int = 0) -> Lattice:
    rows, columns = as_matrix(torch.zeros(shape)).shape
    generator = torch.Generator().manual_seed(seed)
    return Lattice(
        "log",
        torch.randint(-240, -100, (rows,), generator=generator).to(torch.int16),
        torch.randint(-9, 9, (1 if rows == 1 else columns,), generator=generator).to(torch.int16),
        step=step,
    )


@pytest.fixture(params=[0, 1, 2])
def instruction_set(request):
    _native._use_simd(request.param)
    yield request.param
    _native._use_simd(2)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(("shape", "dtype"), each_value(SHAPES, DTYPES))
def test_the_native_core_and_torch_give_the_same_sums_and_codes(shape, dtype):
    m, v = moments(shape, dtype)
    for first in (m, None):
        native, plain = second_moment_sums(v, first), statistics._second_moment_sums_torch(v, first, True)
        assert (native.is_finite, native.has_negative) == (plain.is_finite, plain.has_negative) == (True, False)
        for name in ("logs", "counts"):
            a, b = getattr(native, name), getattr(plain, name)
            assert torch.equal(a.rows, b.rows) and torch.equal(a.columns, b.columns)
        torch.testing.assert_close(native.values.rows, plain.values.rows, rtol=1e-12, atol=0)
        by_row = second_moment_sums(v, first, by_column=False)
        for name in ("logs", "counts", "values"):
            part = getattr(by_row, name)
            assert torch.equal(part.rows, getattr(native, name).rows) and not part.columns.numel()
        torch.testing.assert_close(native.values.columns, plain.values.columns, rtol=1e-12, atol=0)
        for step in (4, 24) if v.numel() else ():
            lattice, earlier = (
                lattice_of(shape, step),
                quantize_second_moment(v * 3, m, lattice_of(shape, 8, 1), NEAREST),
            )
            for zones, parent in ((PowerZones(0.6), None), (PowerZones(0.5, 0.7, 1.2), earlier[0])):
                points, sums = quantize_second_moment(v, first, lattice, zones, parent)
                matrices = as_matrix(v), None if first is None else as_matrix(first)
                other, other_sums = lattices._quantize_second_moment_torch(*matrices, lattice, zones, parent)
                assert points.codes.dtype == torch.int8 and torch.equal(points.codes, other.codes.reshape(shape))
                assert (sums is None) == (other_sums is None) == (first is None)
                if sums is not None and other_sums is not None:
                    torch.testing.assert_close(sums, other_sums, rtol=1e-9, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 99), st.sampled_from(DTYPES))
def test_logarithms_are_within_an_eighth_of_a_thousandth_of_an_octave(shape, seed, dtype):
    m, v = moments(shape, dtype, seed)
    matrix, present = as_matrix(v).double(), (as_matrix(v) > 0) | (as_matrix(m) != 0)
    logs = matrix.clamp(min=2.0**-120).log2() * present
    sums = second_moment_sums(v, m)
    for axis, found in ((1, sums.logs.rows), (0, sums.logs.columns)):
        errors = found / LOG_UNITS_PER_OCTAVE - logs.sum(axis)
        assert bool((errors.abs() <= 3e-4 * present.sum(axis)).all())
    assert torch.equal(sums.counts.rows, present.sum(1).double())
    assert sums.has_absent(v.numel()) == (not bool(present.all()))


def test_codes_are_the_nearest_powers_and_zero_where_nothing_is_present():
    m, v = moments((64, 96), torch.float32)
    lattice = lattice_of((64, 96), 8)
    points, sums = quantize_second_moment(v, m, lattice, NEAREST)
    present = (v > 0) | (m != 0)
    assert torch.equal(points.codes == ZERO_CODE, ~present)
    decoded = points.dequantize(torch.float32)
    inside = present & (points.codes.abs() < 120) & (v > 2.0**-120)
    assert float((decoded[inside] / v[inside]).log2().abs().max()) < 0.5 + 1e-3
    assert sums is not None
    torch.testing.assert_close(sums, relative_squares(m, decoded).sum(1, dtype=torch.float64))


@pytest.mark.parametrize("threads", [1, 3])
def test_what_has_moved_a_little_keeps_its_point(threads):
    v, step, zones = normal(300, 96, scale=4).exp2(), 16, PowerZones(0.5, above=0.75, below=1.25)
    rows, columns = (torch.zeros(n, dtype=torch.int16) for n in v.shape)
    before = quantize_second_moment(v, None, Lattice("log", rows, columns, step=8), NEAREST)[0]
    moved = v * normal(300, 96, seed=1, scale=2).exp2()
    lattice = Lattice("log", rows + 7, columns, step=step)
    after = quantize_second_moment(moved, None, lattice, zones, before, threads)[0]
    nearest = ((before.codes.float() * 8 - 7) / step).round()
    places = (moved.log2() * 8 - 7) / step
    stays = (places - nearest < zones.above) & (places - nearest > -zones.below)
    assert 0.2 < float(stays.float().mean()) < 0.9
    certain = ((places - nearest - zones.above).abs() > 0.01) & ((places - nearest + zones.below).abs() > 0.01)
    certain &= ((places % 1) - 0.5).abs() > 0.01
    assert torch.equal(after.codes[certain], torch.where(stays, nearest, places.round())[certain].to(torch.int8))


@pytest.mark.parametrize(("where", "value"), each_value(["m", "v"], [math.nan, math.inf, -math.inf, -1.0]))
def test_what_is_not_finite_or_below_zero_is_reported(value, where):
    for device_path in (second_moment_sums, lambda v, m: statistics._second_moment_sums_torch(v, m, True)):
        m, v = moments((40, 70), torch.float32)
        (v if where == "v" else m)[39, 69] = value
        sums = device_path(v, m)
        assert sums.is_finite == math.isfinite(value)
        assert sums.has_negative == (value < 0 and where == "v")
    assert not second_moment_sums(torch.full((3,), -0.0)).has_negative


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_magnitude_mean_and_deviation_of_values(dtype):
    for shape in [(1,), (3, 5), (2050, 129), (0,)]:
        x = (normal(*shape, seed=3) + 100).to(dtype)
        found, doubles = value_sums(x), x.double()
        assert found.max_magnitude == (float(x.abs().max()) if x.numel() else 0.0)
        if x.numel():
            assert found.mean == pytest.approx(float(doubles.mean()), rel=1e-12)
            assert value_sums(x).std == pytest.approx(float(doubles.std(correction=0)), rel=1e-9, abs=1e-12)
        x[...] = 0.1
        assert value_sums(x).std == 0  # of values that are all the same, exactly
        for value in (math.nan, math.inf, -math.inf):
            if x.numel():
                x.view(-1)[-1] = value
                assert value_sums(x).max_magnitude == pytest.approx(abs(value), nan_ok=True)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("shape", [(5,), (130, 1030)])
def test_sums_over_the_errors_of_a_weight(shape):
    weight, slopes, curved = normal(*shape), normal(*shape, seed=1), squares(*shape, seed=2)
    rows = 1 if len(shape) == 1 else shape[0]
    lattice = Lattice("linear", torch.full((rows,), -8, dtype=torch.int16), torch.zeros(1, dtype=torch.int16), seed=7)
    points = quantize_to_lattice(weight, lattice)
    assert points is not None and points.codes.dtype == torch.int8
    error = (points.dequantize(torch.float32) - weight).double()
    weights = ErrorWeights(as_matrix(slopes), as_matrix(curved))
    found = quantization_error_sums(weight, points, weights)
    expected = (slopes * error).sum(), (curved * error.square()).sum(), error.square().sum()
    assert found == pytest.approx([float(part) for part in expected], rel=1e-9)
    assert quantization_error_sums(weight, points, ErrorWeights()) == (0.0, 0.0, pytest.approx(float(expected[2])))
    for part in (weights, ErrorWeights(), ErrorWeights(slopes=weights.slopes)):
        both = quantize_with_errors(weight, lattice, part)  # the same sums to the last bit, and the same points
        assert both is not None and both[1] == quantization_error_sums(weight, points, part)
        assert torch.equal(both[0].codes, points.codes)
    for scale, dtype in ((300, torch.int16), (1e9, None)):  # with codes of two bytes, and beyond all points
        wide = quantize_with_errors(weight * scale, lattice, weights)
        assert (None if wide is None else wide[0].codes.dtype) == dtype
        if wide is not None:
            assert wide[1] == quantization_error_sums(weight * scale, wide[0], weights)
