"""Values come back within half a step of their run's grid, as many bytes as were reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from contracts.compressor import FINITE, CompressorContract, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.comm import CompressorContext, Uniform
from shrinkpoint.comm.compressors.layout import unpack_planes


class TestUniform(CompressorContract):
    compressors = (
        *(Uniform(bits) for bits in range(1, 9)),
        *(Uniform(bits, 64) for bits in (1, 3, 4, 8)),
        Uniform(4, 1),
        Uniform(5, 33),
        Uniform(2, "row"),
        Uniform(7, "channel"),
        Uniform(4, 64, dither=True),
        Uniform(6, dither=True),
    )


def decoded(compressor: Uniform, x: Tensor, key: int = 0) -> Tensor:
    context = CompressorContext(key=key)
    return compressor.decode(compressor.encode(x, context), torch.empty_like(x), context)


def ranges(x: Tensor, size: int) -> Tensor:
    """Of each value's run, least and most: float64."""
    runs = torch.arange(x.numel()) // size
    flat = x.reshape(-1).double()
    least = torch.full((int(runs.max()) + 1,), math.inf, dtype=torch.float64).scatter_reduce_(0, runs, flat, "amin")
    most = torch.full_like(least, -math.inf).scatter_reduce_(0, runs, flat, "amax")
    return torch.stack([least, most])[:, runs].view(2, *x.shape)


@settings(deadline=None, max_examples=100)
@given(st.lists(FINITE, min_size=1, max_size=200), st.integers(1, 8), st.sampled_from([None, 1, 7, 64]))
def test_values_come_back_within_half_a_step(values, bits, group):
    x = torch.tensor(values).clamp(-1e37, 1e37)
    least, most = ranges(x, group or len(values))
    # A range in bfloat16 begins up to 2^-7 of its ends lower, and its step is up to 2^-7 of itself larger.
    lower = least - (0.0 if group is None else 1.0) * (least.abs() * 2.0**-7 + 2.0**-132)
    step = (most - lower) / (2**bits - 1) * (1.0 if group is None else 1 + 2.0**-7)
    rounding = torch.maximum(least.abs(), most.abs()) * 2.0**-22 + 2.0**-148
    error = (decoded(Uniform(bits, group), x).double() - x.double()).abs()
    assert (error <= torch.maximum(step / 2, 2.0**-112 * torch.ones_like(step)) + rounding).all()


def test_ends_of_one_range_come_back_as_they_were():
    x = torch.tensor([-1.5, 0.2, 0.3, 2.5])
    for bits in range(1, 9):
        out = decoded(Uniform(bits), x)
        assert out[0] == x[0] and (out[3] - x[3]).abs() < 1e-6


def test_a_constant_round_trips():
    for bits in (1, 4, 8):
        for value in (0.0, 1.0, -3.0, 0.37, 1e-30):
            x = torch.full((3, 70), value)
            assert torch.equal(decoded(Uniform(bits), x), x)
            assert (decoded(Uniform(bits, 64), x) - x).abs().max() <= abs(value) * 2.0**-14


def test_zeros_stay_zeros_in_every_group():
    x = torch.zeros(5, 64)
    x[2] = noise((64,))
    out = decoded(Uniform(4, 64, dither=True), x, key=3)
    assert (out[[0, 1, 3, 4]] == 0).all() and out[2].any()


def test_runs_are_what_the_group_says():
    x = noise((3, 4, 5, 6))
    rows = {None: 1, 7: math.ceil(360 / 7), "row": 60, "channel": 12}
    for group, runs in rows.items():
        head = runs * (8 if group is None else 4)
        assert Uniform(4, group).wire_bytes(x.shape, x.dtype) == head + math.ceil(360 / 64) * 32
    for group, size in (("row", 6), ("channel", 30)):
        assert torch.equal(decoded(Uniform(3, group), x), decoded(Uniform(3, size), x))
    flat = noise((9, 10))
    assert torch.equal(decoded(Uniform(3, "channel"), flat), decoded(Uniform(3, 10), flat))


