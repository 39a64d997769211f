"""Equal means bit for bit."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint.store.single_file import decode_file, save
from shrinkpoint.tensors.compare import describe_difference, describe_structure_difference, same_bits
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


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"w": torch.ones(3), "n": 2}, "plain values"),
        ({"w": torch.ones(3), "n": 1, "m": torch.ones(1)}, "nest"),
        ({"w": torch.ones(4), "n": 1}, "shape"),
        ({"w": torch.ones(3).int(), "n": 1}, "int32"),
        ({"w": torch.zeros(3), "n": 1}, "other values"),
    ],
)
def test_the_first_difference_is_named(tmp_path, other, what):
    save(other, tmp_path / "a.safetensors")
    decoded, _ = decode_file(tmp_path / "a.safetensors")
    assert what in describe_difference(flatten({"w": torch.ones(3), "n": 1}), decoded)
    assert describe_difference(flatten(other), decoded) == ""


def test_a_tensor_that_is_missing_is_named():
    flat = flatten({"w": torch.ones(3)})
    assert describe_structure_difference(flat, flat.tree, {}) == "other tensors: w"


def test_conjugates_that_are_only_marked_are_compared():
    row = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert same_bits(row.conj(), row.conj().resolve_conj())
    assert not same_bits(row.conj(), row)
    assert same_bits(row.conj().imag, row.conj().imag.resolve_neg())
