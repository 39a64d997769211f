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

from shrinkpoint.codec.lattice import (
    MAX_SCALE_EXPONENT,
    STEPS_PER_OCTAVE,
    ZERO_CODE,
    Lattice,
    LatticeTensor,
    as_matrix,
    scale_counts,
)
from shrinkpoint.quantize.lattice import quantize_to_lattice
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.sharding.global_tensors import Marginals
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

MOMENT_DTYPES = (torch.float32, torch.bfloat16)
_MIN_SECOND_MOMENT = 2.0**-120  # of a second moment that a lattice reaches
_AVERAGE_SLOTS = ("exp_avg_sq", "square_avg")
MIN_LATTICE_NUMEL = 16
"""Values of a tensor that is quantized at least."""


@dataclass(frozen=True)
class MomentPrecision:
    """How coarse moments are.

    Attributes:
        first_step: of a first moment, in square roots of second moments.
        first_max: of a first moment, in root mean squares of its row.
        second_step: of a second moment, in eighths of an octave.
        dead_zone: half the width of what becomes the mean of row and column, in steps.
        accumulator_step: as `second_step`, of what never forgets (a sum, a maximum), so that no error heals.
        momentum_step: of a first moment without a second one, in root mean squares of its row and column.
    """

    first_step: float = 2.0
    first_max: float = 8.0
    second_step: int = 24
    dead_zone: float = 0.6
    accumulator_step: int = 4
    momentum_step: float = 4.0


def moments_to_lattices(
    state: FlatState,
    save_number: int,
    seed: int,
    precision: MomentPrecision,
    second_values: dict[str, Tensor] | None = None,
    existing: Collection[str] = (),
) -> Iterator[tuple[str, LatticeTensor]]:
    """Points of every moment that is large enough and finite; the others stay exact.

    Args:
        save_number: a number that no other save of this run has: of the dither.
        second_values: filled with the values of second moments, which first ones need.
        existing: names of those that have points already; the second ones of them are in `second_values`.
    """
    pairs = {facts.moment1: facts.moment2 for facts in state.optimizer_info.values() if facts.moment1 is not None}
    owners = {second: first for first, second in pairs.items() if second is not None}
    usable = {name: x for name, x in state.tensors.items() if _is_quantizable(x, state.infos[name].role)}
    second_values = {} if second_values is None else second_values
    for name, x in usable.items():
        if state.infos[name].role is Role.MOMENT2 and name not in existing and not bool((x < 0).any()):
            floor = required_nonzero(usable.get(owners.get(name, "")), x)
            chosen = quantize_second(x, floor, precision_for(name.rpartition("/")[2], precision))
            second_values[name] = chosen.dequantize(x.dtype)
            yield name, chosen
    for name, x in usable.items():
        if state.infos[name].role is not Role.MOMENT1 or name in existing:
            continue
        other = pairs.get(name) or ""
        number = zlib.crc32(f"{seed}/{save_number}/{name}".encode()) or 1
        if (
            other in second_values
            and second_values[other].shape == x.shape
            and second_values[other].dtype == torch.float32
        ):
            points = quantize_first(x, second_values[other], other, number, precision)
        else:
            points = quantize_momentum(x, number, precision)
        if points is not None:
            yield name, points


def precision_for(slot: str, precision: MomentPrecision) -> MomentPrecision:
    """Of a second moment by the name that the optimizer has for it."""
    return (
        precision
        if slot in _AVERAGE_SLOTS
        else replace(precision, second_step=precision.accumulator_step, dead_zone=0.5)
    )


def quantize_second(
    v: Tensor, nonzero: Tensor | None, precision: MomentPrecision, exponents: tuple[Tensor, Tensor] | None = None
) -> LatticeTensor:
    """Of a second moment; where it is zero it stays so, unless `nonzero` (bool) says that it may not.

    Args:
        exponents: exponents of rows and columns, where they are known.
    """
    logs, there = log2_steps(v, nonzero)
    rows, columns = (
        _second_exponents(logs, there, scale_counts("log", tuple(v.shape))) if exponents is None else exponents
    )
    lattice = Lattice("log", rows, columns, step=precision.second_step)
    by_row, by_column = (side.to(v.device, torch.float32) for side in (rows, columns))
    at = logs.sub_(by_row[:, None]).sub_(by_column).div_(precision.second_step)
    codes = at.round().masked_fill_(at.abs() < precision.dead_zone, 0).clamp_(ZERO_CODE + 1, -ZERO_CODE)
    if there is not None:
        codes.masked_fill_(~there, ZERO_CODE)
    return LatticeTensor(codes.to(torch.int16).reshape(v.shape), lattice)


