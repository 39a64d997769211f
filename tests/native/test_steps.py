"""Multiples of shared steps: the same codes and values as torch's, with every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.tensors.dtypes import tensor_bytes

LEAST = 2.0**-126
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 0.35, 0.5, -1.5, 126.5, 127.0, 1e38, float("inf"), float("nan")]


@pytest.fixture(autouse=True, params=[0, 1, 2], ids=["plain", "AVX2", "AVX-512"])
def simd(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _native._use_simd(2)
    if _native._use_simd(request.param) != request.param:
        pytest.skip("not on this processor")
    yield
    _native._use_simd(before)


def make(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Values and roots, some of them special."""
    random = torch.Generator().manual_seed(seed)
    values, roots = torch.randn(count, generator=random), torch.rand(count, generator=random) + 0.01
    places = torch.randint(0, max(1, count), (count // 7,), generator=random)
    values[places] = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (len(places),), generator=random)]
    roots[places[::2]] = LEAST
    return values, roots


def codes_of(values: Tensor, roots: Tensor, inverse: float) -> tuple[np.ndarray, int, int]:
    codes = np.full(len(values), 77, np.uint8)
    sums = _native.step_round(tensor_bytes(values), tensor_bytes(roots), inverse=inverse, codes=codes)
    return codes, *sums


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(0, 1000), st.floats(0.01, 50))
def test_codes_and_values_are_those_of_torch(count: int, seed: int, factor: float) -> None:
    values, roots = make(count, seed)
    found, magnitudes, escapes = codes_of(values, roots, 1 / factor)
    multiples = (values / roots * torch.tensor(1 / factor)).nan_to_num(nan=127).clamp(-127, 127).round()
    assert torch.equal(torch.from_numpy(found).int() - 128, multiples.int())
    assert magnitudes == int(multiples.abs().clamp(max=8).sum()) and escapes == int((multiples.abs() == 127).sum())
    back = torch.empty(count)
    _native.step_multiply(found, tensor_bytes(roots), factor=factor, values=tensor_bytes(back))
    assert torch.equal(back, multiples * torch.tensor(factor) * roots)


def test_sums_of_many_large_codes_do_not_overflow() -> None:
    _, magnitudes, escapes = codes_of(torch.full((1 << 20,), 1e9), torch.ones(1 << 20), 1.0)
    assert (magnitudes, escapes) == (8 << 20, 1 << 20)


def test_roots_are_those_of_numpy_and_never_less_than_the_least() -> None:
    moments = torch.cat([make(5000, 3)[0].square(), torch.tensor([*SPECIAL, -1.0, 1e-45, -float("inf")])])
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(np.sqrt(moments.numpy())).nan_to_num(nan=0.0, posinf=0.0).clamp(min=LEAST)
    _native.step_roots(tensor_bytes(moments), least=LEAST)
    assert torch.equal(moments, expected)


def test_buffers_of_other_sizes_are_refused() -> None:
    codes, values = np.empty(4, np.uint8), np.empty(12, np.uint8)
    with pytest.raises(ValueError, match="values"):
        _native.step_round(values, np.empty(16, np.uint8), inverse=1.0, codes=codes)
    with pytest.raises(ValueError, match="roots"):
        _native.step_multiply(codes, values, factor=1.0, values=np.empty(16, np.uint8))
    with pytest.raises(ValueError, match="moments"):
        _native.step_roots(np.empty(3, np.uint8), least=1.0)
