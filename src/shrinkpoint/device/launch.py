"""Starts kernels: on the device of their tensors, and without fused multiply-adds, which native code has not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

BLOCK = 2048
"""The number of values of a program, unless a group is larger."""
NUM_WARPS = 8
"""With 8 values a thread, encoding `n4:64` takes 88 registers on sm_90: two programs fit on a multiprocessor."""


def launch(kernel: Any, grid: tuple[int, int], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Start `grid` programs of a kernel: blocks of a row, then rows.

    Args:
        options: the kernel's compile-time values.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, num_warps=NUM_WARPS, enable_fp_fusion=False)
