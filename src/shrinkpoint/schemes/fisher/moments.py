"""An optimizer's moments on lattices.

Second moments as powers of two around the mean of their row and column: what is left is mostly the noise of an average
over few gradients. First moments as multiples of the square root of what a reader has of the second ones, which is what
Adam divides them by; with subtractive dither, so that an average over weights, and over saves, is what it was. Rounded
to the nearest, small ones would all become zero, and ten steps of training with them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shrinkpoint.codec import Lattice, Points
from shrinkpoint.codec.lattice import FINE, MOST_EXPONENT, NOTHING, matrix, spans
from shrinkpoint.codec.quantize.points import nearest
from shrinkpoint.record import Role
from shrinkpoint.schemes.picks import largest
from shrinkpoint.schemes.wholes import Margins
from shrinkpoint.state import FlatState

DTYPES = (torch.float32, torch.bfloat16)
_SMALLEST = 2.0**-120  # of a second moment that a lattice reaches
_AVERAGES = ("exp_avg_sq", "square_avg")
FEWEST = 16
"""Values of a tensor that is quantized at least."""


@dataclass(frozen=True)
class Steps:
    """How coarse moments are.

    Attributes:
        first: of a first moment, in square roots of second moments.
        most: of a first moment, in root mean squares of its row.
        second: of a second moment, in eighths of an octave.
        zone: half the width of what becomes the mean of row and column, in steps.
        lasting: as `second`, of what never forgets (a sum, a maximum), so that no error heals.
        lone: of a first moment without a second one, in root mean squares of its row and column.
    """

    first: float = 2.0
    most: float = 8.0
    second: int = 24
    zone: float = 0.6
    lasting: int = 4
    lone: float = 4.0


def moments(
    flat: FlatState,
    save: int,
    seed: int,
    steps: Steps,
    made: dict[str, Tensor] | None = None,
    kept: Collection[str] = (),
) -> Iterator[tuple[str, Points]]:
    """Points of every moment that is large enough and finite; the others stay exact.

    Args:
        save: a number that no other save of this run has: of the dither.
        made: filled with the values of second moments, which first ones need.
        kept: names of those that have points already; the second ones of them are in `made`.
    """
    pairs = {facts.moment1: facts.moment2 for facts in flat.optim.values() if facts.moment1 is not None}
    owners = {second: first for first, second in pairs.items() if second is not None}
    usable = {name: x for name, x in flat.tensors.items() if _usable(x, flat.infos[name].role)}
    made = {} if made is None else made
    for name, x in usable.items():
        if flat.infos[name].role is Role.MOMENT2 and name not in kept and not bool((x < 0).any()):
            floor = floor_of(usable.get(owners.get(name, "")), x)
            chosen = second(x, floor, steps_of(name.rpartition("/")[2], steps))
            made[name] = chosen.values(x.dtype)
            yield name, chosen
    for name, x in usable.items():
        if flat.infos[name].role is not Role.MOMENT1 or name in kept:
            continue
        other = pairs.get(name) or ""
        number = zlib.crc32(f"{seed}/{save}/{name}".encode()) or 1
        if other in made and made[other].shape == x.shape and made[other].dtype == torch.float32:
            points = first(x, made[other], other, number, steps)
        else:
            points = lone(x, number, steps)
        if points is not None:
            yield name, points


def steps_of(slot: str, steps: Steps) -> Steps:
    """Of a second moment by the name that the optimizer has for it."""
    return steps if slot in _AVERAGES else replace(steps, second=steps.lasting, zone=0.5)


def second(v: Tensor, floor: Tensor | None, steps: Steps, sides: tuple[Tensor, Tensor] | None = None) -> Points:
    """Of a second moment; where it is zero it stays so, unless `floor` (bool) says that it may not.

    Args:
        sides: exponents of rows and columns, where they are known.
    """
    logs, there = logarithms(v, floor)
    rows, columns = _factors(logs, there, spans("log", tuple(v.shape))) if sides is None else sides
    lattice = Lattice("log", rows, columns, step=steps.second)
    by_row, by_column = (side.to(v.device, torch.float32) for side in (rows, columns))
    at = logs.sub_(by_row[:, None]).sub_(by_column).div_(steps.second)
    codes = at.round().masked_fill_(at.abs() < steps.zone, 0).clamp_(NOTHING + 1, -NOTHING)
    if there is not None:
        codes.masked_fill_(~there, NOTHING)
    return Points(codes.to(torch.int16).reshape(v.shape), lattice)


def logarithms(v: Tensor, floor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of a second moment as a matrix, in eighths of an octave; and where it counts as being there, None: everywhere."""
    values = matrix(v).to(torch.float32)
    there = values > 0 if floor is None else (values > 0) | matrix(floor)
    return values.clamp(min=_SMALLEST).log2_().mul_(FINE), None if bool(there.all()) else there


