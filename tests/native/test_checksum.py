"""Digests are those of the reference implementation."""

from __future__ import annotations

import numpy as np
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


def test_large_buffers_and_arrays() -> None:
    data = np.arange(1 << 20, dtype=np.uint8)
    assert _native.xxh3_128(data) == xxhash.xxh3_128_hexdigest(data.tobytes())
