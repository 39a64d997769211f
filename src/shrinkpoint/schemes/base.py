"""What every scheme can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from shrinkpoint.codec import Reference
from shrinkpoint.record import Encoded
from shrinkpoint.state import FlatState


class Scheme(Protocol):
    """A named policy for a whole state. Readers never need it: a recipe says all that decoding needs."""

    id: ClassVar[str]

    def encode(self, flat: FlatState, reference: Reference | None, *, threads: int | None = None) -> Iterator[Encoded]:
        """Yield the records of `flat`, each after those whose values it needs as context.

        Args:
            reference: the parent's decoded tensors; None makes every record stand alone.
            threads: native threads; None uses every core.
        """
        ...
