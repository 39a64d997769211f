"""The default: nothing is lost. docs/schemes.md says what is written instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shrinkpoint.codec import Reference, Symbols
from shrinkpoint.codec.run import CHUNK
from shrinkpoint.errors import PolicyError
from shrinkpoint.record import Encoded
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.records import records
from shrinkpoint.state import FlatState


@dataclass(frozen=True)
class Lossless:
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

    def encode(
        self,
        flat: FlatState,
        reference: Reference | None,
        *,
        symbols: Mapping[str, Symbols] | None = None,
        threads: int | None = None,
    ) -> Iterator[Encoded]:
        """Yield the records of `flat`; see `schemes.Scheme`."""
        return records(flat, reference, symbols=symbols, chunk=self.chunk, threads=threads)
