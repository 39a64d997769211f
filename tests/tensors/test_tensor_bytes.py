"""The lossless quantizer: bit patterns, of whatever a tensor looks like in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shrinkpoint.errors import CorruptError
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes
from shrinkpoint.tensors.info import TensorInfo


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
