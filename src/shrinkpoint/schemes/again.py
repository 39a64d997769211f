"""What a checkpoint holds already, written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shrinkpoint.codec import Origin, Points, Reference
from shrinkpoint.record import JSON
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.records import Coding
from shrinkpoint.state import FlatState


@dataclass(frozen=True)
class Again(Coding):
    """Loses nothing more: values stay as they are, and so do the symbols they were made from.

    But for symbols of differences: they are to another parent, and no later checkpoint looks at them.

    Attributes:
        symbols: of the tensors that were quantized, by name.
        loss: what was lost when they were.
        id: of the scheme that wrote it first.
    """

    symbols: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    loss: JSON = None
    id: str = "again"

    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """All of it; see `schemes.Scheme`."""
        held = {
            name: one
            for name, one in self.symbols.items()
            if name in flat.infos and (isinstance(one, Points) or not one.residual)
        }
        return Kept(flat, held, self.loss)
