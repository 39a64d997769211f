"""Finds second moments that are on other ranks than their weight, as when replicas divide what they save (DDP)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix, matrix_shape
from shrinkpoint.schemes.fisher.optimizer_moments import correct_bias
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals, TensorShard
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

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
