"""The default: nothing is lost. docs/schemes.md says what is written instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shrinkpoint import arguments
from shrinkpoint.codec import Reference
from shrinkpoint.codec.run import CHUNK
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.records import Coding
from shrinkpoint.schemes.spelling import Spelled
from shrinkpoint.state import FlatState


@dataclass(frozen=True, repr=False)
class Lossless(Spelled, Coding):
    """Every value comes back bit by bit.

    Raises:
        PolicyError: a chunk that is too large, or none.

    Args:
        chunk: numbers coded together; smaller ones make partial reads cheaper and files larger.
    """

    id: ClassVar[str] = "lossless"
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        arguments.whole("chunk", self.chunk, most=CHUNK)

    @property
    def arguments(self) -> dict[str, object]:
        """See `Spelled`."""
        return {"chunk": self.chunk}

    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """All of it; see `schemes.Scheme`."""
        return Kept(flat)
