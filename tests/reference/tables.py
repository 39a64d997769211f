"""The tables and the context map as they stand in the side data."""

from __future__ import annotations

from reference.bits import Reader, Writer
from reference.rans import Table


def write(context_map: list[int], tables: list[Table]) -> bytes:
    writer = Writer()
    writer.put(len(tables) - 1, 4)
    last = 0
    for table in context_map:
        writer.put(table != last, 1)
        if table != last:
            writer.put(table, 4)
        last = table
    for frequencies in tables:
        _write_table(writer, frequencies)
    return writer.bytes() + bytes(8)


def read(data: bytes, contexts: int) -> tuple[list[int], list[Table]]:
    assert data.endswith(bytes(8))
    reader = Reader(data[:-8])
    count = reader.get(4) + 1
    context_map: list[int] = []
    for _ in range(contexts):
        context_map.append(reader.get(4) if reader.get(1) else (context_map or [0])[-1])
    tables = [_read_table(reader) for _ in range(count)]
    assert max(context_map) < count and reader.at_end()
    return context_map, tables


def _write_table(writer: Writer, frequencies: Table) -> None:
    used = [symbol for symbol in range(256) if frequencies[symbol]]
    writer.put(used[0], 8)
    writer.put(used[-1], 8)
    for symbol in range(used[0], used[-1] + 1):
        number = frequencies[symbol] + 1
        k = number.bit_length() - 1
        writer.put(0, k)
        writer.put(1, 1)
        writer.put(number - (1 << k), k)


def _read_table(reader: Reader) -> Table:
    out = [0] * 256
    first, last = reader.get(8), reader.get(8)
    for symbol in range(first, last + 1):
        k = 0
        while reader.get(1) == 0:
            k += 1
        out[symbol] = (1 << k) + reader.get(k) - 1
    assert sum(out) == 4096
    return out
