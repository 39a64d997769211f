"""Second moments on another rank than their weight, as where replicas share by size what they save (DDP, HSDP)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import matrix, sides
from shrinkpoint.record import Role
from shrinkpoint.schemes.fisher.curvature import unbiased
from shrinkpoint.schemes.wholes import Margins, Piece, Wholes
from shrinkpoint.state import FlatState

_SLOT = "exp_avg_sq"


def owners(wholes: Wholes, weights: Collection[str]) -> dict[str, str]:
    """Titles of second moments, and of the weights of the same shape that they are called after.

    `optim.state.layers.0.weight.exp_avg_sq` is called after `model.layers.0.weight`: all but the first part of the
    weight's name, at least, stands before the slot. Where that is said of two weights, it is said of none.
    """
    roles = {piece.place.whole: piece.role for pieces in wholes.pieces for piece in pieces}
    out = {}
    for title, shape in wholes.shapes.items():
        *parts, slot = _parts(title)
        if roles[title] is Role.MOMENT2 and slot == _SLOT:
            found = [one for one in weights if wholes.shapes[one] == shape and _is_called_after(parts, _parts(one))]
            if len(found) == 1:
                out[title] = found[0]
    return out


def margins(wholes: Wholes, flat: FlatState, weights: Collection[str]) -> dict[str, Margins]:
    """Of the second moments of these weights, by the weight's title; a collective.

    Without Adam's bias towards zero, as far as other weights tell how large it is.

    Args:
        flat: of this rank.
    """
    found = owners(wholes, weights)
    known = Counter((one.beta2, one.step) for one in flat.optim.values() if one.moment2 is not None)
    said = [one for one in wholes.gather(known.most_common(1)) if one]
    beta, step = max(said, key=lambda one: one[0][1])[0][0] if said else (None, None)
    ours = [name for name in flat.tensors if wholes.title(name) in found and wholes.mine[name].numel]
    sums = wholes.margins(ours, lambda name: unbiased(matrix(flat.tensors[name]).to(torch.float32), beta, step))
    return {found[title]: one for title, one in sums.items()}


def squares(whole: Margins, piece: Piece, device: torch.device) -> Tensor:
    """What a box's squares are by the means of its rows and columns, as a matrix; float32."""
    rows, columns = sides(piece.sizes)
    if sides(whole.shape)[0] == 1 or whole.mean == 0:
        return torch.full((1, 1), whole.mean, device=device).expand(rows, columns)
    by_row = whole.means(1)[piece.place.first_row : piece.place.first_row + rows]
    by_column = whole.means(0)[piece.place.columns(piece.sizes)]
    return (by_row[:, None] * (by_column / whole.mean)).to(device, torch.float32)


def _parts(title: str) -> list[str]:
    return re.split("[/.]", title)


def _is_called_after(moment: list[str], weight: list[str]) -> bool:
    known = weight[1:] or weight
    return moment[-len(known) :] == known
