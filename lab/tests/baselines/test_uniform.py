from __future__ import annotations

import pytest
import torch
from contracts.quantizer import QuantizerSuite
from torch import Tensor

from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.levels import min_max, quantize_to_grid, uniform_grid
from shrinkpoint_lab.baselines.uniform import best_range, quantize_adaptive


def counted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Relative cells of two per cent, as a sketch of one per cent has them; zeros left out."""
    wide = x.detach().double()
    wide = wide[wide != 0]
    near = wide.sign() * torch.exp2((wide.abs().log2() * 35).round() / 35)
    return torch.unique(near, return_counts=True)


def weights(seed: int) -> Tensor:
    """Like a trained layer's: a Gaussian, some of it wider, a few far out, more of them on one side."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40_000, generator=generator) * 0.02
    x[:4000] *= 3
    x[:20] = torch.rand(20, generator=generator) * 0.6 - 0.1
    return x


class TestAdaptive(QuantizerSuite):
    def quantize(self, x: Tensor, bins: int):
        return quantize_adaptive(x, bins, *counted(x))

    def allowed(self, x, symbols):
        low, high = float(symbols.centers[0]), float(symbols.centers[-1])
        outside = torch.maximum(low - x, x - high).clamp(min=0)
        half = (high - low) / 2 / max(1, symbols.bins - 1)
        return outside + half + max(abs(low), abs(high)) * 2**-23 + 2**-149


def error(x: Tensor, low: float, high: float, bins: int) -> float:
    """The squared error of all values on the grid over this range."""
    step = (high - low) / (bins - 1)
    near = ((x.double() - low) / step).round().clamp(0, bins - 1) * step + low
    return float((near - x.double()).square().sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("bits", "slack"), [(2, 1.02), (3, 1.02), (4, 1.02), (6, 1.02), (8, 1.05)])
@pytest.mark.parametrize(("steps", "ratio"), [(10, 0.5), (25, 0.3), (100, 0.1), (100, 0.5)])
def test_the_range_is_as_good_as_that_of_torch_on_all_values(seed, bits, slack, steps, ratio):
    x = weights(seed)
    high, low = torch.choose_qparams_optimized(x, x.numel(), steps, ratio, bits)
    found = best_range(*counted(x), (float(x.min()), float(x.max())), 1 << bits, steps=steps, ratio=ratio)
    assert error(x, *found, 1 << bits) <= slack * error(x, float(low), float(high), 1 << bits)


def test_the_range_shrinks_where_that_pays_and_not_where_it_does_not():
    x, flat = weights(0), torch.linspace(-1, 1, 10_001)
    whole = (float(x.min()), float(x.max()))
    low, high = best_range(*counted(x), whole, 16, steps=100, ratio=0.5)
    assert whole[0] < low < high < whole[1] and high - low >= 0.499 * (whole[1] - whole[0])
    even = best_range(flat, torch.ones(10_001), (-1.0, 1.0), 16, steps=100, ratio=0.5)
    assert even == pytest.approx((-15 / 16, 15 / 16), abs=0.02)  # half a cell outside the ends, as between points
    assert best_range(*counted(x), whole, 16, steps=100, ratio=0.0) == whole


def test_values_outside_get_the_ends_and_the_whole_error_falls():
    x = weights(1)
    symbols = quantize_adaptive(x, 16, *counted(x), steps=100, ratio=0.5)
    y = symbols.dequantize(x.dtype)
    assert y.max() == symbols.centers[-1] < x.max()
    assert (x - y).square().sum() < 0.7 * (
        x - quantize_to_grid(x, uniform_grid(*min_max(x), 16)).dequantize(x.dtype)
    ).square().sum()


def test_a_full_ratio_leaves_a_range():
    x = torch.cat([torch.full((1000,), 0.5), torch.tensor([0.0, 1.0])])
    for steps in (1, 2, 10):
        low, high = best_range(*counted(x), (0.0, 1.0), 4, steps=steps, ratio=1.0)
        assert low < high


@pytest.mark.parametrize("knobs", [{"steps": 0}, {"ratio": -0.1}, {"ratio": 1.1}])
def test_knobs_out_of_range_are_refused(knobs):
    with pytest.raises(PolicyError, match="range search"):
        quantize_adaptive(torch.ones(3), 4, *counted(torch.ones(3)), **knobs)
