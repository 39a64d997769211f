"""Whether what was read is what was written, bit for bit."""

from __future__ import annotations

import json

import torch

from shrinkpoint.record import JSON
from shrinkpoint.state import FlatState
from shrinkpoint.store.file import Decoded


def difference(source: FlatState, found: Decoded) -> str:
    """The first thing in which a decoded checkpoint differs from its source; "" where nothing does."""
    what = outline_difference(source, found.tree, {name: t.shape for name, t in found.reference.tensors.items()})
    if what:
        return what
    for name, tensor in source.tensors.items():
        other = found.reference.tensors[name]
        if other.dtype != tensor.dtype:
            return f"{name} is {other.dtype} and was {tensor.dtype}"
        if not same_bits(tensor, other):
            return f"{name} has other values"
    return ""


def outline_difference(
    source: FlatState, tree: JSON, shapes: dict[str, torch.Size] | dict[str, tuple[int, ...]]
) -> str:
    """The same for all but the values of the tensors."""
    if json.loads(json.dumps(source.tree)) != tree:
        return "other plain values or another nest"
    if source.tensors.keys() != shapes.keys():
        odd = sorted(source.tensors.keys() ^ shapes.keys())
        return f"other tensors: {', '.join(odd[:3])}"
    for name, tensor in source.tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            return f"{name} has shape {list(shapes[name])} and had {list(tensor.shape)}"
    return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of tensors of one dtype and shape; nan equals itself, and 0.0 differs from -0.0."""
    if a.numel() == 0:
        return True
    rows = [one.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for one in (a, b)]
    return torch.equal(*rows)
