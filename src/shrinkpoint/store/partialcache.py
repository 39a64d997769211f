"""What was decoded of a chain in part, kept for what is asked for next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

from shrinkpoint.codec import Reference
from shrinkpoint.codec.partial import Block, Opened, Origin, Pieces

Node: TypeAlias = tuple[int, int]
"""A file of the chain, and a record of it, by their places."""
Key: TypeAlias = tuple[Node, int]

WHOLE = -1
"""In place of a piece's number."""


class Cache:
    """What was decoded last, within a bound of bytes.

    Attributes:
        opened, pieces, origins: of the records that were met, what is little and does not change.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.opened: dict[Node, Opened] = {}
        self.pieces: dict[Node, Pieces | None] = {}
        self.origins: dict[Node, Mapping[str, Origin]] = {}
        self._held: OrderedDict[Key, Block | Reference] = OrderedDict()
        self._bytes = 0

    def get(self, node: Node, piece: int) -> Block | Reference | None:
        found = self._held.get((node, piece))
        if found is not None:
            self._held.move_to_end((node, piece))
        return found

    def put(self, node: Node, piece: int, what: Block | Reference) -> None:
        size = size_of(what)
        if size > self.limit or (node, piece) in self._held:
            return
        self._held[node, piece] = what
        self._bytes += size
        while self._bytes > self.limit:
            self._bytes -= size_of(self._held.popitem(last=False)[1])

    def clear(self) -> None:
        for one in (self._held, self.opened, self.pieces, self.origins):
            one.clear()
        self._bytes = 0


def size_of(what: Block | Reference) -> int:
    if isinstance(what, Block):
        return what.nbytes
    origins = [one.codes for one in what.symbols.values()]
    return sum(tensor.nbytes for tensor in (*what.tensors.values(), *origins))
