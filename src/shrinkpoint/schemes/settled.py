"""A lossy scheme that has made up its mind about one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec import CODERS, Reference, Symbols
from shrinkpoint.record import JSON
from shrinkpoint.schemes import moments
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.records import Coding
from shrinkpoint.state import FlatState


@dataclass(frozen=True)
class Settled(Coding):
    """The symbols of a state's weights are chosen; what is left is to apply and to code them.

    Attributes:
        id: of the scheme that chose.
        symbols: of the weights, by name, on the CPU.
        casts: name of a narrower copy -> name of the weight it is a cast of.
        optimizer: what is done with the moments.
        coders: how codes may be coded.
        loss: for the manifest: what was tried, measured and chosen.
    """

    id: str
    symbols: Mapping[str, Symbols] = field(repr=False)
    casts: Mapping[str, str] = field(default_factory=dict)
    optimizer: moments.Mode = "exact"
    coders: Sequence[str] = CODERS
    loss: JSON = None

    @torch.no_grad()
    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """Put the chosen values in place; `flat` is the state that was settled, or a copy. See `schemes.Scheme`."""
        symbols = dict(self.symbols)
        changed: dict[str, Tensor] = {}
        if self.optimizer == "reset":
            changed.update(moments.reset(flat))
        elif self.optimizer == "lossy":
            symbols.update((name, one.cpu()) for name, one in moments.lossy(flat))
        for name, one in symbols.items():
            base = reference.tensors[name] if one.residual and reference is not None else None
            changed[name] = one.values(flat.tensors[name].dtype, base)
        for name, source in self.casts.items():
            if source in changed:
                changed[name] = changed[source].to(flat.tensors[name].dtype)
        tensors = {name: changed.get(name, tensor) for name, tensor in flat.tensors.items()}
        return Kept(replace(flat, tensors=tensors), symbols, self.loss)
