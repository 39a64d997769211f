"""Reads first and second moments as matrices, however an optimizer stores them and on whichever rank they are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix, matrix_shape
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals, TensorShard
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role


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


_SECOND_MOMENT_SLOT = "exp_avg_sq"


def remote_owners(global_tensors: GlobalTensors, weights: Collection[str]) -> dict[str, str]:
    """Global names of second moments, and of the weights of the same shape that they are named after.

    `optim.state.layers.0.weight.exp_avg_sq` is named after `model.layers.0.weight`: all but the first part of the
    weight's name, at least, precedes the slot. A moment that could be that of two weights is left out.
    """
    owners = {}
    for moment, shape in global_tensors.shapes.items():
        *parts, slot = _name_parts(moment)
        if global_tensors.roles[moment] is Role.MOMENT2 and slot == _SECOND_MOMENT_SLOT:
            matches = [
                weight
                for weight in weights
                if global_tensors.shapes[weight] == shape and _is_named_after(parts, _name_parts(weight))
            ]
            if len(matches) == 1:
                owners[moment] = matches[0]
    return owners


def remote_marginals(global_tensors: GlobalTensors, state: FlatState, weights: Collection[str]) -> dict[str, Marginals]:
    """Sums by row and by column of second moments on other ranks than their weight, by global name of the weight.

    Adam's bias towards zero is corrected if other weights tell its decay and step. A collective.

    Args:
        state: of this rank.
        weights: global names.
    """
    owners = remote_owners(global_tensors, weights)
    moments = {weight: moment for moment, weight in owners.items()}
    remote = global_tensors.union(
        name
        for name, tensor in state.tensors.items()
        if (moment := moments.get(global_tensors.global_name(name))) is not None
        and tensor.numel()
        and global_tensors.colocated_name(name, moment) is None
    )
    owners = {moment: weight for moment, weight in owners.items() if weight in remote}
    if not owners:
        return {}
    decays = Counter((info.beta2, info.step) for info in state.optimizer_info.values() if info.moment2 is not None)
    reports = [report for report in global_tensors.all_gather(decays.most_common(1)) if report]
    beta, step = max(reports, key=lambda report: report[0][1])[0][0] if reports else (None, None)
    local = [
        name for name in state.tensors if global_tensors.global_name(name) in owners and state.tensors[name].numel()
    ]
    sums = global_tensors.marginals(
        local, lambda name: correct_bias(as_matrix(state.tensors[name]).to(torch.float32), beta, step)
    )
    return {owners[moment]: marginals for moment, marginals in sums.items()}


def rank_one_squares(marginals: Marginals, shard: TensorShard, device: torch.device) -> Tensor:
    """A shard's squares as the product of the means of its rows and columns, a float32 matrix."""
    rows, columns = matrix_shape(shard.sizes)
    if matrix_shape(marginals.shape)[0] == 1 or marginals.mean == 0:
        return torch.full((1, 1), marginals.mean, device=device).expand(rows, columns)
    by_row = marginals.mean_along(1)[shard.spec.first_row : shard.spec.first_row + rows]
    by_column = marginals.mean_along(0)[shard.spec.columns(shard.sizes)]
    return (by_row[:, None] * (by_column / marginals.mean)).to(device, torch.float32)


def _name_parts(global_name: str) -> list[str]:
    return re.split("[/.]", global_name)


def _is_named_after(moment: list[str], weight: list[str]) -> bool:
    suffix = weight[1:] or weight
    return moment[-len(suffix) :] == suffix
