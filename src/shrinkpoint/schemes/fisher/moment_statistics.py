"""Reads first and second moments as matrices, however an optimizer stores them and on whichever rank they are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix, matrix_shape
from shrinkpoint.quantize.map_tensors import map_tensors
from shrinkpoint.quantize.second_moment import SecondMomentSums, second_moment_sums
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals, TensorShard
from shrinkpoint.tensors.dtypes import as_native_float
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role
from shrinkpoint.tensors.optimizers import SECOND_MOMENTS


class MomentStatistics:
    """Statistics of the moments of one state: second moments are read once, together with their first moments."""

    def __init__(self, state: FlatState) -> None:
        self._tensors = state.tensors
        self._pairs: dict[str, str] = {}  # second -> first moment, of the same shape and device
        for info in state.optimizer_info.values():
            if info.moment1 is not None and info.moment2 is not None and self._are_alike(info.moment1, info.moment2):
                self._pairs[info.moment2] = info.moment1
        self._seconds = {first: second for second, first in self._pairs.items()}
        self._sums: dict[tuple[str, bool], SecondMomentSums] = {}

    def sums(self, name: str, *, with_first: bool = True) -> SecondMomentSums:
        """The sums of a second moment.

        Args:
            with_first: what is not zero in its first moment, if there is one, counts as present.
        """
        first = self._pairs.get(name) if with_first else None
        if (name, first is not None) not in self._sums:
            others = {name} if first is None else self._pairs  # what is asked of a pair is asked of all soon
            sums = map_tensors(partial(self._sum, with_first=with_first), {key: self._tensors[key] for key in others})
            self._sums |= {(key, first is not None): result for key, result in sums.items()}
        return self._sums[name, first is not None]

    def _sum(self, name: str, threads: int, *, with_first: bool) -> SecondMomentSums:
        v, first = as_native_float(self._tensors[name]), self._pairs.get(name) if with_first else None
        m = None if first is None else as_native_float(self._tensors[first])
        return second_moment_sums(v, m, by_column=v.dim() > 1, threads=threads)

    def is_finite(self, name: str) -> bool:
        """Whether all values of a moment are finite."""
        second = name if name in self._pairs else self._seconds.get(name)
        if second is not None and self.sums(second).is_finite:  # both moments are
            return True
        return math.isfinite(max_abs(self._tensors[name]))

    def moment_matrix(self, name: str | None, like: Tensor) -> Tensor | None:
        """A moment as a matrix, float32 or bfloat16; None if there is none of the shape of `like`, or not finite."""
        moment = None if name is None else self._tensors.get(name)
        if name is None or moment is None or moment.shape != like.shape or not moment.is_floating_point():
            return None
        return as_matrix(as_native_float(moment)).to(like.device) if self.is_finite(name) else None

    def _are_alike(self, first: str, second: str) -> bool:
        m, v = self._tensors.get(first), self._tensors.get(second)
        if m is None or v is None:
            return False
        return m.shape == v.shape and m.device == v.device and m.is_floating_point() and v.is_floating_point()


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


def bias_factor(beta: float | None, step: int | None) -> float:
    """What removes Adam's bias towards zero from an average of this decay after `step` updates."""
    if beta is None or step is None or not 0 <= beta < 1 or step < 1:
        return 1.0
    weight = 1 - beta**step
    return 1.0 if weight > 1 - 1e-6 else 1 / weight


def remote_owners(global_tensors: GlobalTensors, weights: Collection[str]) -> dict[str, str]:
    """Global names of second moments, and of the weights of the same shape that they are named after.

    `optim.state.layers.0.weight.exp_avg_sq` is named after `model.layers.0.weight`: all but the first part of the
    weight's name, at least, precedes the slot. A moment that could be that of two weights is left out.
    """
    owners = {}
    for moment, shape in global_tensors.shapes.items():
        *parts, slot = _name_parts(moment)
        if global_tensors.roles[moment] is Role.MOMENT2 and slot in SECOND_MOMENTS:
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
        if (moment := moments.get(global_tensors.global_names[name])) is not None
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
        name for name in state.tensors if global_tensors.global_names[name] in owners and state.tensors[name].numel()
    ]
    factor = bias_factor(beta, step)

    def sums(name: str) -> tuple[Tensor, Tensor]:
        scaled = second_moment_sums(as_native_float(state.tensors[name])).values.scaled(factor)
        return scaled.rows, scaled.columns

    return {owners[moment]: marginals for moment, marginals in global_tensors.marginals(local, sums).items()}


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
