"""Which tensors of a state a lossy scheme may quantize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.record import Role
from shrinkpoint.state import FlatState

SMALLEST = 4096
"""Numbers below which a weight is kept exactly: what it could gain is little, and it is the likelier to matter."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Picks:
    """The weights of a state to be quantized, and what follows from them.

    Attributes:
        tensors: by name; the state's own, on their devices.
        casts: name of a narrower copy -> name of the picked tensor it is a cast of.
        refused: weights that would have been picked but hold a nan or an infinity.
    """

    tensors: dict[str, Tensor] = field(repr=False)
    casts: dict[str, str]
    refused: tuple[str, ...] = ()

    @classmethod
    def of(cls, flat: FlatState) -> Picks:
        """Weights with two axes or more and at least `SMALLEST` values (arXiv 2306.11800 leaves open which, D1).

        Norms, biases, buffers, counters and 64-bit floats stay exact. Where a 16-bit weight is a cast of a float32
        master copy, the master is quantized and the weight follows.
        """
        wanted = {
            name: flat.tensors[name] for name, info in flat.infos.items() if _eligible(flat.tensors[name], info.role)
        }
        finite = {name: x for name, x in wanted.items() if bool(x.isfinite().all())}
        refused = tuple(name for name in wanted if name not in finite)
        casts = _casts(flat, finite)
        return cls({name: x for name, x in finite.items() if name not in casts}, casts, refused)

    def replaced(self, values: Mapping[str, Tensor], flat: FlatState) -> dict[str, Tensor]:
        """The state's tensors that change when those picked get these values: they, and their casts."""
        out = dict(values)
        for name, source in self.casts.items():
            if source in values:
                out[name] = values[source].to(flat.tensors[name].dtype)
        return out


def _eligible(x: Tensor, role: Role) -> bool:
    return role in (Role.PARAMETER, Role.MASTER) and x.dtype in _DTYPES and x.dim() >= 2 and x.numel() >= SMALLEST


def _casts(flat: FlatState, picked: Mapping[str, Tensor]) -> dict[str, str]:
    masters: dict[tuple[int, ...], list[str]] = {}
    for name, x in picked.items():
        if x.dtype == torch.float32:
            masters.setdefault(tuple(x.shape), []).append(name)
    out = {}
    for name, x in picked.items():
        if x.dtype == torch.float32:
            continue
        for master in masters.get(tuple(x.shape), []):
            if torch.equal(x.cpu(), picked[master].to(x.dtype).cpu()):
                out[name] = master
                break
    return out
