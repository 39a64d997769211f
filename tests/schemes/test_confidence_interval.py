"""An interval holds the true mean as often as it says."""

from __future__ import annotations

import math

import pytest
import torch

from shrinkpoint.schemes.confidence_interval import paired_mean_interval, student_t_quantile


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.706), (2, 4.303), (9, 2.262), (10, 2.228), (30, 2.042), (100, 1.984), (10_000, 1.960)]
)
def test_quantiles_are_those_of_the_tables(degrees, value):
    assert student_t_quantile(degrees) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize("count", [3, 8, 200])
def test_of_many_intervals_one_in_twenty_misses(count):
    generator, missed = torch.Generator().manual_seed(1), 0
    for _ in range(2000):
        before = torch.rand(count, generator=generator, dtype=torch.float64)
        after = before + 0.1 + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
        low, high = paired_mean_interval(before, after)
        missed += not low <= 0.1 <= high
    assert 60 <= missed <= 145


@pytest.mark.parametrize(("lost", "won"), [(0.0, 0.0), (0.01, 0.0), (0.03, 0.02)])
def test_of_right_and_wrong_too_and_none_that_changed_is_no_proof(lost, won):
    generator, missed, count = torch.Generator().manual_seed(2), 0, 200
    for _ in range(1000):
        draw = torch.rand(count, generator=generator, dtype=torch.float64)
        before = (torch.rand(count, generator=generator, dtype=torch.float64) < 0.5).double()
        after = torch.where(draw < lost, 0.0, torch.where(draw > 1 - won, 1.0, before))
        low, high = paired_mean_interval(before, after)
        assert high - low > 0.01
        missed += not low <= (won - lost) * 0.5 <= high
    assert missed <= 80


def test_what_is_not_finite_has_no_interval():
    assert paired_mean_interval(torch.tensor([0.5, 1.5]), torch.tensor([math.nan, 1.0])) == (-math.inf, math.inf)
