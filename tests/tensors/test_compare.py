"""Equal means bit for bit."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint.tensors.compare import describe_structure_difference, same_bits
from shrinkpoint.tensors.flat_state import flatten


def test_a_nan_equals_itself_and_zeros_of_two_signs_differ():
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor(2.0), torch.tensor(2.0))
    assert same_bits(torch.zeros(0, 3), torch.zeros(0, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.bool, torch.float8_e5m2])
def test_every_dtype_is_compared_whatever_its_strides(dtype):
    values = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    assert same_bits(values.t(), values.t().contiguous())
    assert not same_bits(values, torch.ones(3, 2).to(dtype))


def test_a_tensor_that_is_missing_is_named():
    flat = flatten({"w": torch.ones(3)})
    assert describe_structure_difference(flat, flat.tree, {}) == "other tensors: w"


def test_conjugates_that_are_only_marked_are_compared():
    row = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert same_bits(row.conj(), row.conj().resolve_conj())
    assert not same_bits(row.conj(), row)
    assert same_bits(row.conj().imag, row.conj().imag.resolve_neg())
