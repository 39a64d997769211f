"""Sums of a checkpoint's progress: those of float64, the same for every number of threads and instruction set."""

import numpy as np
import pytest
import torch

from shrinkpoint import _native
from shrinkpoint.tensors.dtypes import tensor_bytes

LEVELS = (0, 1, 2)


def random_arrays(count: int, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, generator=generator).to(dtype) for dtype in dtypes]


def sums(arrays: list[torch.Tensor], threads: int = 1) -> tuple[float, ...]:
    return _native.progress_sums(*map(tensor_bytes, arrays), arrays[0].numel(), threads=threads)


def test_sums_are_those_of_float64():
    for narrow in range(5):
        for count in [0, 1, 7, 8, 2047, 2049, 300_001]:
            dtypes = tuple(torch.bfloat16 if i == narrow else torch.float32 for i in range(4))
            arrays = random_arrays(count, dtypes)
            weight, parent_weight, stored, parent_stored = (array.float().numpy() for array in arrays)
            movement = (weight - parent_weight).astype(np.float64)
            stored_movement = (stored - parent_stored).astype(np.float64)
            expected = (
                movement @ movement,
                movement @ stored_movement,
                weight.astype(np.float64) @ weight,
                weight.astype(np.float64) @ stored,
            )
            assert sums(arrays) == pytest.approx(expected, rel=1e-12, abs=1e-9)


def test_sums_do_not_depend_on_threads_or_instructions():
    arrays = random_arrays(1_000_003, (torch.float32, torch.bfloat16, torch.float32, torch.float32))
    expected = sums(arrays)
    for level in LEVELS:
        _native._use_simd(level)
        assert {sums(arrays, threads) for threads in (1, 2, 5)} == {expected}


def test_missing_or_short_arrays_are_refused():
    data = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="wrong number of bytes"):
        _native.progress_sums(data, data, data, data, 3)
    with pytest.raises(TypeError):
        _native.progress_sums(data, data, data, None, 2)  # type: ignore[arg-type]


def test_sums_do_not_depend_on_what_the_thread_does_with_denormals():
    tiny = torch.full((5000,), 1e-40)
    arrays = [tensor_bytes(array) for array in (tiny, tiny * 0, tiny * 0.5, tiny * 0)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    try:
        flushed = _native.progress_sums(*arrays, 5000, threads=1)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == _native.progress_sums(*arrays, 5000, threads=1)
    assert flushed[0] > 0
