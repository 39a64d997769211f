"""Blocks of small floats: what is on a grid crosses exactly, and the exponent fits the block."""

from __future__ import annotations

import torch
from contracts.compressor import CompressorContract, noise
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.comm import BlockFloat

WIDTHS = tuple(range(2, 9))


class TestBlockFloat(CompressorContract):
    compressors = (*map(BlockFloat, (2, 3, 4, 8)), BlockFloat(5, 16), BlockFloat(3, 128))


def round_trip(compressor: BlockFloat, x: Tensor) -> Tensor:
    return compressor.decode(compressor.encode(x), torch.empty_like(x))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(WIDTHS), st.sampled_from([16, 32, 128]), st.integers(0, 999), st.integers(-90, 90))
def test_integers_within_reach_times_a_power_of_two_cross_exactly(width, block, seed, power):
    most, random = 2 ** (width - 1) - 1, torch.Generator().manual_seed(seed)
    x = torch.randint(-most, most + 1, (200,), generator=random) * 2.0**power
    assert torch.equal(round_trip(BlockFloat(width, block), x), x)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(WIDTHS), st.integers(0, 999), st.sampled_from([1.0, 1e-20, 1e30]))
def test_what_was_decoded_crosses_again_as_it_is(width, seed, scale):
    compressor = BlockFloat(width)
    once = round_trip(compressor, noise((150,), seed) * scale)
    assert bits(round_trip(compressor, once)) == bits(once)


def test_the_error_is_half_a_step_at_most_but_for_the_largest_values():
    for width in WIDTHS:
        x = noise((100, 32))
        step = torch.exp2(x.abs().amax(1, keepdim=True).log2().floor() - (width - 2))
        reach = step / 2 * (2 ** (width - 1) - 0.5)
        inside = x.abs() <= reach
        off = (round_trip(BlockFloat(width), x) - x).abs()
        assert (off <= step / 2)[inside].all() and inside.float().mean() > 0.5


def test_it_has_less_error_than_the_exponent_of_the_largest_value_gives():
    for width in (2, 3, 4):
        x, most = noise((200, 32)), 2 ** (width - 1) - 1
        step = torch.exp2(x.abs().amax(1, keepdim=True).log2().floor() - (width - 2))
        plain = (x / step).round().clamp(-most, most) * step
        assert (round_trip(BlockFloat(width), x) - x).norm() < 0.95 * (plain - x).norm()


def test_only_the_block_of_a_value_that_is_not_finite_is_lost():
    x = noise((3, 32))
    x[1, 7] = -torch.inf
    out = round_trip(BlockFloat(4), x)
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


def test_the_largest_floats_stay_finite_and_the_smallest_become_zero():
    largest = torch.tensor([3.4028234e38, -3.4028234e38, 1.0])
    out = round_trip(BlockFloat(4), largest)
    assert out.isfinite().all() and ((out[:2] / largest[:2] - 1).abs() < 0.2).all()
    assert (round_trip(BlockFloat(4), torch.full((40,), 2.0**-112)) == 0).all()
    assert (round_trip(BlockFloat(4), torch.full((40,), 2.0**-111)) == 2.0**-111).all()
