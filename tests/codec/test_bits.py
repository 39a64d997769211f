"""The lossless quantizer: bit patterns, of whatever a tensor looks like in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from strategies import DTYPES, bits, tensors

from shrinkpoint.codec import NUMBERS
from shrinkpoint.codec.quantize import bits_of, from_bits
from shrinkpoint.errors import CorruptError
from shrinkpoint.record import ITEMSIZE, TensorInfo
from shrinkpoint.state import dtype_name
from shrinkpoint.state.dtypes import resolve


@settings(deadline=None, max_examples=60)
@given(tensors())
def test_bits_are_those_of_the_values_in_row_major_order_and_come_back(tensor):
    tensor = resolve(tensor)
    found = bits_of(tensor)
    assert found.tobytes() == bits(tensor)
    info = TensorInfo("x", tuple(tensor.shape), dtype_name(tensor.dtype))
    back = from_bits(found.copy(), info)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and bits(back) == bits(tensor)


@pytest.mark.parametrize("x", [
    torch.arange(10.0)[::3][:1], torch.arange(12.0).reshape(3, 4)[1:2, ::3][:, :1],
    torch.arange(4.0).expand(1, 4)[:, 2:3],
    torch.tensor(2.0).expand(3, 2), torch.tensor(7.0).as_strided((1, 1), (5, 9)), torch.empty(3, 0, 2),
])  # fmt: skip
def test_strides_without_a_meaning_have_none(x):
    assert bits_of(x).tobytes() == x.numpy().tobytes()


def test_a_contiguous_tensor_is_not_copied():
    x = torch.arange(5.0)
    assert bits_of(x).ctypes.data == x.data_ptr()


def test_bytes_of_the_wrong_number_are_refused():
    with pytest.raises(CorruptError, match="3 bytes; expected 8"):
        from_bits(np.zeros(3, np.uint8), TensorInfo("x", (2,), "F32"))


def test_every_dtype_of_a_record_has_numbers_that_fill_it():
    assert NUMBERS.keys() == ITEMSIZE.keys() and set(DTYPES) <= NUMBERS.keys()
    for name, number in NUMBERS.items():
        assert ITEMSIZE[name] == number.bytes * (2 if name.startswith("C") else 1), name
