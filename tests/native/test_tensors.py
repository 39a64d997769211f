"""Promise: the native core reads any tensor of torch as its bytes in row-major order, and writes to contiguous ones."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint import _native
from shrinkpoint.tensors.dtypes import tensor_bytes

_MATRIX = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        _MATRIX,
        _MATRIX.bfloat16(),
        _MATRIX.T,
        _MATRIX[:, 1:3],
        torch.nn.Parameter(_MATRIX),
        torch.empty(0),
        torch.tensor(3),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,  # negated lazily
    ],
    ids=str,
)
def test_tensors_are_read_as_their_bytes(tensor: torch.Tensor) -> None:
    data = tensor_bytes(tensor)
    assert _native.xxh3_128(tensor) == _native.xxh3_128(data)
    assert _native.digest([tensor, data]) == _native.digest(iter([data, tensor]))


def test_only_contiguous_tensors_are_written() -> None:
    source, target = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    _native.stream_copy([source], [target])
    assert torch.equal(source, target)
    with pytest.raises(ValueError, match="not contiguous"):
        _native.stream_copy([source], [torch.zeros(12, dtype=torch.int64)[::2]])
    with pytest.raises(TypeError):
        _native.xxh3_128("text")  # type: ignore[arg-type]
