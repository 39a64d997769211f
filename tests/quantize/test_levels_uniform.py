from __future__ import annotations

import math

import pytest
import torch
from contracts.quantizer import StableQuantizerSuite
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.levels import grid_histogram, min_max, quantize_to_grid, uniform_grid, variable_bins
from shrinkpoint.quantize.statistics import entropy_per_value


def quantize_uniform(x: Tensor, bins: int) -> CodebookTensor:
    return quantize_to_grid(x, uniform_grid(*min_max(x), bins))


def histogram_entropy(x: Tensor, bins: int = 256) -> float:
    return entropy_per_value(grid_histogram(x, min_max(x), bins))


class TestUniform(StableQuantizerSuite):
    def quantize(self, x: Tensor, bins: int):
        return quantize_uniform(x, bins)

    def allowed(self, x, symbols):
        if not x.numel():
            return x
        half = (x.max() - x.min()) / (2 * max(1, symbols.bins - 1))
        return half + x.abs().max() * 2**-24 + 2**-149  # the grid's points are float32

    def again(self, x, symbols):
        return quantize_uniform(x, symbols.bins)


def test_the_grid_goes_from_the_least_to_the_largest_value():
    symbols = quantize_uniform(torch.tensor([[5.0, -1.0], [0.9, 1.0]]), 4)
    assert symbols.centers.tolist() == [-1.0, 1.0, 3.0, 5.0]
    assert symbols.codes.tolist() == [[3, 0], [1, 1]]


def test_entropy_is_that_of_the_histogram():
    assert histogram_entropy(torch.arange(256.0)) == 8.0
    assert histogram_entropy(torch.tensor([1.0, 1.0, 7.0, 7.0])) == 1.0
    assert histogram_entropy(torch.tensor([0.0, 0.0, 0.0, 9.0]), bins=2) == pytest.approx(2 - 0.75 * math.log2(3))
    assert histogram_entropy(torch.full((9,), 3.3)) == histogram_entropy(torch.empty(0)) == 0.0


@given(st.lists(st.floats(0, 8), min_size=1), st.sampled_from([(8, 256), (16, 16), (1, 2), (32, 128)]))
def test_the_more_entropy_the_more_bins(entropies, ends):
    bins = variable_bins(entropies, *ends)
    assert all(one in (1, 2, 4, 8, 16, 32, 64, 128, 256) and ends[0] <= one <= ends[1] for one in bins)
    assert [one for _, one in sorted(zip(entropies, bins, strict=True))] == sorted(bins)
    assert bins[entropies.index(max(entropies))] == ends[1]
    assert bins[entropies.index(min(entropies))] == (ends[0] if min(entropies) < max(entropies) else ends[1])


def test_bits_go_linearly_with_entropy():
    assert variable_bins([1.0, 2.0, 2.4, 3.0, 6.0], 8, 256) == [8, 16, 16, 32, 256]
    assert variable_bins([], 8, 256) == []


@pytest.mark.parametrize("ends", [(0, 8), (16, 8), (8, 100), (12, 16), (8, 512)])
def test_ends_that_are_no_powers_of_two_in_order_are_refused(ends):
    with pytest.raises(PolicyError, match="powers of two"):
        variable_bins([1.0], *ends)
