"""A whole run: side data and codes <-> numbers (bit patterns)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reference import planes, predict, rans, tables, tokens
from reference.bits import Reader, Writer
from reference.rans import Table
from reference.run import Known, Run

Shapes = list[tuple[int, int]]


def decode(run: Run, side: bytes, codes: bytes, count: int, known: Known, shapes: Shapes | None = None) -> list[int]:
    size = int.from_bytes(side[:4], "little")
    context_map, all_tables = tables.read(side[4 : 4 + size], run.contexts(known))
    factors, rest = 4 + size, 4 + size
    if shapes is not None:
        rest += predict.factors_size(shapes)
        known = replace(known, levels=predict.factor_levels(side[factors:rest], shapes))
    sizes = [int.from_bytes(side[at : at + 4], "little") for at in range(rest, len(side), 4)]
    contexts, predicted = _foreseen(run, known, count)
    out: list[int] = []
    for (start, end), size in zip(_chunks(run, count), sizes, strict=True):
        chunk, codes = codes[:size], codes[size:]
        of = [all_tables[context_map[context]] for context in _of_chunk(run, contexts, start, end)]
        out += _decode_chunk(run, chunk, of, predicted[start:end])
    assert not codes
    return out


def encode(
    run: Run, numbers: list[int], known: Known, context_map: list[int], all_tables: list[Table]
) -> tuple[bytes, bytes]:
    """(side, codes) under tables that must have every symbol; without factors."""
    contexts, predicted = _foreseen(run, known, len(numbers))
    written = tables.write(context_map, all_tables)
    side, codes = len(written).to_bytes(4, "little") + written, b""
    for start, end in _chunks(run, len(numbers)):
        of = [all_tables[context_map[context]] for context in _of_chunk(run, contexts, start, end)]
        chunk = _encode_chunk(run, numbers[start:end], of, predicted[start:end])
        side, codes = side + len(chunk).to_bytes(4, "little"), codes + chunk
    return side, codes


def _foreseen(run: Run, known: Known, count: int) -> tuple[list[int], list[int]]:
    """(contexts, predictions) of all numbers: neither depends on the numbers themselves."""
    if run.tokens == "planes":
        return [], [0] * count
    if run.tokens == "level":
        pairs = [tokens.level_context(run, known, i) for i in range(count)]
        return [context for context, _ in pairs], [level for _, level in pairs]
    if run.tokens == "codes":
        predicted = known.base if run.predictor == "base" else [0] * count
        return [tokens.code_context(run, known, i) for i in range(count)], predicted
    predicted, squares = predict.predictions(run, known, count)
    return [tokens.delta_context(run, known, i, predicted[i], squares) for i in range(count)], predicted


def _chunks(run: Run, count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, run.chunk):
        yield start, min(count, start + run.chunk)


def _of_chunk(run: Run, contexts: list[int], start: int, end: int) -> list[int]:
    """The context of each symbol of a chunk."""
    if run.tokens == "planes":
        return [place for place in range(run.width // 8) for _ in range(start, end)]
    return contexts[start:end]


def _decode_chunk(run: Run, chunk: bytes, of: list[Table], predicted: list[int]) -> list[int]:
    size = int.from_bytes(chunk[:4], "little")
    symbols = rans.decode(chunk[4 : 4 + size], of)
    assert chunk.endswith(bytes(8))
    extra = Reader(chunk[4 + size : -8])
    if run.tokens == "planes":
        data, width = planes.join(bytes(symbols), run.width // 8), run.width // 8
        out = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
    else:
        number = {"level": tokens.level_number, "delta": tokens.delta_number, "codes": tokens.code_number}[run.tokens]
        out = [number(run, symbol, p, extra.get) for symbol, p in zip(symbols, predicted, strict=True)]
    assert extra.at_end()
    return out


def _encode_chunk(run: Run, numbers: list[int], of: list[Table], predicted: list[int]) -> bytes:
    extra, symbols = Writer(), []
    if run.tokens == "planes":
        width = run.width // 8
        symbols = list(planes.split(b"".join(number.to_bytes(width, "little") for number in numbers), width))
    else:
        symbol_of = {"level": tokens.level_symbol, "delta": tokens.delta_symbol, "codes": tokens.code_symbol}[
            run.tokens
        ]
        for number, p in zip(numbers, predicted, strict=True):
            symbol, fields = symbol_of(run, number, p)
            symbols.append(symbol)
            for value, width in fields:
                extra.put(value, width)
    stream = rans.encode(symbols, of)
    return len(stream).to_bytes(4, "little") + stream + extra.bytes() + bytes(8)
