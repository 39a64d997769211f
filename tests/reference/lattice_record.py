"""Points of lattices: values, and a whole record -> codes and lattices; docs/format.md, "Points"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import record
from reference.run import Known, Run

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

EIGHTHS = (0x3F800000, 0x3F8B95C2, 0x3F9837F0, 0x3FA5FED7, 0x3FB504F3, 0x3FC5672A, 0x3FD744FD, 0x3FEAC0C7)
NOTHING = -127


@dataclass(frozen=True)
class Grid:
    """The lattice of one tensor."""

    law: str
    rows: list[int]
    columns: list[int]
    step: int
    seed: int
    gain: float | None = None

    def exponents(self) -> Integers:
        return np.array(self.rows, np.int64)[:, None] + np.array(self.columns, np.int64)[None, :]

    def steps(self, other: Floats | None) -> Floats:
        rows, columns = (power(np.array(one, np.int64)) for one in (self.rows, self.columns))
        product = rows[:, None] * columns[None, :]
        return product if other is None else product * np.sqrt(other)

    def values(self, codes: Integers, other: Floats | None, origin: Integers | None = None) -> Floats:
        """Of a matrix of codes."""
        if self.law == "log":
            return np.where(codes == NOTHING, np.float32(0), power(self.exponents() + self.step * codes))
        if self.gain is not None and origin is not None:
            beyond = (np.float32(self.gain) - np.float32(1)) * (codes - origin).astype(np.float32)
            return ((codes.astype(np.float32) + dither(self.seed, codes.shape)) + beyond) * self.steps(other)
        return (codes.astype(np.float32) + dither(self.seed, codes.shape)) * self.steps(other)


def power(n: Integers) -> Floats:
    """2^(n / 8)."""
    octaves = np.clip(n // 8, -126, 127)
    mantissas = np.array(EIGHTHS, np.uint32).view(np.float32)[n % 8]
    return mantissas * ((octaves + 127).astype(np.uint32) << 23).view(np.float32)


def dither(seed: int, shape: tuple[int, ...]) -> Floats:
    if seed == 0:
        return np.zeros(shape, np.float32)
    numbers = [place(i, seed) for i in range(prod(shape))]
    return ((np.array(numbers, np.float64) + 0.5) / 256 - 0.5).astype(np.float32).reshape(shape)


def place(i: int, seed: int) -> int:
    """A byte."""
    x = (i * 0x9E3779B1 + seed) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return (x ^ x >> 16) >> 24


def sides(shape: tuple[int, ...], axes: int = 1) -> tuple[int, int]:
    count = prod(shape)
    rows = prod(shape[:axes])
    return (rows, count // rows) if len(shape) > 1 and count else (1, count)


def spans(law: str, shape: tuple[int, ...], axes: int = 1) -> tuple[int, int]:
    rows, columns = sides(shape, axes)
    return (rows, 1 if rows == 1 or law == "relative" else columns)


@dataclass(frozen=True)
class Member:
    """One tensor of a record, and what is known of it.

    Attributes:
        parent: its values before, F32; None without `base`.
        other: what its points are relative to, F32.
        lattice: the parent's (law, rows, columns, step), with `inherited` or `moved`.
    """

    shape: tuple[int, ...]
    parent: Floats | None = None
    other: Floats | None = None
    lattice: Grid | None = None


def decode(recipe: dict[str, Any], part: bytes, members: list[Member]) -> list[tuple[Grid, Integers]]:
    """The lattice and the codes, as a matrix, of each member."""
    sizes = [int.from_bytes(part[at : at + n], "little") for at, n in ((0, 4), (4, 8), (12, 4), (16, 4))]
    described, ncodes, nside, nescapes = sizes
    cut = Cut(part[20:])
    grids = [*lattices(recipe, Cut(cut.take(described)), members)]
    side, codes = cut.take(nside), cut.take(ncodes)
    escapes = iter(np.frombuffer(cut.take(4 * nescapes), "<i4").tolist())
    assert not cut.rest
    guessed = [guess(grid, member) for grid, member in zip(grids, members, strict=True)]
    contexts = [int(context) for _, one in guessed for context in one.reshape(-1)]
    run = Run("codes", 8, predictor="base", top=recipe["run"].get("top", 0), chunk=recipe["run"].get("chunk", 262144))
    assert contexts or not side + codes
    numbers = record.decode(run, side, codes, len(contexts), Known(base=contexts)) if contexts else []
    found = iter([difference(number - context, escapes) for number, context in zip(numbers, contexts, strict=True)])
    out = []
    for grid, (points, _) in zip(grids, guessed, strict=True):
        out.append((grid, points + np.array([next(found) for _ in range(points.size)], np.int64).reshape(points.shape)))
    assert not [*escapes]
    return out


def lattices(recipe: dict[str, Any], cut: Cut, members: list[Member]) -> Iterator[Grid]:
    law, step = recipe["law"], recipe.get("step", 1)
    seeds = np.frombuffer(cut.take(4 * len(members)), "<u4").tolist()
    has_gains = recipe.get("gains", False)
    gains = np.frombuffer(cut.take(4 * len(members)), "<f4").tolist() if has_gains else [None] * len(members)
    axes = recipe.get("axes", [1] * len(members))
    counts = [n for member, k in zip(members, axes, strict=True) for n in spans(law, member.shape, k)]
    before = [half for member in members if (one := member.lattice) is not None for half in (one.rows, one.columns)]
    if recipe.get("inherited"):
        assert not cut.rest
        halves = before
    else:
        moved = recipe.get("moved")
        counts = [len(half) for half in before] if moved else counts
        found = np.array(differences(cut, sum(counts)), np.int64)
        exponents = (found + np.concatenate(before) if moved else np.cumsum(found)).tolist()
        halves = [[exponents.pop(0) for _ in range(count)] for count in counts]
    for i, seed in enumerate(seeds):
        yield Grid(law, halves[2 * i], halves[2 * i + 1], step, seed, gains[i])


def origins(part: bytes, codes: list[Integers]) -> list[Integers]:
    """The stored origins of all members, given their codes."""
    found = iter(differences(Cut(part), sum(one.size for one in codes)))
    return [one + np.array([next(found) for _ in range(one.size)], np.int64).reshape(one.shape) for one in codes]


def differences(cut: Cut, count: int) -> list[int]:
    nside, nescapes = (int.from_bytes(cut.take(4), "little") for _ in range(2))
    side, escapes = cut.take(nside), iter(np.frombuffer(cut.take(4 * nescapes), "<i4").tolist())
    numbers = record.decode(Run("codes", 8), side, cut.rest, count, Known())
    found = [difference(number, escapes) for number in numbers]
    assert not [*escapes]
    return found


def guess(grid: Grid, member: Member) -> tuple[Integers, Integers]:
    """Points and contexts."""
    shape = len(grid.rows), prod(member.shape) // len(grid.rows)
    parent, other = (None if one is None else one.reshape(shape) for one in (member.parent, member.other))
    if grid.law == "log":
        return guess_power(grid, parent, shape)
    u = dither(grid.seed, shape)
    at = -u
    if parent is not None:
        with np.errstate(all="ignore"):
            at = parent / grid.steps(other) - u
        at = np.clip(np.where(np.isfinite(at), at, np.float32(0)), np.float32(-32766), np.float32(32766))
    points = np.round(at)
    rest = at - points
    offsets = np.clip(((rest + np.float32(0.5)) * np.float32(16)).astype(np.int64), 0, 15)
    offsets[np.abs(rest) < np.float32(1 / 64)] = 16
    rows, columns = (np.array(one, np.int64) - sum(one) // len(one) for one in (grid.rows, grid.columns))
    classes = np.clip((rows[:, None] + columns[None, :]) // 4 + 4, 0, 7)
    return points.astype(np.int64), 8 * offsets + classes


def guess_power(grid: Grid, parent: Floats | None, shape: tuple[int, int]) -> tuple[Integers, Integers]:
    zeros = np.zeros(shape, np.int64)
    if parent is None:
        return zeros, zeros
    bits = np.ascontiguousarray(parent).view(np.int32).astype(np.int64)
    beyond = bits // 2**20 - 1016 - grid.exponents()
    contexts = np.clip(4 * beyond // grid.step, -12, 11) + 12
    return np.where(bits == 0, NOTHING, zeros), np.where(bits == 0, 24, contexts)


def difference(number: int, escapes: Iterator[int]) -> int:
    signed = (number + 128) % 256 - 128
    return next(escapes) if signed == -128 else signed


class Cut:
    """What is left of some bytes."""

    def __init__(self, rest: bytes) -> None:
        self.rest = rest

    def take(self, count: int) -> bytes:
        assert count <= len(self.rest)
        head, self.rest = self.rest[:count], self.rest[count:]
        return head
