"""The lossless scheme, the default (docs/schemes.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shrinkpoint import validate
from shrinkpoint.codec.coder import MAX_CHUNK
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.base import QuantizedState, SpecMixin
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.tensors.flat_state import FlatState


@dataclass(frozen=True, repr=False)
class Lossless(SpecMixin, RecordEncodingMixin):
    """Encodes every tensor bit-exact.

    Args:
        chunk: number of values that are coded together; smaller chunks make partial reads cheaper and files larger.

    Raises:
        PolicyError: `chunk` is out of range.
    """

    id: ClassVar[str] = "lossless"
    chunk: int = MAX_CHUNK

    def __post_init__(self) -> None:
        validate.check_int("chunk", self.chunk, maximum=MAX_CHUNK)

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments of the constructor, by name."""
        return {"chunk": self.chunk}

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Return the state unchanged."""
        return QuantizedState(state)
