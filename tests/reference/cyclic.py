"""Cyclic deltas: docs/format.md."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from reference import huffman
from reference.bits import Reader, Writer


@dataclass(frozen=True)
class Cyclic:
    modulus: int
    rearranged: bool
    runs: bool

    def alphabet(self, count: int) -> int:
        return self.modulus + (count.bit_length() - 1 if self.runs else 0)

    def groups(self, previous: list[int] | None, count: int) -> list[list[int]]:
        """Positions in the order in which their deltas stand; no group is empty."""
        if previous is None or not self.rearranged:
            return [list(range(count))] if count else []
        found = [[i for i in range(count) if previous[i] == code] for code in range(self.modulus)]
        return [group for group in found if group]


def encode(form: Cyclic, codes: list[int], previous: list[int] | None) -> bytes:
    writer, before = Writer(), previous or [0] * len(codes)
    for group in form.groups(previous, len(codes)):
        deltas = [(before[i] - codes[i]) % form.modulus for i in group]
        tokens = runs_of(form, deltas) if form.runs else [(delta, 0, 0) for delta in deltas]
        counts = [0] * form.alphabet(len(group))
        for symbol, _, _ in tokens:
            counts[symbol] += 1
        lengths = huffman.lengths(counts)
        huffman.write(lengths, writer)
        for symbol, raw, width in tokens:
            huffman.put([symbol], lengths, writer)
            writer.put(raw, width)
    return writer.bytes()


def runs_of(form: Cyclic, deltas: list[int]) -> list[tuple[int, int, int]]:
    """(symbol, raw bits, how many of them)."""
    out = []
    for delta, same in groupby(deltas):
        length = len(list(same))
        out.append((delta, 0, 0))
        if length > 1:
            j = length.bit_length() - 1
            out.append((form.modulus + j - 1, length - (1 << j), j))
    return out


def decode(form: Cyclic, data: bytes, previous: list[int] | None, count: int) -> list[int]:
    reader, before = Reader(data), previous or [0] * count
    out = [0] * count
    for group in form.groups(previous, count):
        lengths = huffman.read(reader, form.alphabet(len(group)))
        for i, delta in zip(group, deltas_of(form, reader, lengths, len(group)), strict=True):
            out[i] = (before[i] - delta) % form.modulus
    assert reader.at_end()
    return out


def deltas_of(form: Cyclic, reader: Reader, lengths: list[int], count: int) -> list[int]:
    out, may_repeat, codes = [], False, huffman.codes(lengths)
    while len(out) < count:
        symbol = huffman.get(reader, codes)
        if symbol < form.modulus:
            out.append(symbol)
        else:
            assert may_repeat
            j = symbol - form.modulus + 1
            out += [out[-1]] * ((1 << j) + reader.get(j) - 1)
        may_repeat = symbol < form.modulus
    return out
