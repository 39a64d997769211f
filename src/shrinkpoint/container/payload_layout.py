"""Where the parts of records lie in a file of format 2 or 3, and which safetensors entries cover them."""

from __future__ import annotations

from shrinkpoint.container.header import MARKER_ENTRY, MARKER_SHAPE, Slot
from shrinkpoint.container.metadata import FILLER_PREFIX, RENAMED_PREFIX, filler_size
from shrinkpoint.tensors.info import TensorInfo

INDEX_ENTRY = "~index"
"""Name of the last entry."""
PARTS_PREFIX = "~parts/"
"""Prefix of the entries of bytes that only this library decodes."""
_RESERVED = (FILLER_PREFIX, RENAMED_PREFIX, PARTS_PREFIX)


class PayloadLayout:
    """Places parts one behind the other: a tensor in an entry of its own, all bytes between two of them in one.

    Attributes:
        slots: the entries, except the one of the bytes behind the last tensor until `end` is called.
        size: bytes of the payload so far.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.size = 0
        self._begin = 0  # of the bytes that no entry covers yet

    def add(self, size: int, tensor: TensorInfo | None) -> tuple[int, str]:
        """Place a part.

        Args:
            tensor: what the part is an entry of; None if it is a part that only this library decodes.

        Returns:
            The filler bytes before it, and the name of its entry.
        """
        if tensor is None:
            self.size += size
            return 0, f"{PARTS_PREFIX}{len(self.slots)}"
        pad = filler_size(tensor.dtype, size, self.size)
        self.size += pad
        self._cover_bytes()
        name = tensor.name if is_free(tensor.name) else f"{RENAMED_PREFIX}{len(self.slots)}"
        self.slots.append(Slot(name, tensor.dtype, tensor.shape, self.size, self.size + size))
        self.size += size
        self._begin = self.size
        return pad, name

    def end(self, index_size: int, *, marked: bool) -> None:
        """Place the marker, which format 2 does not have, and the index."""
        self._cover_bytes()
        if marked:
            self.slots.append(Slot(MARKER_ENTRY, "U8", MARKER_SHAPE, self.size, self.size))
        self.slots.append(Slot(INDEX_ENTRY, "U8", (index_size,), self.size, self.size + index_size))
        self.size += index_size

    def _cover_bytes(self) -> None:
        if self.size > self._begin:
            name = f"{PARTS_PREFIX}{len(self.slots)}"
            self.slots.append(Slot(name, "U8", (self.size - self._begin,), self._begin, self.size))


def is_free(name: str) -> bool:
    """Whether the entry of a tensor may have its name: not reserved, and valid Unicode, as safetensors requires."""
    reserved = name in ("__metadata__", INDEX_ENTRY) or name.startswith(_RESERVED)
    return not reserved and not any("\ud800" <= char <= "\udfff" for char in name)
