"""Reads first and second moments as matrices from the state of an optimizer, however it stores them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.tensors.flat_state import FlatState


def moment_matrix(state: FlatState, name: str | None, like: Tensor) -> Tensor | None:
    """A moment as a float32 matrix; None if there is none of the shape of `like`, or it is not finite."""
    moment = None if name is None else state.tensors.get(name)
    if moment is None or moment.shape != like.shape or not moment.is_floating_point():
        return None
    moment = as_matrix(moment).to(like.device, torch.float32)
    return moment if math.isfinite(max_abs(moment)) else None


def adafactor_moment(state: FlatState, names: tuple[str, str], like: Tensor) -> Tensor | None:
    """Second moments from their means by row and by column, over the last two axes, as a float32 matrix.

    Those of Adafactor (arXiv 1804.04235, algorithm 4), whose averages need no correction: their decay begins at 0.
    """
    rows, columns = (state.tensors.get(name) for name in names)
    if rows is None or columns is None or like.dim() < 2:
        return None
    rows = rows.to(like.device, torch.float32).reshape(*like.shape[:-1], 1)
    columns = columns.to(like.device, torch.float32).reshape(*like.shape[:-2], 1, like.shape[-1])
    mean = rows.mean(-2, keepdim=True)
    moment = as_matrix(torch.where(mean > 0, rows * columns / mean, 0.0))
    return moment if math.isfinite(max_abs(moment)) else None


def bnb_moment(state: FlatState, names: tuple[str, str, str], like: Tensor) -> Tensor | None:
    """Second moments from their 8-bit codes (bitsandbytes, arXiv 2110.02861), as a float32 matrix.

    Adam's bias is left in them.
    """
    codes, values, block_max = (state.tensors.get(name) for name in names)
    if codes is None or values is None or block_max is None or codes.shape != like.shape:
        return None
    blocks, count = block_max.numel(), codes.numel()
    if values.numel() != 256 or not blocks or not count:
        return None
    size = 1 << (-(-count // blocks) - 1).bit_length()
    if -(-count // size) != blocks:
        return None
    scales = block_max.reshape(-1).to(torch.float32).repeat_interleave(size)[:count]
    moment = values.reshape(-1).to(torch.float32)[codes.reshape(-1).to(values.device).long()] * scales.to(values.device)
    moment = as_matrix(moment.reshape(like.shape)).to(like.device)
    return moment if math.isfinite(max_abs(moment)) else None


def correct_bias(moment: Tensor, beta: float | None, step: int | None) -> Tensor:
    """Remove Adam's bias towards zero from an average of this decay after `step` updates."""
    if beta is None or step is None or not 0 <= beta < 1 or step < 1:
        return moment
    weight = 1 - beta**step
    return moment if weight > 1 - 1e-6 else moment / weight
