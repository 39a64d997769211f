"""What has not moved since the checkpoint before: a reader has it already, to the bit, and it loses nothing more.

A weight that is restored lies on the points, or centers, it was rounded to. Rounded again, to a grid of other steps or
another dither, one that no training moves (a frozen backbone, the base below an adapter) would gain an error with every
restore. So it keeps what it was made from, in a delta and in a keyframe alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shrinkpoint.codec import Origin, Points, Reference
from shrinkpoint.schemes.wholes import Wholes
from shrinkpoint.state import FlatState
from shrinkpoint.state.dtypes import raw

_HEAD = 4096
"""Bytes-wide integers compared first: what trains differs there already."""


def unmoved(names: Iterable[str], flat: FlatState, reference: Reference | None) -> dict[str, Origin]:
    """Origins, on the CPU, of those tensors that equal a reader's bit by bit; without those that cannot stand alone.

    What a reader has exactly, and what is a difference to the checkpoint before that, has no origin to be kept.

    Args:
        names: of tensors of `flat`.
        reference: what a reader has of the checkpoint before; None: nothing.
    """
    out: dict[str, Origin] = {}
    if reference is None:
        return out
    for name in names:
        origin, x = reference.symbols.get(name), flat.tensors[name]
        held = reference.matching(name, tuple(x.shape), x.dtype)
        if origin is not None and held is not None and _stands(origin) and is_equal(x, held):
            out[name] = origin
    return {name: one for name, one in out.items() if not _other(one) or _other(one) in out}


def is_equal(x: Tensor, held: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same, bit by bit."""
    a, b = raw(x.detach()), raw(held)
    head = min(len(a) if a.dim() else 1, max(1, _HEAD // max(1, a[0].numel() if a.dim() and len(a) else 1)))
    if a.dim() and not torch.equal(a[:head], b[:head].to(a.device)):
        return False
    return torch.equal(a, b.to(a.device))


def still(x: Tensor, held: Tensor) -> Tensor:
    """Where a tensor is what a reader has of it, bit by bit; bool, on the device of `x`."""
    return raw(x.detach()) == raw(held).to(x.device)


def agreed(found: Mapping[str, Origin], names: Iterable[str], wholes: Wholes) -> dict[str, Origin]:
    """Those of whole tensors of which no box has moved on any rank; a collective.

    Args:
        found: what has not moved of this rank's boxes.
        names: of all that this rank was asked about.
    """
    names = list(names)
    titles = wholes.all({name: name in found and not _other(found[name]) for name in names})
    alone = {name for name in names if wholes.title(name) in titles and name in found}
    titles |= wholes.all({name: name in found and _other(found[name]) in alone for name in names})
    return {name: one for name, one in found.items() if wholes.title(name) in titles}


def _stands(origin: Origin) -> bool:
    return isinstance(origin, Points) or not (origin.residual or origin.under)


def _other(origin: Origin) -> str:
    """The tensor that a tensor's points are relative to."""
    return origin.other if isinstance(origin, Points) else ""
