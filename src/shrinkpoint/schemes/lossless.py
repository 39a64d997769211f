"""The default: nothing is lost. docs/schemes.md says what is written instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shrinkpoint.codec import Reference
from shrinkpoint.codec.run import CHUNK
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.records import Coding
from shrinkpoint.state import FlatState


@dataclass(frozen=True)
class Lossless(Coding):
    """Every value comes back bit by bit.

    Raises:
        PolicyError: a chunk that is too large, or none.

    Args:
        chunk: numbers coded together; smaller ones make partial reads cheaper and files larger.
    """

    id: ClassVar[str] = "lossless"
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if not 0 < self.chunk <= CHUNK:
            raise PolicyError("Lossless.chunk", found=f"{self.chunk}", expected=f"1 to {CHUNK}", do="choose another")

    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """All of it; see `schemes.Scheme`."""
        return Kept(flat)
