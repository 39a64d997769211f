"""A rotation of blocks before another compressor: its own inverse, and outliers are shared out."""

from __future__ import annotations

import pytest
import torch
from contracts.compressor import CompressorContract, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.comm import BlockFloat, Compressor, Hadamard, Identity, NormalFloat, TopK, Uniform
from shrinkpoint.comm.compressors.hadamard import BLOCK_SIZES, hadamard_transform

OUTLIERS = 0.05
"""Share of groups that hold one in the trials."""


class TestHadamard(CompressorContract):
    compressors = (
        Hadamard(NormalFloat(3)),
        Hadamard(Uniform(4, 64), 16),
        Hadamard(Uniform(4), 256),
        Hadamard(BlockFloat(4), 64, outlier_threshold=3.0),
        Hadamard(Identity(), 64, outlier_threshold=2.5),
        Hadamard(Hadamard(Identity(), 16), 64),
        Hadamard(TopK(0.25), 64),
    )


def round_trip(compressor: Compressor, x: Tensor) -> Tensor:
    return compressor.decode(compressor.encode(x), torch.empty_like(x))


def error(compressor: Compressor, x: Tensor) -> float:
    return float((round_trip(compressor, x) - x).norm() / x.norm())


def with_outliers(rows: int = 400) -> Tensor:
    x = noise((rows, 64))
    x[: round(rows * OUTLIERS), 9] = 30.0
    return x


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_the_butterfly_is_hadamard_s_matrix_and_its_own_inverse(block):
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    assert torch.equal(hadamard_transform(torch.eye(block)) * block**0.5, matrix)
    x = torch.randint(-50, 50, (7, block), generator=torch.Generator().manual_seed(3)).float()
    assert torch.equal(hadamard_transform(hadamard_transform(x)), x)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(BLOCK_SIZES), st.sampled_from([None, 0.0, 2.5, 1e9]), st.integers(0, 600), st.integers(0, 99))
def test_with_an_exact_compressor_values_come_back_but_for_rounding(block, above, count, seed):
    x = noise((count,), seed)
    out = round_trip(Hadamard(Identity(), block, above), x)
    assert torch.allclose(out, x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("inner", [Uniform(4, 64), BlockFloat(4), Uniform(2, 64)])
def test_outliers_cost_less(inner):
    x = with_outliers()
    assert error(Hadamard(inner), x) < 0.75 * error(inner, x)
    assert error(Hadamard(inner, outlier_threshold=5.0), x) < 0.75 * error(inner, x)


def test_blocks_without_outliers_cross_as_without_a_rotation():
    x, inner = with_outliers(), Uniform(4, 64)
    out, plain = round_trip(Hadamard(inner, outlier_threshold=6.0), x), round_trip(inner, x)
    turned = x.abs().amax(1) > 6 * x.abs().mean(1)
    assert 0 < turned.float().mean() < 0.1
    assert torch.equal(out[~turned], plain[~turned]) and not torch.equal(out[turned], plain[turned])


def test_only_the_block_of_a_value_that_is_not_finite_is_lost():
    for above in (None, 3.0):
        x = noise((3, 64))
        x[1, 7] = torch.nan
        out = round_trip(Hadamard(Uniform(4, 64), outlier_threshold=above), x)
        assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


def test_signs_keep_a_constant_from_becoming_an_outlier():
    for block in BLOCK_SIZES:
        turned = round_trip(Identity(), torch.ones(block)).clone()
        wire = Hadamard(Identity(), block).encode(turned)
        assert wire.view(torch.float32).abs().max() < 0.75 * block**0.5
