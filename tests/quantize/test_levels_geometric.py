from __future__ import annotations

import pytest
import torch
from contracts.quantizer import QuantizerSuite
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.levels import MIN_LEVEL, quantize_log


def bound(x: Tensor, levels: Tensor, signed: bool) -> Tensor:
    """The stated one, for magnitudes `x` and ascending levels of one sign."""
    low, high = float(levels[0]), float(levels[-1])
    factor = (high / low) ** (1 / max(1, levels.numel() - 1)) if low else 1.0
    inside = x * ((factor - 1) / (factor + 1) + 2**-22)
    if levels.numel() == 1:
        inside = (high - x).abs()
    return torch.where(x >= low, inside, low / 2 if signed else low)


class TestUnsigned(QuantizerSuite):
    first = 2
    bins = (1, 2, 3, 16, 17, 18, 254)
    refused = (-1, 0, 255)

    def suited(self, x):
        return x.detach().abs() if not x.requires_grad else x.detach().abs().requires_grad_()

    def quantize(self, x: Tensor, bins: int):
        return quantize_log(x, bins, signed=False)

    def takes_the_nearest(self, x, symbols):
        super().takes_the_nearest(x, symbols)
        assert torch.equal(symbols.codes == 0, x == 0)

    def allowed(self, x, symbols):
        return torch.where(x == 0, 0.0, bound(x, symbols.centers, signed=False))


class TestSigned(QuantizerSuite):
    first = 2
    bins = (2, 3, 16, 17, 18, 254)
    refused = (-1, 0, 1, 255)

    def quantize(self, x: Tensor, bins: int):
        return quantize_log(x, bins, signed=True)

    def centers(self, bins):
        return bins // 2 * 2

    def allowed(self, x, symbols):
        levels = symbols.centers[symbols.bins // 2 :]
        assert torch.equal(symbols.centers[: symbols.bins // 2], -levels.flip(0))
        return torch.where(x == 0, 0.0, bound(x.abs(), levels, signed=True))

    def test_signs_are_kept_wherever_the_value_is_not_zero(self, xs):
        for x in xs.values():
            y = self.quantize(x, 16).dequantize(x.dtype)
            assert ((y == 0) | (y.sign() == x.sign())).all()


def moments(seed: int = 0) -> Tensor:
    return torch.exp(3 * torch.randn(50_000, generator=torch.Generator().manual_seed(seed)) - 20)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=1), st.integers(1, 254), st.floats(0, 0.9))
def test_nothing_but_zero_becomes_zero_in_second_moments(values, bins, share):
    x = torch.tensor(values)
    assert torch.equal(quantize_log(x, bins, signed=False, share=share).dequantize(x.dtype) == 0, x == 0)


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.1])
def test_at_most_the_share_lies_below_the_lowest_level(share):
    x = moments()
    symbols = quantize_log(x, signed=False, share=share)
    below = (x < symbols.centers[0]).float().mean()
    assert below <= share
    assert below >= 0.9 * share - 2e-5 and symbols.centers[-1] == x.max()


def test_254_levels_of_moments_are_within_five_per_cent():
    x = moments()
    y = quantize_log(x, signed=False).dequantize(x.dtype)
    inside = x >= y.min()
    assert ((y - x).abs() <= 0.05 * x)[inside].all() and inside.float().mean() >= 0.999


def test_one_tiny_value_does_not_stretch_the_grid():
    x = moments()
    without = quantize_log(x, signed=False).centers
    x[0] = 1e-29
    assert torch.allclose(quantize_log(x, signed=False).centers, without, rtol=1e-2)
    assert quantize_log(x, signed=False, share=0.0).centers[0] == torch.tensor(1e-29)


def test_no_level_is_below_the_least():
    x = torch.tensor([1e-40, 1e-35, 1e-20])
    assert quantize_log(x, 8, signed=False).dequantize(x.dtype)[:2].tolist() == pytest.approx([MIN_LEVEL] * 2)
    assert quantize_log(x[:2], 8, signed=False).dequantize(x.dtype).tolist() == pytest.approx([MIN_LEVEL] * 2)
    assert quantize_log(-x, 8, signed=True).dequantize(x.dtype)[:2].tolist() == [0.0, 0.0]


def test_a_negative_second_moment_is_refused():
    with pytest.raises(PolicyError, match="negative"):
        quantize_log(torch.tensor([1.0, -1e-30]), signed=False)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_share_out_of_range_is_refused(share):
    with pytest.raises(PolicyError, match="share"):
        quantize_log(torch.ones(3), signed=False, share=share)
