"""Second moments on another rank than their weight, as where replicas share by size what they save (DDP, HSDP)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix, matrix_shape
from shrinkpoint.schemes.fisher.curvature import correct_bias
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals, TensorShard
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

_SECOND_MOMENT_SLOT = "exp_avg_sq"


def remote_owners(global_tensors: GlobalTensors, weights: Collection[str]) -> dict[str, str]:
    """Titles of second moments, and of the weights of the same shape that they are called after.

    `optim.state.layers.0.weight.exp_avg_sq` is called after `model.layers.0.weight`: all but the first part of the
    weight's name, at least, stands before the slot. Where that is said of two weights, it is said of none.
    """
    roles = {piece.spec.global_name: piece.role for pieces in global_tensors.shards_by_rank for piece in pieces}
    out = {}
    for title, shape in global_tensors.shapes.items():
        *parts, slot = _name_parts(title)
        if roles[title] is Role.MOMENT2 and slot == _SECOND_MOMENT_SLOT:
            found = [
                one
                for one in weights
                if global_tensors.shapes[one] == shape and _is_named_after(parts, _name_parts(one))
            ]
            if len(found) == 1:
                out[title] = found[0]
    return out


def remote_marginals(global_tensors: GlobalTensors, state: FlatState, weights: Collection[str]) -> dict[str, Marginals]:
    """Of the second moments of these weights, by the weight's title; a collective.

    Without Adam's bias towards zero, as far as other weights tell how large it is.

    Args:
        state: of this rank.
    """
    found = remote_owners(global_tensors, weights)
    known = Counter((one.beta2, one.step) for one in state.optimizer_info.values() if one.moment2 is not None)
    said = [one for one in global_tensors.all_gather(known.most_common(1)) if one]
    beta, step = max(said, key=lambda one: one[0][1])[0][0] if said else (None, None)
    ours = [
        name
        for name in state.tensors
        if global_tensors.global_name(name) in found and global_tensors.local_shards[name].numel
    ]
    sums = global_tensors.marginals(
        ours, lambda name: correct_bias(as_matrix(state.tensors[name]).to(torch.float32), beta, step)
    )
    return {found[title]: one for title, one in sums.items()}


def rank_one_squares(marginals: Marginals, shard: TensorShard, device: torch.device) -> Tensor:
    """What a box's squares are by the means of its rows and columns, as a matrix; float32."""
    rows, columns = matrix_shape(shard.sizes)
    if matrix_shape(marginals.shape)[0] == 1 or marginals.mean == 0:
        return torch.full((1, 1), marginals.mean, device=device).expand(rows, columns)
    by_row = marginals.mean_along(1)[shard.spec.first_row : shard.spec.first_row + rows]
    by_column = marginals.mean_along(0)[shard.spec.columns(shard.sizes)]
    return (by_row[:, None] * (by_column / marginals.mean)).to(device, torch.float32)


def _name_parts(global_name: str) -> list[str]:
    return re.split("[/.]", global_name)


def _is_named_after(moment: list[str], weight: list[str]) -> bool:
    known = weight[1:] or weight
    return moment[-len(known) :] == known