def first(m: Tensor, v: Tensor, other: str, seed: int, steps: Steps, rows: Tensor | None = None) -> Points | None:
    """Of a first moment, relative to the square root of `v`, which a reader has as `other`.

    Args:
        rows: exponents of rows, where they are known.
    """
    rows = first_rows(relative_squares(m, v).mean(1), steps) if rows is None else rows
    lattice = Lattice("relative", rows, torch.zeros(1, dtype=torch.int16), seed=seed)
    return nearest(m, lattice, other=v, name=other)


def relative_squares(m: Tensor, v: Tensor) -> Tensor:
    """Of a first moment, divided by the second one; a matrix."""
    return matrix(m).to(torch.float32).square().div_(matrix(v)).nan_to_num_(0.0, 0.0, 0.0)


def first_rows(means: Tensor, steps: Steps) -> Tensor:
    """Exponents of rows, from the means of `relative_squares`."""
    wide = (means.sqrt() * steps.most).clamp(max=steps.first, min=2.0 ** (-MOST_EXPONENT / FINE))
    return _exponents(wide)


def lone(m: Tensor, seed: int, steps: Steps, sides: tuple[Tensor, Tensor] | None = None) -> Points | None:
    """Of a first moment without a second one (momentum); None, for exact, where some are zero and must stay so.

    Args:
        sides: exponents of rows and columns, where they are known; then no value is zero.
    """
    if sides is None:
        values = matrix(m).to(torch.float32)
        squares = values.square()
        if not bool(values.all()):
            return None
        means = float(squares.mean()), squares.mean(1), squares.mean(0)
        sides = lone_sides(*means, spans("linear", tuple(m.shape)), steps)
    return None if sides is None else nearest(m, Lattice("linear", *sides, seed=seed))


def lone_sides(
    whole: float, rows: Tensor, columns: Tensor, counts: tuple[int, int], steps: Steps
) -> tuple[Tensor, Tensor] | None:
    """Exponents of rows and columns, from the means of squares: of all, and by row and by column."""
    if not 0 < whole < math.inf:
        return None
    rows = (rows / whole).sqrt() if counts[0] > 1 else torch.ones(1, device=rows.device)
    columns = (columns / whole).sqrt() if counts[1] > 1 else torch.ones(1, device=columns.device)
    tiny = 2.0**-20
    return _exponents(rows.clamp(min=tiny) * (whole**0.5 * steps.lone)), _exponents(columns.clamp(min=tiny))


def _factors(logs: Tensor, there: Tensor | None, counts: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Means of logarithms by row and by column, of what is there (None: all of it); whole numbers."""
    if there is None:
        rows, columns, whole = logs.mean(1), logs.mean(0), logs.mean()
    else:
        weight = there.to(torch.float32)
        logs = logs * weight
        whole = logs.sum() / weight.sum().clamp(min=1)
        rows, columns = (
            torch.where(weight.sum(axis) > 0, logs.sum(axis) / weight.sum(axis).clamp(min=1), whole) for axis in (1, 0)
        )
    return _whole_numbers(rows, torch.zeros(1) if counts[1] == 1 else columns - whole)


def factors_of(logs: Margins, there: Margins | None) -> tuple[Tensor, Tensor]:
    """As `_factors`, from sums: of the logarithms of what is there, and of how much is there (None: all of it)."""
    nrows, ncolumns = spans("log", logs.shape)
    if there is None:
        rows, columns, whole = logs.means(1), logs.means(0), logs.mean
    else:
        whole = logs.total / max(1.0, there.total)
        pairs = ((logs.rows, there.rows), (logs.columns, there.columns))
        rows, columns = (torch.where(n > 0, sums / n.clamp(min=1), whole) for sums, n in pairs)
        rows = rows if nrows > 1 else torch.tensor([whole])
    return _whole_numbers(rows, torch.zeros(1) if ncolumns == 1 else columns - whole)


def _whole_numbers(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    limit = MOST_EXPONENT // 2
    rows = rows.round().clamp(-2 * limit + limit // 4, limit)
    return rows.to(torch.int16).cpu(), columns.round().clamp(-limit // 4, limit // 4).to(torch.int16).cpu()


def _exponents(values: Tensor) -> Tensor:
    limit = MOST_EXPONENT // 2
    return (values.log2() * FINE).round().clamp(-limit, limit).to(torch.int16).cpu()


def floor_of(m: Tensor | None, v: Tensor) -> Tensor | None:
    """Where a first moment is not zero: its second one must not be, or Adam would divide by nothing but its epsilon."""
    return None if m is None or m.shape != v.shape else m != 0


def _usable(x: Tensor, role: Role) -> bool:
    fits = role in (Role.MOMENT1, Role.MOMENT2) and x.dtype in DTYPES and x.numel() >= FEWEST
    return fits and math.isfinite(largest(x))
