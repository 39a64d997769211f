"""Tensors of one length that a kernel reads or writes in one launch, grids over them, and the launch itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.device import kernels_for, run_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of values that kernels read and write."""
BLOCK = 2048
"""The number of values of a program, unless a group is larger."""
NUM_WARPS = 8
"""With 8 values a thread, encoding `n4:64` takes 88 registers on sm_90: two programs fit on a multiprocessor."""
ALIGN = 16
"""Messages that are encoded together lie at multiples of this number of bytes."""


@dataclass(frozen=True)
class Rows:
    """Tensors of one length at even distances in memory; one place between two of them may be left out."""

    first: Tensor  # The first row: 1-d, contiguous
    count: int  # The number of rows
    stride: int  # The distance between rows, in values
    hole: int  # Rows from this one on lie one stride further; `count` if no place is left out
    tensors: Sequence[Tensor] = ()  # All rows, which may be copies that nothing else keeps in memory

    @property
    def numel(self) -> int:
        return self.first.numel()

    @property
    def device(self) -> torch.device:
        return self.first.device


@dataclass(frozen=True)
class GroupWire:
    """The layout of a message: heads of groups, then bit planes of codes."""

    numel: int  # The number of values
    group: int  # The number of values of a group: a power of two, 16 to 4096
    bits: int  # Of a code
    head_bytes: int  # Of a group
    centers: tuple[float, ...] = ()  # Magnitudes that codes of `NormalFloat` decode to, exact in float32

    @property
    def groups(self) -> int:
        return -(-self.numel // self.group)

    @property
    def size(self) -> int:
        return self.head_bytes * self.groups + -(-self.numel // 64) * 8 * self.bits

    @property
    def block(self) -> int:
        return max(self.group, BLOCK)

    def grid(self, rows: Rows) -> tuple[int, int]:
        return -(-self.numel // self.block), rows.count

    def options(self) -> dict[str, Any]:
        return {"BITS": self.bits, "LOG_GROUP": self.group.bit_length() - 1, "BLOCK": self.block}

    def decode_arguments(self, wires: Rows, outs: Rows) -> tuple[Tensor | int, ...]:
        return wires.first, outs.first, wires.stride, wires.hole, outs.stride, outs.hole, self.numel


def launch(kernel: Any, grid: tuple[int, int], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Start `grid` programs of a kernel: blocks of a row, then rows. Like native code, they fuse no multiply-adds.

    Args:
        options: the kernel's compile-time values.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, num_warps=NUM_WARPS, enable_fp_fusion=False)


def flat_rows(tensors: Sequence[Tensor]) -> Rows:
    """The values of tensors of one length and dtype, in row-major order: in place where they lie evenly, else a copy.

    Example: the rows 0, 1, 3 and 4 of a matrix of 8 columns have stride 8 and hole 2.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    found = _find_rows(flat)
    return found or Rows(torch.stack(flat).view(-1)[: flat[0].numel()], len(flat), flat[0].numel(), len(flat))


def _find_rows(flat: Sequence[Tensor]) -> Rows | None:
    steps = [after.data_ptr() - before.data_ptr() for before, after in pairwise(flat)]
    stride = min(steps, key=abs, default=0)
    holes = [index for index, step in enumerate(steps, 1) if step != stride]
    if stride % flat[0].itemsize or len(holes) > 1 or any(steps[index - 1] != 2 * stride for index in holes):
        return None
    return Rows(flat[0], len(flat), stride // flat[0].itemsize, holes[0] if holes else len(flat), flat)


def new_messages(like: Tensor, count: int, size: int) -> Tensor:
    """Uninitialized messages of `size` bytes, padded to `ALIGN`: uint8, shape (count, padded size)."""
    return torch.empty(count, size + -size % ALIGN, dtype=torch.uint8, device=like.device)


def _find_places(outs: Sequence[Tensor]) -> tuple[Rows, Sequence[Tensor]]:
    """Find where a kernel writes values of tensors: in place, or in new rows, which are returned too, to copy back."""
    if all(out.is_contiguous() for out in outs):
        rows = _find_rows([out.detach().view(-1) for out in outs])
        if rows is not None:
            return rows, []
    fresh = torch.empty(len(outs), outs[0].numel(), dtype=outs[0].dtype, device=outs[0].device).unbind()
    return flat_rows(fresh), fresh


def encode_rows(tensors: Sequence[Tensor], encode: Callable[[Any, Rows], Tensor]) -> Tensor | None:
    """Call `encode` with the module of kernels and the rows; None if kernels do not run on these tensors."""
    if not _has_kernels(tensors[0]):
        return None
    return run_kernels(tensors[0].device, lambda kernels: encode(kernels, flat_rows(tensors)))


def fill_rows(outs: Sequence[Tensor], fill: Callable[[Any, Rows], bool]) -> bool:
    """Call `fill` with the module of kernels and the rows to write, which returns whether it did.

    False if it did not, or if kernels do not run on these tensors.
    """
    if not _has_kernels(outs[0]):
        return False

    def work(kernels: Any) -> bool:
        places, fresh = _find_places(outs)
        is_filled = fill(kernels, places)
        if is_filled and fresh:
            torch._foreach_copy_([out.detach() for out in outs], [row.view(outs[0].shape) for row in fresh])
        return is_filled

    return run_kernels(outs[0].device, work) is True


def _has_kernels(tensor: Tensor) -> bool:
    if kernels_for(tensor.device) is None or torch.compiler.is_compiling():
        return False
    return tensor.dtype in DTYPES and tensor.numel() > 0


def signed(seed: int) -> int:
    """A seed below 2^32 as the int32 of the same bits."""
    return seed - (seed >> 31 << 32)


def seed_tensor(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Seeds below 2^32 as int32 of the same bits, on the device; the host does not wait for the copy."""
    return torch.tensor(
        [signed(seed) for seed in seeds], dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu"
    ).to(device, non_blocking=True)
