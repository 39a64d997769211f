"""Digests are those of the reference implementation."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint import _native


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
