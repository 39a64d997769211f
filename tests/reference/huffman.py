"""Canonical Huffman codes of at most 15 bits, and their tables."""

from __future__ import annotations

from collections.abc import Iterable

from reference.bits import Reader, Writer

MOST = 15
Lengths = list[int]
"""Of the code of each symbol of the alphabet; 0 for those that have none."""


def lengths(counts: list[int]) -> Lengths:
    """The coin collector's problem: the cheapest 2n - 2 among packages, each a weight and the symbols in it."""
    singles = sorted((count, [symbol]) for symbol, count in enumerate(counts) if count)
    packages = singles
    for _ in range(MOST - 1):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[::2], packages[1::2], strict=False)]
        packages = sorted(singles + pairs, key=lambda package: package[0])
    out = [0] * len(counts)
    for _, symbols in packages[: 2 * len(singles) - 2]:
        for symbol in symbols:
            out[symbol] += 1
    if len(singles) == 1:
        out[singles[0][1][0]] = 1
    return out


def cost(counts: list[int], of: Lengths) -> int:
    """Bits of all symbols."""
    return sum(count * length for count, length in zip(counts, of, strict=True))


def codes(of: Lengths) -> dict[str, int]:
    """The symbol of each code; codes in the order in which their bits are read."""
    out, code = {}, 0
    for length in range(1, MOST + 1):
        for symbol, one in enumerate(of):
            if one == length:
                out[f"{code:0{length}b}"] = symbol
                code += 1
        code *= 2
    return out


def write(of: Lengths, writer: Writer) -> None:
    used = [symbol for symbol, length in enumerate(of) if length]
    for before, symbol in zip([-1, *used], used, strict=False):
        write_gamma(symbol - before, writer)
        writer.put(0 if len(used) == 1 else of[symbol], 4)


def write_gamma(number: int, writer: Writer) -> None:
    k = number.bit_length() - 1
    writer.put(0, k)
    writer.put(1, 1)
    writer.put(number - (1 << k), k)


def read(reader: Reader, alphabet: int) -> Lengths:
    out, symbol, taken = [0] * alphabet, -1, 0
    while taken < 1 << MOST:
        k = 0
        while reader.get(1) == 0:
            k += 1
        symbol += (1 << k) + reader.get(k)
        length = reader.get(4)
        assert length > 0 or taken == 0
        out[symbol] = length or 1
        taken += 1 << (MOST - length)
    assert taken == 1 << MOST
    return out


def put(symbols: Iterable[int], of: Lengths, writer: Writer) -> None:
    code_of = {symbol: code for code, symbol in codes(of).items()}
    for symbol in symbols:
        for bit in code_of[symbol]:
            writer.put(int(bit), 1)


def get(reader: Reader, of: dict[str, int]) -> int:
    code = ""
    while code not in of:
        code += str(reader.get(1))
        assert len(code) <= MOST, "bits that are no code"
    return of[code]
