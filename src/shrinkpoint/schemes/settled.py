"""A lossy scheme that has made up its mind about one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec import CODERS, Origin, Points, Reference
from shrinkpoint.record import JSON
from shrinkpoint.schemes import moments
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.exact import reasons
from shrinkpoint.schemes.records import Coding
from shrinkpoint.state import FlatState


@dataclass(frozen=True)
class Settled(Coding):
    """The symbols of a state's weights are chosen; what is left is to apply and to code them.

    Attributes:
        id: of the scheme that chose.
        symbols: of what is quantized, by name, on the CPU.
        casts: name of a narrower copy -> name of the weight it is a cast of.
        optimizer: what is done with the moments.
        coders: how codes may be coded.
        loss: for the manifest: what was tried, measured and chosen.
        values: of points, where they were computed already; on the CPU.
        keyframe: as of `Kept`.
        least: how many values and axes a weight has that is quantized; None: these are boxes of weights, of which no
            single process can say why they stay exact.
    """

    id: str
    symbols: Mapping[str, Origin] = field(repr=False)
    casts: Mapping[str, str] = field(default_factory=dict)
    optimizer: moments.Mode = "exact"
    coders: Sequence[str] = CODERS
    loss: JSON = None
    values: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    keyframe: bool = False
    least: tuple[int, int] | None = None

    @torch.no_grad()
    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """Put the chosen values in place; `flat` is the state that was settled, or a copy. See `schemes.Scheme`."""
        symbols = dict(self.symbols)
        changed: dict[str, Tensor] = {}
        if self.optimizer == "reset":
            changed.update(moments.reset(flat))
        elif self.optimizer == "lossy":
            symbols.update((name, one.cpu()) for name, one in moments.lossy(flat))
        for name, one in sorted(symbols.items(), key=lambda item: isinstance(item[1], Points) and bool(item[1].other)):
            made = self.values.get(name)
            if made is None:
                made = one.values(flat.tensors[name].dtype, _beside(one, name, changed, reference))
            changed[name] = made
        for name, source in self.casts.items():
            if source in changed:
                changed[name] = changed[source].to(flat.tensors[name].dtype)
        tensors = {name: changed.get(name, tensor) for name, tensor in flat.tensors.items()}
        exact = {} if self.least is None else reasons(flat, changed, self._refused, *self.least)
        return Kept(replace(flat, tensors=tensors), symbols, self.loss, self.keyframe, exact)

    @property
    def _refused(self) -> list[str]:
        found = self.loss.get("left_out") if isinstance(self.loss, dict) else None
        return found if isinstance(found, list) else []


def _beside(one: Origin, name: str, changed: Mapping[str, Tensor], reference: Reference | None) -> Tensor | None:
    """What else decides the values: the parent's, or those of another tensor, which come first."""
    if isinstance(one, Points):
        return changed[one.other] if one.other else None
    return reference.tensors[name] if one.residual and reference is not None else None
