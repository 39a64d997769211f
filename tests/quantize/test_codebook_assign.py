from __future__ import annotations

import pytest
import torch
from contracts.quantizer import FINITE, FLOATS
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize import codebook as assign_module
from shrinkpoint.quantize.codebook import MAX_LINEAR_CENTERS, assign


def slow(x: torch.Tensor, centers: torch.Tensor, first: int) -> torch.Tensor:
    """The first of the nearest, by all distances."""
    distances = (x.double().reshape(-1, 1) - centers.double()).abs()
    return (distances.argmin(1) + first).to(torch.uint8).reshape(x.shape)


def drawn(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bins", [1, 2, MAX_LINEAR_CENTERS, MAX_LINEAR_CENTERS + 1, 254])
def test_every_value_gets_the_nearest_center_across_chunks(bins, monkeypatch):
    for dtype in FLOATS.values():
        monkeypatch.setattr(assign_module, "CPU_BLOCK", 10)
        x, centers = drawn(0, 10_003).to(dtype), drawn(1, bins).sort().values
        assert torch.equal(assign(x, centers, 2), slow(x, centers, 2))


@settings(deadline=None, max_examples=150)
@given(st.lists(FINITE, min_size=1, max_size=2 * MAX_LINEAR_CENTERS))
def test_neighbouring_floats_are_told_apart(values):
    centers = torch.tensor(values).sort().values
    infinity = torch.full_like(centers, torch.inf)
    x = torch.cat([centers, centers.nextafter(infinity), centers.nextafter(-infinity)])
    x = x[x.isfinite()]
    codes = assign(x, centers, 0).long()
    near = (x.double()[:, None] - centers.double()).abs()
    assert (near.gather(1, codes[:, None])[:, 0] <= near.amin(1) * (1 + 1e-15)).all()


def test_of_two_equally_near_centers_the_lower_is_taken():
    x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 1.5, 2.0])
    assert assign(x, torch.tensor([0.0, 1.0, 2.0]), 1).tolist() == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("more", [0, MAX_LINEAR_CENTERS])
def test_of_equal_centers_the_first_is_taken(more):
    centers = torch.tensor([-1.0, -1.0, 0.0, 2.0, 2.0, 2.0] + [9.0] * more)
    assert assign(torch.tensor([-2.0, -0.9, 0.1, 1.9, 2.1]), centers, 2).tolist() == [2, 2, 4, 5, 5]


@pytest.mark.parametrize(("bins", "first"), [(0, 0), (0, 2), (257, 0), (256, 1), (255, 2)])
def test_what_does_not_fit_into_a_byte_is_refused(bins, first):
    with pytest.raises(PolicyError, match=f"expected 1 to {256 - first}"):
        assign(torch.zeros(3), torch.arange(bins).float(), first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bins", [1, 4, 100])
def test_a_gpu_assigns_what_the_cpu_assigns(bins):
    for dtype in FLOATS.values():
        x, centers = drawn(0, 100_000).to(dtype), drawn(1, bins).sort().values.round(decimals=2)
        assert torch.equal(assign(x.cuda(), centers, 2).cpu(), assign(x, centers, 2))
        assert torch.equal(assign(x.cuda(), centers.cuda(), 2).cpu(), assign(x, centers, 2))
