"""Bit fields without gaps, least significant bit first."""

from __future__ import annotations


class Writer:
    """One Python integer that grows at its top."""

    def __init__(self) -> None:
        self.bits, self.filled = 0, 0

    def put(self, field: int, width: int) -> None:
        assert 0 <= field < 1 << width
        self.bits |= field << self.filled
        self.filled += width

    def bytes(self) -> bytes:
        return self.bits.to_bytes((self.filled + 7) // 8, "little")


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def get(self, width: int) -> int:
        first, end = self.position // 8, (self.position + width + 7) // 8
        assert end <= len(self.data), "the bits end too early"
        field = int.from_bytes(self.data[first:end], "little") >> self.position % 8
        self.position += width
        return field & ((1 << width) - 1)

    def at_end(self) -> bool:
        """True if only the filling up to a whole byte is left."""
        return (self.position + 7) // 8 == len(self.data)


def pack(fields: list[int], width: int) -> bytes:
    writer = Writer()
    for field in fields:
        writer.put(field & ((1 << width) - 1), width)
    return writer.bytes()


def unpack(data: bytes, count: int, width: int) -> list[int]:
    reader = Reader(data)
    return [reader.get(width) for _ in range(count)]
