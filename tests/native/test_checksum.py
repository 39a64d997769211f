"""Digests are those of the reference implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint import _native
from shrinkpoint.tensors.dtypes import tensor_bytes


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=3000), st.lists(st.integers(0, 3000), max_size=4))
def test_digests_equal_the_reference(data: bytes, cuts: list[int]) -> None:
    expected = xxhash.xxh3_128_hexdigest(data)
    assert _native.xxh3_128(data) == expected
    hasher, places = _native.Hasher(), [0, *sorted(cuts), len(data)]
    for start, end in zip(sorted(places), sorted(places)[1:], strict=False):
        hasher.update(data[start:end])
    assert hasher.hexdigest() == expected


def test_every_length_up_to_several_stripes() -> None:
    data = np.random.default_rng(0).bytes(1100)
    for length in range(len(data)):
        assert _native.xxh3_128(data[:length]) == xxhash.xxh3_128_hexdigest(data[:length])


@pytest.mark.parametrize("most", [0, 1, 2])
def test_large_buffers_and_arrays_under_every_instruction_set(most: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, (1 << 20) + 77, np.uint8)
    _native._use_simd(most)
    for start, end in ((0, data.size), (1, 1024), (3, 1029), (0, 240), (5, 100_000)):
        expected = xxhash.xxh3_128_hexdigest(data[start:end].tobytes())
        assert _native.xxh3_128(data[start:end]) == expected
        hasher = _native.Hasher()
        for cut in range(start, end, 4999):
            hasher.update(data[cut : min(cut + 4999, end)])
        assert hasher.hexdigest() == expected


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
