"""What a checkpoint holds already, written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shrinkpoint.codec import Origin, Points, Reference
from shrinkpoint.codec.quantize import bits_of
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
            if name in flat.infos and _stands(name, one, flat, self.symbols)
        }
        return Kept(flat, held, self.loss)


def _stands(name: str, one: Origin, flat: FlatState, symbols: Mapping[str, Origin]) -> bool:
    """Whether a value is still what its symbols say, so that they can be written without the checkpoint before."""
    if not isinstance(one, Points):
        return not one.residual
    if not one.other:
        return True
    x, other = flat.tensors[name], flat.tensors.get(one.other)
    if other is None or not isinstance(symbols.get(one.other), Points) or other.shape != x.shape:
        return False  # what it was relative to has changed since
    return bool((bits_of(one.values(x.dtype, other)) == bits_of(x)).all())
