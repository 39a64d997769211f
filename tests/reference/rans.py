"""The symbol stream: interleaved static rANS."""

from __future__ import annotations

from collections.abc import ItemsView

Table = list[int]
"""256 frequencies that sum to 4096."""

LOW = 1 << 16


def lanes_for(count: int) -> int:
    return 4 if count < 32768 else 32


def encode(symbols: list[int], tables: list[Table]) -> bytes:
    """`tables` has the table of each symbol."""
    lanes = lanes_for(len(symbols))
    states, words = [LOW] * lanes, []
    starts = {number: _starts(table) for number, table in _distinct(tables)}
    for i in reversed(range(len(symbols))):
        x, frequency = states[i % lanes], tables[i][symbols[i]]
        if x >= frequency << 20:
            words.append(x % LOW)
            x >>= 16
        states[i % lanes] = x // frequency * 4096 + x % frequency + starts[id(tables[i])][symbols[i]]
    head = b"".join(state.to_bytes(4, "little") for state in states)
    return head + b"".join(word.to_bytes(2, "little") for word in reversed(words))


def decode(stream: bytes, tables: list[Table]) -> list[int]:
    """As many symbols as there are `tables`."""
    lanes = lanes_for(len(tables))
    states = [int.from_bytes(stream[4 * i : 4 * i + 4], "little") for i in range(lanes)]
    at, symbols = 4 * lanes, []
    starts = {number: _starts(table) for number, table in _distinct(tables)}
    slots = {number: _slots(table) for number, table in _distinct(tables)}
    for i, table in enumerate(tables):
        x = states[i % lanes]
        slot = x % 4096
        symbol = slots[id(table)][slot]
        x = table[symbol] * (x >> 12) + slot - starts[id(table)][symbol]
        if x < LOW:
            assert at + 2 <= len(stream), "the words end too early"
            x = x * LOW + int.from_bytes(stream[at : at + 2], "little")
            at += 2
        states[i % lanes] = x
        symbols.append(symbol)
    assert at == len(stream) and set(states) == {LOW}, "the stream does not end where its encoder began"
    return symbols


def _distinct(tables: list[Table]) -> ItemsView[int, Table]:
    return {id(table): table for table in tables}.items()


def _starts(table: Table) -> list[int]:
    return [sum(table[:symbol]) for symbol in range(256)]


def _slots(table: Table) -> list[int]:
    """The symbol of each slot."""
    return [symbol for symbol, frequency in enumerate(table) for _ in range(frequency)]
