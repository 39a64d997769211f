"""Which tensors of a state a lossy scheme may quantize."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.errors import LossWarning
from shrinkpoint.record import Role
from shrinkpoint.state import AdamFacts, FlatState

SMALLEST = 4096
"""Numbers below which a weight is kept exactly: what it could gain is little, and it is the likelier to matter."""
_FEW = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Picks:
    """The weights of a state to be quantized, and what follows from them.

    Attributes:
        tensors: by name; the state's own, on their devices.
        casts: name of a copy, narrower or not -> name of the picked tensor it is a cast of.
        refused: weights that would have been picked but hold a nan or an infinity.
    """

    tensors: dict[str, Tensor] = field(repr=False)
    casts: dict[str, str]
    refused: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, flat: FlatState, alive: Collection[str] | None = None, *, smallest: int = SMALLEST, axes: int = 2
    ) -> Picks:
        """Weights with two axes or more and at least `SMALLEST` values (arXiv 2306.11800 leaves open which, D1).

        Norms, biases, buffers, counters and 64-bit floats stay exact. Where a 16-bit weight is a cast of a float32
        master copy, the master is quantized and the weight follows.

        Args:
            alive: the names of a model's own parameters, where these are known: nothing else is then picked, but for
                the masters of those.
            smallest, axes: how many values and axes a weight has at least.
        """

        def is_weight(name: str, role: Role) -> bool:
            return role is Role.MASTER or (role is Role.PARAMETER if alive is None else name in alive)

        wanted = {
            name: flat.tensors[name]
            for name, info in flat.infos.items()
            if is_weight(name, info.role) and _fits(flat.tensors[name], smallest, axes)
        }
        finite = {name: x for name, x in wanted.items() if math.isfinite(largest(x))}
        casts = _casts(finite)
        ours = {*(wanted if alive is None else alive), *casts.values()}
        tensors = {name: x for name, x in finite.items() if name in ours and name not in casts}
        return cls(tensors, casts, tuple(name for name in wanted if name in ours and name not in finite))

    def warn(self) -> None:
        """Say what was refused, where something was."""
        if self.refused:
            text = f"weights with values that are not finite are kept as they are: {', '.join(self.refused)}"
            warnings.warn(text, LossWarning, stacklevel=3)

    def handed_on(self, flat: FlatState) -> dict[str, AdamFacts]:
        """What the optimizer knows, of the master copies where it was found to know it of the narrow ones."""
        out = {name: facts for name, facts in flat.optim.items() if name not in self.casts}
        for name, master in self.casts.items():
            if name in flat.optim:
                out.setdefault(master, flat.optim[name])
        return out

    def folded(self, owned: Collection[str]) -> Picks:
        """The same, but copies of a weight that an optimizer knows follow that weight (a tied one, saved twice).

        Args:
            owned: names of what an optimizer knows.
        """
        known: dict[tuple[int, ...], list[str]] = {}
        for name, x in self.tensors.items():
            if name in owned:
                known.setdefault(tuple(x.shape), []).append(name)
        copies = {}
        for name, x in self.tensors.items():
            for other in known.get(tuple(x.shape), []) if name not in owned else []:
                if x.dtype == self.tensors[other].dtype and is_cast(x, self.tensors[other]):
                    copies[name] = other
                    break
        tensors = {name: x for name, x in self.tensors.items() if name not in copies}
        return Picks(tensors, self.casts | copies, self.refused)

    def without(self, names: Collection[str]) -> Picks:
        """The same but for these; what is a cast of one of them stays so."""
        tensors = {name: x for name, x in self.tensors.items() if name not in names}
        return Picks(tensors, self.casts, self.refused)

    def replaced(self, values: Mapping[str, Tensor], flat: FlatState) -> dict[str, Tensor]:
        """The state's tensors that change when those picked get these values: they, and their casts."""
        out = dict(values)
        for name, source in self.casts.items():
            if source in values:
                out[name] = values[source].to(flat.tensors[name].dtype)
        return out


def largest(x: Tensor) -> float:
    """The largest magnitude, 0 of nothing; not finite where a value is not. A tenth of the time of `isfinite`."""
    if x.numel() == 0:
        return 0.0
    low, high = (float(end) for end in torch.aminmax(x.detach()))
    return math.nan if math.isnan(low) else max(-low, high)


def _fits(x: Tensor, smallest: int, axes: int) -> bool:
    return x.dtype in DTYPES and x.dim() >= axes and x.numel() >= smallest


def _casts(picked: Mapping[str, Tensor]) -> dict[str, str]:
    masters: dict[tuple[int, ...], list[str]] = {}
    for name, x in picked.items():
        if x.dtype == torch.float32:
            masters.setdefault(tuple(x.shape), []).append(name)
    out = {}
    for name, x in picked.items():
        if x.dtype == torch.float32:
            continue
        for master in masters.get(tuple(x.shape), []):
            if is_cast(x, picked[master]):
                out[name] = master
                break
    return out


def is_cast(x: Tensor, master: Tensor) -> bool:
    """A few values first: most layers of a model have the same shape, and each would be compared with each."""
    some, others = (one.detach().reshape(-1)[:_FEW].cpu() for one in (x, master))
    return torch.equal(some, others.to(x.dtype)) and torch.equal(x.cpu(), master.to(x.dtype).cpu())