def test_a_message_is_the_least_of_all_runs_then_the_steps_then_codes():
    x = noise((2, 64))
    wire = Uniform(4, 64).encode(x)
    lo, step = wire[:4].view(torch.bfloat16).double(), wire[4:8].view(torch.bfloat16).double()
    codes = unpack_planes(wire[8:], 128, 4).view(2, 64)
    assert (lo <= x.amin(1)).all() and (lo + 15 * step >= x.amax(1)).all()
    assert torch.equal(codes.double(), ((x.double() - lo[:, None]) / step[:, None] + 0.5).floor())
    whole = Uniform(4).encode(x)
    assert whole[:4].view(torch.float32) == x.min()
    assert whole[4:8].view(torch.float32) == (x.max() - x.min()) / torch.tensor(15.0)


def test_only_the_run_with_a_value_that_is_not_finite_is_nan():
    for bad in (math.nan, math.inf, -math.inf):
        x = noise((4, 64))
        x[1, 5] = bad
        out = decoded(Uniform(4, 64), x)
        assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()
        assert decoded(Uniform(4), x).isnan().all()


@pytest.mark.parametrize("compressor", [Uniform(1), Uniform(4), Uniform(4, 2), Uniform(8, 2, dither=True)])
def test_a_range_beyond_float32_is_nan_and_nothing_becomes_infinite(compressor):
    wide = torch.tensor([-3e38, 3e38])
    assert decoded(compressor, wide).isnan().all()
    for x in (torch.tensor([3.4e38, 0.0]), torch.tensor([-3.4e38, 0.0]), torch.tensor([3.4028234e38] * 2)):
        assert not decoded(compressor, x).isinf().any()


def test_a_value_beyond_float32_is_nan():
    assert decoded(Uniform(8), torch.tensor([1.0, 1e300], dtype=torch.float64)).isnan().all()


def test_the_largest_of_a_narrow_dtype_comes_back_finite():
    for dtype in (torch.float16, torch.bfloat16):
        most = torch.finfo(dtype).max
        for group in (None, 3):
            x = torch.tensor([most, 0.0, most], dtype=dtype)
            assert decoded(Uniform(8, group), x).isfinite().all()


def test_dither_makes_the_error_nothing_on_average_and_differs_by_key():
    x = torch.full((64,), 0.3)
    x[0], x[1] = 0.0, 1.0
    outs = torch.stack([decoded(Uniform(1, 64, dither=True), x, key=key * 7919)[2:] for key in range(400)])
    error = outs - 0.3
    assert error.mean().abs() < 0.01 and 0.25 < error.std() < 0.33
    assert not torch.equal(outs[0], outs[1])
    plain = decoded(Uniform(1, 64), x)[2:] - 0.3
    assert (plain.abs() > 0.29).all()


@pytest.mark.parametrize("group", [None, 64, 100, 3333, 70_000])
def test_threads_change_no_byte(group):
    x, compressor, threads = noise((3, 100_001)), Uniform(4, group, dither=True), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wire, out = compressor.encode(x, CompressorContext(3)), decoded(compressor, x, 3)
        assert torch.equal(wire, compressor._encode_torch(x, CompressorContext(3)))
        torch.set_num_threads(3)
        assert torch.equal(compressor.encode(x, CompressorContext(3)), wire) and torch.equal(
            decoded(compressor, x, 3), out
        )
    finally:
        torch.set_num_threads(threads)


def test_buffers_that_do_not_fit_are_refused():
    values, wire = np.zeros(100, np.float32), np.zeros(4 * 2 + 64, np.uint8)
    _native.uniform_encode(values, 64, 4, wire)
    for size, bits, short, message in (
        (64, 4, wire[1:], "wire: wrong number of bytes"),
        (50, 5, wire, "wire: wrong number of bytes"),
        (0, 4, wire, "size: expected at least 1"),
        (64, 0, wire, "bits: expected 1 to 8"),
        (64, 9, wire, "bits: expected 1 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            _native.uniform_encode(values, size, bits, short)
        with pytest.raises(ValueError, match=message):
            _native.uniform_decode(short, size, bits, values)
