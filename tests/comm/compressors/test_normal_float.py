"""Values on the best levels for a normal distribution: right levels, a scale that fits the group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from contracts.compressor import CompressorContract, noise
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.comm import NormalFloat, Uniform
from shrinkpoint.comm.compressors.quantizers import CENTERS, MIN_SCALE

GROUPS = 200


class TestNormal(CompressorContract):
    compressors = (
        NormalFloat(1),
        NormalFloat(2),
        NormalFloat(3),
        NormalFloat(4),
        NormalFloat(3, 16),
        NormalFloat(2, 256),
    )


def round_trip(compressor: NormalFloat | Uniform, x: Tensor) -> Tensor:
    return compressor.decode(compressor.encode(x), torch.empty_like(x))


def error(compressor: NormalFloat | Uniform, x: Tensor) -> float:
    return float((round_trip(compressor, x) - x).norm() / x.norm())


def density(t: float) -> float:
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def below(t: float) -> float:
    return (1 + math.erf(t / math.sqrt(2))) / 2


def cuts(centers: Sequence[float]) -> list[tuple[float, float]]:
    """Between which thresholds a magnitude goes to each center."""
    return list(pairwise([0.0, *((a + b) / 2 for a, b in pairwise(centers)), 40.0]))


def best_centers(count: int) -> np.ndarray:
    """Lloyd's iteration on the positive half of the standard normal."""
    centers, before = np.linspace(0.2, 2.2, count), np.zeros(count)
    while np.abs(centers - before).max() > 1e-12:
        before = centers
        centers = np.array([(density(a) - density(b)) / (below(b) - below(a)) for a, b in cuts(before)])
    return centers


@pytest.mark.parametrize("of", CENTERS)
def test_levels_are_those_of_lloyd_and_max(of):
    assert len(CENTERS[of]) == 2 ** (of - 1)
    assert np.allclose(CENTERS[of], best_centers(len(CENTERS[of])), rtol=0, atol=1e-6)


@pytest.mark.parametrize("of", CENTERS)
def test_the_error_of_normal_values_is_below_that_of_one_right_scale_for_all(of):
    x, kept = noise((2000, 64)), zip(CENTERS[of], cuts(CENTERS[of]), strict=True)
    ideal = 1 - sum(2 * center * center * (below(b) - below(a)) for center, (a, b) in kept)
    assert error(NormalFloat(of), x) < 1.005 * math.sqrt(ideal)


@pytest.mark.parametrize("of", [2, 3, 4])
def test_one_outlier_costs_less_than_the_scale_of_the_mean_magnitude_would(of):
    x = noise((GROUPS, 64))
    x[:, 5] *= 20
    mean = x.abs().mean(1, keepdim=True) * math.sqrt(math.pi / 2)
    centers = torch.tensor(CENTERS[of])
    levels = torch.cat([-centers.flip(0), centers])
    nearest = levels[(x[:, :, None] / mean[:, :, None] - levels).abs().argmin(2)] * mean
    assert error(NormalFloat(of), x) < 0.97 * float((nearest - x).norm() / x.norm())


def test_it_is_smaller_and_nearer_than_uniform_runs_at_two_bits():
    x = noise((GROUPS, 64))
    assert NormalFloat(2).wire_bytes(x.shape, x.dtype) < Uniform(2, 64).wire_bytes(x.shape, x.dtype)
    assert error(NormalFloat(2), x) < 0.8 * error(Uniform(2, 64), x)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.sampled_from([16, 64, 256]), st.integers(0, 999), st.integers(1, 300))
def test_a_value_is_decoded_to_a_level_of_its_group_with_its_sign(of, group, seed, count):
    x = noise((count,), seed)
    out = round_trip(NormalFloat(of, group), x)
    assert torch.equal(out.sign(), x.sign())
    for one in out.split(group):
        ratios = one.abs().double() / max(CENTERS[of])
        assert len(ratios.unique()) <= 2 ** (of - 1)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(0, 999), st.integers(-60, 60))
def test_a_power_of_two_times_the_values_is_decoded_to_as_many_times_the_result(of, seed, power):
    x, compressor = noise((130,), seed), NormalFloat(of)
    assert bits(round_trip(compressor, x * 2.0**power)) == bits(round_trip(compressor, x) * 2.0**power)


def test_only_the_group_of_a_value_that_is_not_finite_is_lost():
    x = noise((3, 64))
    x[1, 7] = torch.inf
    out = round_trip(NormalFloat(3), x)
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


def test_groups_of_zeros_and_of_what_is_too_small_are_zeros():
    assert (round_trip(NormalFloat(2), torch.zeros(70)) == 0).all()
    assert (round_trip(NormalFloat(2), torch.full((70,), MIN_SCALE / 4)) == 0).all()
    assert (round_trip(NormalFloat(2), torch.full((70,), MIN_SCALE * 4)) > 0).all()


def test_zeros_that_fill_the_last_group_up_do_not_change_its_scale():
    x = torch.full((65,), 3.0)
    assert round_trip(NormalFloat(1), x)[64] == round_trip(NormalFloat(1), x)[0]


CENTERS_OF_CELLS = {
    "usual": (0.128, 0.388, 0.657, 0.942, 1.256, 1.618, 2.069, 2.733),
    "two thresholds within a quarter": (0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 2.0, 4.0),
    "beyond the last cell": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
    "falling": (3.0, 2.0, 1.5, 1.0, 0.8, 0.6, 0.4, 0.2),
    "not finite": (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0, float("inf")),
}


@pytest.mark.parametrize("centers", CENTERS_OF_CELLS.values(), ids=CENTERS_OF_CELLS.keys())
def test_instruction_sets_give_the_same_messages_whatever_the_levels_are(centers):
    values = noise((70, 64)).numpy()
    values[::7] *= 10.0 ** np.arange(-35, 35, 7, dtype=np.float32)[:, None]
    values[3, 5], values[5, 5], values[8] = np.inf, np.nan, 0
    values[9, 1:], values[11, 1:] = 0, -0.0
    messages = []
    widest = _native._use_simd(2)
    try:
        for level in (0, 1, 2):
            _native._use_simd(level)
            for threads in (1, 3):
                message = np.zeros(2 * 70 + 70 * 32, np.uint8)
                _native.normal_encode(values, np.array(centers, np.float32), message, group=64, bits=4, threads=threads)
                messages.append(message.tobytes())
    finally:
        _native._use_simd(widest)
    assert len(set(messages)) == 1


@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0, 1000.0])
def test_the_error_is_bounded_by_the_root_mean_square_at_any_mean(mean):
    x = noise((64, 64)) + mean
    compressor = NormalFloat(4, 64)
    out = compressor.decode(compressor.encode(x), torch.empty_like(x))
    size = x.square().mean(1).sqrt()
    assert ((out - x).square().mean(1).sqrt() / size).max() < 0.12
