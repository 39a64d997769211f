from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from contracts.quantizer import QuantizerSuite
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.errors import PolicyError
from shrinkpoint_lab.baselines.gobo import find_centroids, is_outlier, quantize_with_outliers


class TestOutliers(QuantizerSuite):
    first = 1

    def quantize(self, x: Tensor, bins: int):
        return quantize_with_outliers(x, bins)

    def centers(self, bins):
        return min(bins, 255)  # one code is the outliers'

    def allowed(self, x, symbols):
        near = (x.cpu()[..., None] - symbols.centers.double()).abs().amin(-1).to(x.device)
        return torch.where(symbols.protected, 0.0, near)


def layer(count: int = 5000, seed: int = 0) -> Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    x[: count // 100] *= 6
    return x


def test_outliers_are_where_the_log_density_is_below_the_threshold_and_exact():
    x = layer()
    mean, deviation = float(x.double().mean()), float(x.double().std(correction=0))
    density = -0.5 * ((x.double() - mean) / deviation) ** 2 - math.log(deviation * math.sqrt(2 * math.pi))
    for threshold in (-4.0, 0.0, 2.0):
        symbols = quantize_with_outliers(x, 16, threshold=threshold)
        assert torch.equal(symbols.codes == 0, density < threshold)
        assert torch.equal(symbols.exact, x[density < threshold])
    assert 0 < int((density < -4).sum()) < 100


def test_where_the_spread_is_large_all_values_are_outliers():
    x = layer() * 1e6
    assert is_outlier(x).all()
    assert torch.equal(quantize_with_outliers(x, 16).dequantize(x.dtype), x)


def plain(values: np.ndarray, bins: int, iterations: int, soft: float) -> tuple[np.ndarray, float]:
    """GOBO's iteration as it stands: every one a pass over all values."""
    ordered = np.sort(values.astype(np.float64))
    centers = np.array([part.mean() for part in np.array_split(ordered, bins)])
    best, least = centers, np.abs(ordered[:, None] - centers).min(1).sum()
    for _ in range(iterations):
        cells = np.abs(ordered[:, None] - best).argmin(1)
        centers = np.array([ordered[cells == i].mean() if (cells == i).any() else best[i] for i in range(bins)])
        error = np.abs(ordered[:, None] - centers).min(1).sum()
        enough = error >= least * (1 - soft)
        if error < least:
            best, least = centers, error
        if enough:
            break
    return best, least


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from([0, 1, 5, 1000]), st.sampled_from([1e-4, 0.0]))
def test_centroids_are_those_of_the_plain_iteration(seed, bins, iterations, soft):
    x = layer(60 * bins, seed)
    expected, _ = plain(x.numpy(), bins, iterations, soft)
    np.testing.assert_allclose(
        find_centroids(x, bins, iterations=iterations, tolerance=soft).numpy(), expected, rtol=1e-6
    )


def test_iterations_lower_the_sum_of_absolute_errors():
    x = layer()

    def error(iterations: int) -> float:
        return float((x[:, None] - find_centroids(x, 8, iterations=iterations)).abs().amin(1).sum())

    assert error(1000) < error(0)


def test_fewer_values_than_centroids_are_kept():
    x = torch.tensor([-3.0, -1.0, 2.0])
    assert set(x.tolist()) <= set(find_centroids(x, 8).tolist())
    assert find_centroids(torch.empty(0), 4).tolist() == [0.0] * 4


def test_negative_iterations_are_refused():
    with pytest.raises(PolicyError, match="iterations"):
        quantize_with_outliers(layer(50), 4, iterations=-1)
