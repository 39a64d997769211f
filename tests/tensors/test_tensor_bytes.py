"""The lossless quantizer: bit patterns, of whatever a tensor looks like in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.strategies import bits, tensors
from hypothesis import given, settings

from shrinkpoint.errors import CorruptError
from shrinkpoint.tensors.dtypes import copy_to_host, dtype_name, materialize, tensor_bytes, tensor_from_bytes
from shrinkpoint.tensors.info import TensorInfo


@settings(deadline=None, max_examples=60)
@given(tensors())
def test_bits_are_those_of_the_values_in_row_major_order_and_come_back(tensor):
    tensor = materialize(tensor)
    found = tensor_bytes(tensor)
    assert found.tobytes() == bits(tensor)
    info = TensorInfo("x", tuple(tensor.shape), dtype_name(tensor.dtype))
    back = tensor_from_bytes(found.copy(), info)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and bits(back) == bits(tensor)


@settings(deadline=None, max_examples=60)
@given(tensors())
def test_a_copy_in_host_memory_has_the_same_bits_and_memory_of_its_own(tensor):
    copy = copy_to_host(tensor)
    assert copy.dtype == tensor.dtype and copy.shape == tensor.shape
    assert copy.is_contiguous() and not copy.requires_grad and bits(copy) == bits(materialize(tensor))
    assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(10.0)[::3][:1],
        torch.arange(12.0).reshape(3, 4)[1:2, ::3][:, :1],
        torch.arange(4.0).expand(1, 4)[:, 2:3],
        torch.tensor(2.0).expand(3, 2),
        torch.tensor(7.0).as_strided((1, 1), (5, 9)),
        torch.empty(3, 0, 2),
    ],
)
def test_strides_without_a_meaning_have_none(x):
    assert tensor_bytes(x).tobytes() == x.numpy().tobytes()


def test_a_contiguous_tensor_is_not_copied():
    x = torch.arange(5.0)
    assert tensor_bytes(x).ctypes.data == x.data_ptr()


def test_bytes_of_the_wrong_number_are_refused():
    with pytest.raises(CorruptError, match="3 bytes; expected 8"):
        tensor_from_bytes(np.zeros(3, np.uint8), TensorInfo("x", (2,), "F32"))
