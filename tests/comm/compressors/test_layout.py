"""Codes come back as they were, from as few bytes as their bits are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.strategies import bits as bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.comm.compressors.layout import (
    _pack_planes_torch,
    _unpack_planes_torch,
    count_nonfinite,
    is_known_finite,
    pack_planes,
    packed_bytes,
    plane_widths,
    unpack_planes,
)

COUNTS = (0, 1, 63, 64, 65, 127, 128, 1000)


def codes_of(count: int, bits: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (count,), generator=random, dtype=torch.uint8)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(COUNTS) | st.integers(0, 300), st.integers(1, 8), st.integers(0, 99))
def test_codes_come_back_as_they_were(count, bits, seed):
    codes = codes_of(count, bits, seed)
    data = pack_planes(codes, bits)
    assert data.dtype == torch.uint8 and data.shape == (packed_bytes(count, bits),)
    assert torch.equal(unpack_planes(data, count, bits), codes)
    assert torch.equal(_pack_planes_torch(codes, bits), data) and torch.equal(
        _unpack_planes_torch(data, count, bits), codes
    )


def test_planes_lie_where_the_document_says():
    for bits in range(1, 9):
        codes, expected = codes_of(130, bits), bytearray()
        padded, shift = codes.tolist() + [0] * 62, 0
        for width in plane_widths(bits):
            for tile in range(0, 192, 64):
                for j in range(8 * width):
                    parts = [padded[tile + j + 8 * width * i] >> shift & (2**width - 1) for i in range(8 // width)]
                    expected.append(sum(part << (width * i) for i, part in enumerate(parts)))
            shift += width
        assert bytes_of(pack_planes(codes, bits)) == bytes(expected)


def test_buffers_that_do_not_fit_are_refused():
    codes, planes = np.zeros(65, np.uint8), np.zeros(64, np.uint8)
    _native.pack_planes(codes, 4, planes)
    for bits, short, message in ((4, planes[1:], "planes: wrong number"), (5, planes, "planes: wrong number")):
        with pytest.raises(ValueError, match=message):
            _native.pack_planes(codes, bits, short)
        with pytest.raises(ValueError, match=message):
            _native.unpack_planes(short, bits, codes)
    for bits in (0, 9):
        with pytest.raises(ValueError, match="bits: expected 1 to 8"):
            _native.pack_planes(codes, bits, planes)
        with pytest.raises(ValueError, match="bits: expected 1 to 8"):
            _native.unpack_planes(planes, bits, codes)


@pytest.mark.parametrize("count", [0, 1, 63, 16384, 40000])
def test_values_that_are_not_finite_are_counted_one_by_one(count):
    for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.float64]:
        x = torch.full((40000, 2), torch.finfo(dtype).max, dtype=dtype)
        x[:count, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan]).to(dtype).repeat(10000)[:count]
        for most in (0, 1, 2):
            _native._use_simd(most)
            assert int(count_nonfinite(x)) == int(count_nonfinite(x[:, 0])) == count
            assert is_known_finite(x) == (count == 0)
