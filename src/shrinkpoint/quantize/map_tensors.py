"""Computes something of each of many tensors, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from shrinkpoint.codec.parallel import map_ordered

T = TypeVar("T")

MIN_BATCH_NUMEL = 1 << 19
"""Number of values from which tensors are a task for a thread: handing over fewer costs more than it gains."""


def map_tensors(function: Callable[[str, int], T], tensors: Mapping[str, Tensor]) -> dict[str, T]:
    """Return `function(name, threads)` of each tensor, by name in the same order.

    Tensors in host memory are shared out among as many threads as torch uses: large ones one by one, small ones in
    batches, each by one thread; `threads` is more for a tensor that is alone. Others are taken in this thread, whose
    CUDA stream is current.
    """
    workers = torch.get_num_threads()
    if workers == 1 or not all(tensor.is_cpu for tensor in tensors.values()):
        return {name: function(name, workers) for name in tensors}
    batches, sizes = list[list[str]](), list[int]()
    for name, tensor in tensors.items():
        if not sizes or sizes[-1] >= MIN_BATCH_NUMEL or tensor.numel() >= MIN_BATCH_NUMEL:
            batches.append([])
            sizes.append(0)
        batches[-1].append(name)
        sizes[-1] += tensor.numel()

    def compute(index: int, threads: int) -> list[T]:
        return [function(name, threads) for name in batches[index]]

    results = map_ordered(compute, [4 * size for size in sizes], workers)
    return {
        name: result
        for batch, part in zip(batches, results, strict=True)
        for name, result in zip(batch, part, strict=True)
    }
