"""The default: nothing is lost. docs/schemes.md says what is written instead."""

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
    """Every value comes back bit by bit.

    Raises:
        PolicyError: a chunk that is too large, or none.

    Args:
        chunk: numbers coded together; smaller ones make partial reads cheaper and files larger.
    """

    id: ClassVar[str] = "lossless"
    chunk: int = MAX_CHUNK

    def __post_init__(self) -> None:
        validate.check_int("chunk", self.chunk, maximum=MAX_CHUNK)

    @property
    def arguments(self) -> dict[str, object]:
        """See `SpecMixin`."""
        return {"chunk": self.chunk}

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """All of it; see `schemes.Scheme`."""
        return QuantizedState(state)
