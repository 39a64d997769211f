"""An optimizer's moments on lattices.

Second moments as powers of two around the mean of their row and column: what is left is mostly the noise of an average
over few gradients. First moments as multiples of the square root of what a reader has of the second ones, which is what
Adam divides them by; with subtractive dither, so that an average over weights, and over saves, is what it was. Rounded
to the nearest, small ones would all become zero, and ten steps of training with them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shrinkpoint.codec import Lattice, Points
from shrinkpoint.codec.lattice import FINE, MOST_EXPONENT, NOTHING, matrix, spans
from shrinkpoint.codec.quantize.points import nearest
from shrinkpoint.record import Role
from shrinkpoint.schemes.picks import largest
from shrinkpoint.state import FlatState

_DTYPES = (torch.float32, torch.bfloat16)
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
    flat: FlatState, save: int, seed: int, steps: Steps, made: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, Points]]:
    """Points of every moment that is large enough and finite; the others stay exact.

    Args:
        save: a number that no other save of this run has: of the dither.
        made: filled with the values of second moments, which first ones need.
    """
    pairs = {facts.moment1: facts.moment2 for facts in flat.optim.values() if facts.moment1 is not None}
    owners = {second: first for first, second in pairs.items() if second is not None}
    usable = {name: x for name, x in flat.tensors.items() if _usable(x, flat.infos[name].role)}
    made = {} if made is None else made
    for name, x in usable.items():
        if flat.infos[name].role is Role.MOMENT2 and not bool((x < 0).any()):
            floor = _floor(usable.get(owners.get(name, "")), x)
            heals = name.rpartition("/")[2] in _AVERAGES
            chosen = second(x, floor, steps if heals else replace(steps, second=steps.lasting, zone=0.5))
            made[name] = chosen.values(x.dtype)
            yield name, chosen
    for name, x in usable.items():
        if flat.infos[name].role is not Role.MOMENT1:
            continue
        other = pairs.get(name) or ""
        number = zlib.crc32(f"{seed}/{save}/{name}".encode()) or 1
        if other in made and made[other].shape == x.shape and made[other].dtype == torch.float32:
            points = first(x, made[other], other, number, steps)
        else:
            points = lone(x, number, steps)
        if points is not None:
            yield name, points


def second(v: Tensor, floor: Tensor | None, steps: Steps) -> Points:
    """Of a second moment; where it is zero it stays so, unless `floor` (bool) says that it may not."""
    values = matrix(v).to(torch.float32)
    there = values > 0 if floor is None else (values > 0) | matrix(floor)
    everywhere = bool(there.all())
    logs = values.clamp(min=_SMALLEST).log2_().mul_(FINE)
    rows, columns = _factors(logs, None if everywhere else there, spans("log", tuple(v.shape)))
    lattice = Lattice("log", rows, columns, step=steps.second)
    by_row, by_column = (side.to(values.device, torch.float32) for side in (rows, columns))
    at = logs.sub_(by_row[:, None]).sub_(by_column).div_(steps.second)
    codes = at.round().masked_fill_(at.abs() < steps.zone, 0).clamp_(NOTHING + 1, -NOTHING)
    if not everywhere:
        codes.masked_fill_(~there, NOTHING)
    return Points(codes.to(torch.int16).reshape(v.shape), lattice)


def first(m: Tensor, v: Tensor, other: str, seed: int, steps: Steps) -> Points | None:
    """Of a first moment, relative to the square root of `v`, which a reader has as `other`."""
    squares = matrix(m).to(torch.float32).square().div_(matrix(v))
    usual = squares.nan_to_num_(0.0, 0.0, 0.0).mean(1).sqrt()
    wide = (usual * steps.most).clamp(max=steps.first, min=2.0 ** (-MOST_EXPONENT / FINE))
    rows = _exponents(wide)
    lattice = Lattice("relative", rows, torch.zeros(1, dtype=torch.int16), seed=seed)
    return nearest(m, lattice, other=v, name=other)


def lone(m: Tensor, seed: int, steps: Steps) -> Points | None:
    """Of a first moment without a second one (momentum); None, for exact, where some are zero and must stay so."""
    values = matrix(m).to(torch.float32)
    squares = values.square()
    whole = float(squares.mean())
    if not 0 < whole < math.inf or not bool(values.all()):
        return None
    nrows, ncolumns = spans("linear", tuple(m.shape))
    rows = (squares.mean(1) / whole).sqrt() if nrows > 1 else torch.ones(1, device=m.device)
    columns = (squares.mean(0) / whole).sqrt() if ncolumns > 1 else torch.ones(1, device=m.device)
    tiny = 2.0**-20
    lattice = Lattice(
        "linear", _exponents(rows.clamp(min=tiny) * (whole**0.5 * steps.lone)), _exponents(columns.clamp(min=tiny)),
        seed=seed,
    )  # fmt: skip
    return nearest(m, lattice)


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
    columns = torch.zeros(1) if counts[1] == 1 else columns - whole
    limit = MOST_EXPONENT // 2
    rows = rows.round().clamp(-2 * limit + limit // 4, limit)
    return rows.to(torch.int16).cpu(), columns.round().clamp(-limit // 4, limit // 4).to(torch.int16).cpu()


def _exponents(values: Tensor) -> Tensor:
    limit = MOST_EXPONENT // 2
    return (values.log2() * FINE).round().clamp(-limit, limit).to(torch.int16).cpu()


def _floor(m: Tensor | None, v: Tensor) -> Tensor | None:
    """Where a first moment is not zero: its second one must not be, or Adam would divide by nothing but its epsilon."""
    return None if m is None or m.shape != v.shape else m != 0


def _usable(x: Tensor, role: Role) -> bool:
    fits = role in (Role.MOMENT1, Role.MOMENT2) and x.dtype in _DTYPES and x.numel() >= FEWEST
    return fits and math.isfinite(largest(x))
