"""Copies past the caches are copies."""

from __future__ import annotations

import numpy as np
import pytest

from shrinkpoint import _native


def test_all_bytes_are_copied_and_none_beyond() -> None:
    for size in [0, 1, 63, 4096, 16384 + 64, (1 << 21) + 16383, (5 << 20) + 77]:
        for threads in [1, 3]:
            source = np.random.default_rng(size).integers(0, 256, size + 64, np.uint8)
            for offset, place in ((0, 0), (0, 5), (7, 0), (13, 48), (64, 63)):
                target = np.zeros(size + 128, np.uint8)
                _native.stream_copy([source[offset : offset + size]], [target[place : place + size]], threads)
                assert np.array_equal(target[place : place + size], source[offset : offset + size])
                assert not target[:place].any() and not target[place + size :].any()


def test_a_target_of_another_size_or_read_only_is_refused() -> None:
    with pytest.raises(ValueError, match="wrong number of bytes"):
        _native.stream_copy([b"abc"], [bytearray(4)])
    with pytest.raises(ValueError, match="as many targets"):
        _native.stream_copy([b"abc"], [])
    with pytest.raises((BufferError, TypeError)):
        _native.stream_copy([b"abc"], [b"abc"])


@pytest.mark.parametrize("threads", [1, 3])
def test_each_of_many_copies_gets_the_bytes_of_its_source(threads: int) -> None:
    sizes = [0, 3, 5 << 20, 4096, 1, 70_001, 0]
    sources = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    _native.stream_copy([*sources], [*targets], threads)
    assert all(np.array_equal(source, target) for source, target in zip(sources, targets, strict=True))