def log2_steps(v: Tensor, nonzero: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of a second moment as a matrix, in eighths of an octave; and where it counts as being there, None: everywhere."""
    values = as_matrix(v).to(torch.float32)
    there = values > 0 if nonzero is None else (values > 0) | as_matrix(nonzero)
    return values.clamp(min=_MIN_SECOND_MOMENT).log2_().mul_(STEPS_PER_OCTAVE), None if bool(there.all()) else there


def quantize_first(
    m: Tensor, v: Tensor, relative_to: str, seed: int, precision: MomentPrecision, rows: Tensor | None = None
) -> LatticeTensor | None:
    """Of a first moment, relative to the square root of `v`, which a reader has as `relative_to`.

    Args:
        rows: exponents of rows, where they are known.
    """
    rows = first_row_exponents(relative_squares(m, v).mean(1), precision) if rows is None else rows
    lattice = Lattice("relative", rows, torch.zeros(1, dtype=torch.int16), seed=seed)
    return quantize_to_lattice(m, lattice, second_moments=v, relative_to=relative_to)


def relative_squares(m: Tensor, v: Tensor) -> Tensor:
    """Of a first moment, divided by the second one; a matrix."""
    return as_matrix(m).to(torch.float32).square().div_(as_matrix(v)).nan_to_num_(0.0, 0.0, 0.0)


def first_row_exponents(means: Tensor, precision: MomentPrecision) -> Tensor:
    """Exponents of rows, from the means of `relative_squares`."""
    wide = (means.sqrt() * precision.first_max).clamp(
        max=precision.first_step, min=2.0 ** (-MAX_SCALE_EXPONENT / STEPS_PER_OCTAVE)
    )
    return _log2_exponents(wide)


def quantize_momentum(
    m: Tensor, seed: int, precision: MomentPrecision, exponents: tuple[Tensor, Tensor] | None = None
) -> LatticeTensor | None:
    """Of a first moment without a second one (momentum); None, for exact, where some are zero and must stay so.

    Args:
        exponents: exponents of rows and columns, where they are known; then no value is zero.
    """
    if exponents is None:
        values = as_matrix(m).to(torch.float32)
        squares = values.square()
        if not bool(values.all()):
            return None
        means = float(squares.mean()), squares.mean(1), squares.mean(0)
        exponents = momentum_exponents(*means, scale_counts("linear", tuple(m.shape)), precision)
    return None if exponents is None else quantize_to_lattice(m, Lattice("linear", *exponents, seed=seed))


def momentum_exponents(
    mean_square: float, rows: Tensor, columns: Tensor, counts: tuple[int, int], precision: MomentPrecision
) -> tuple[Tensor, Tensor] | None:
    """Exponents of rows and columns, from the means of squares: of all, and by row and by column."""
    if not 0 < mean_square < math.inf:
        return None
    rows = (rows / mean_square).sqrt() if counts[0] > 1 else torch.ones(1, device=rows.device)
    columns = (columns / mean_square).sqrt() if counts[1] > 1 else torch.ones(1, device=columns.device)
    tiny = 2.0**-20
    return _log2_exponents(rows.clamp(min=tiny) * (mean_square**0.5 * precision.momentum_step)), _log2_exponents(
        columns.clamp(min=tiny)
    )


def _second_exponents(logs: Tensor, present: Tensor | None, counts: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Means of logarithms by row and by column, of what is there (None: all of it); whole numbers."""
    if present is None:
        rows, columns, whole = logs.mean(1), logs.mean(0), logs.mean()
    else:
        weight = present.to(torch.float32)
        logs = logs * weight
        whole = logs.sum() / weight.sum().clamp(min=1)
        rows, columns = (
            torch.where(weight.sum(axis) > 0, logs.sum(axis) / weight.sum(axis).clamp(min=1), whole) for axis in (1, 0)
        )
    return _round_exponents(rows, torch.zeros(1) if counts[1] == 1 else columns - whole)


def exponents_from_marginals(logs: Marginals, present: Marginals | None) -> tuple[Tensor, Tensor]:
    """As `_factors`, from sums: of the logarithms of what is there, and of how much is there (None: all of it)."""
    nrows, ncolumns = scale_counts("log", logs.shape)
    if present is None:
        rows, columns, whole = logs.mean_along(1), logs.mean_along(0), logs.mean
    else:
        whole = logs.total / max(1.0, present.total)
        pairs = ((logs.row_sums, present.row_sums), (logs.column_sums, present.column_sums))
        rows, columns = (torch.where(n > 0, sums / n.clamp(min=1), whole) for sums, n in pairs)
        rows = rows if nrows > 1 else torch.tensor([whole])
    return _round_exponents(rows, torch.zeros(1) if ncolumns == 1 else columns - whole)


def _round_exponents(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    limit = MAX_SCALE_EXPONENT // 2
    rows = rows.round().clamp(-2 * limit + limit // 4, limit)
    return rows.to(torch.int16).cpu(), columns.round().clamp(-limit // 4, limit // 4).to(torch.int16).cpu()


def _log2_exponents(values: Tensor) -> Tensor:
    limit = MAX_SCALE_EXPONENT // 2
    return (values.log2() * STEPS_PER_OCTAVE).round().clamp(-limit, limit).to(torch.int16).cpu()


def required_nonzero(m: Tensor | None, v: Tensor) -> Tensor | None:
    """Where a first moment is not zero: its second one must not be, or Adam would divide by nothing but its epsilon."""
    return None if m is None or m.shape != v.shape else m != 0


def _is_quantizable(x: Tensor, role: Role) -> bool:
    fits = role in (Role.MOMENT1, Role.MOMENT2) and x.dtype in MOMENT_DTYPES and x.numel() >= MIN_LATTICE_NUMEL
    return fits and math.isfinite(max_abs(x))
