"""Quantizes an optimizer's moments to lattices.

Second moments become powers of two around the mean of their row and column: what is left is mostly the noise of an
average over few gradients. First moments become multiples of the square root of the decoded second ones, which is what
Adam divides them by, with subtractive dither, so that an average over weights, and over saves, is unbiased. Rounded to
the nearest, small ones would all become zero, and ten steps of training with them.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Mapping
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
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

MOMENT_DTYPES = (torch.float32, torch.bfloat16)
MIN_LATTICE_NUMEL = 16
"""Values of a tensor below which it is not quantized."""
_MIN_SECOND_MOMENT = 2.0**-120  # the smallest that a lattice reaches
_AVERAGE_SLOTS = ("exp_avg_sq", "square_avg")

Exponents = tuple[Tensor, Tensor]
"""Exponents of a lattice's rows and columns, int16, in eighths of an octave."""


@dataclass(frozen=True)
class MomentPrecision:
    """Step sizes of moments.

    Attributes:
        first_step: of a first moment, in square roots of second moments.
        first_max: the largest step of a first moment, in root mean squares of its row.
        second_step: of a second moment, in eighths of an octave.
        dead_zone: half the width of what becomes the mean of row and column, in steps.
        accumulator_step: like `second_step`, of what never forgets (a sum, a maximum), where no error heals.
        momentum_step: of a first moment without a second one, in root mean squares of its row and column.
    """

    first_step: float = 2.0
    first_max: float = 8.0
    second_step: int = 24
    dead_zone: float = 0.6
    accumulator_step: int = 4
    momentum_step: float = 4.0


def moments_to_lattices(
    tensors: GlobalTensors,
    state: FlatState,
    save_number: int,
    seed: int,
    precision: MomentPrecision,
    second_values: dict[str, Tensor] | None = None,
    existing: Collection[str] = (),
) -> dict[str, LatticeTensor]:
    """Quantize every moment that is large enough and finite; the others stay exact. A collective.

    Args:
        tensors: the tensors of `state` on all ranks.
        save_number: a number that no other save of this run has, for the dither.
        second_values: filled with the decoded values of second moments, which first ones need.
        existing: names of moments that have points already; the values of second ones are in `second_values`.

    Returns:
        Points by name, second moments first.
    """
    quantizer = _MomentQuantizer(tensors, state, precision, existing)
    second_values = {} if second_values is None else second_values
    points = quantizer.quantize_seconds(second_values)
    seeds = {}
    for name, info in state.infos.items():
        if info.role is Role.MOMENT1:
            shard, label = tensors.local_shards[name], f"{seed}/{save_number}/{tensors.global_name(name)}"
            seeds[name] = shard.spec.dither_seed(zlib.crc32(label.encode()) or 1, shard.sizes)
    return points | quantizer.quantize_firsts(second_values, seeds)


class _MomentQuantizer:
    """Quantizes this rank's shards of the moments of one state; its methods are collectives.

    Exponents of a tensor that this rank has all of are computed from its values; those of a tensor that is split are
    computed on every rank from the sums by row and by column over all its shards.
    """

    def __init__(
        self, tensors: GlobalTensors, state: FlatState, precision: MomentPrecision, existing: Collection[str]
    ) -> None:
        self._tensors, self._state, self._precision, self._existing = tensors, state, precision, existing
        large = {
            name: state.tensors[name]
            for name, info in state.infos.items()
            if info.role in (Role.MOMENT1, Role.MOMENT2)
            and state.tensors[name].dtype in MOMENT_DTYPES
            and tensors.local_shards[name].spec.global_numel >= MIN_LATTICE_NUMEL
        }
        finite = tensors.tensors_where_all({name: math.isfinite(max_abs(x)) for name, x in large.items()})
        self._usable = {name: x for name, x in large.items() if x.numel() and tensors.global_name(name) in finite}
        pairs = {info.moment1: info.moment2 for info in state.optimizer_info.values() if info.moment1 is not None}
        self._pairs = {
            first: second for first, second in pairs.items() if second is not None and self._are_paired(first, second)
        }
        self._firsts = {second: first for first, second in self._pairs.items()}

    def _are_paired(self, first: str, second: str) -> bool:
        usable = first in self._usable and second in self._usable
        return usable and self._tensors.is_colocated(first, second)

    def _moments_of_role(self, role: Role) -> dict[str, Tensor]:
        return {
            name: moment
            for name, moment in self._usable.items()
            if self._state.infos[name].role is role and name not in self._existing
        }

    def quantize_seconds(self, values: dict[str, Tensor]) -> dict[str, LatticeTensor]:
        """Quantize second moments, by name; fills `values` with what a reader decodes."""
        moments = self._moments_of_role(Role.MOMENT2)
        valid = self._tensors.tensors_where_all({name: not bool((v < 0).any()) for name, v in moments.items()})
        moments = {name: v for name, v in moments.items() if self._tensors.global_name(name) in valid}
        nonzero = {
            name: _required_nonzero(self._usable.get(self._firsts.get(name, "")), v) for name, v in moments.items()
        }
        exponents = self._split_second_exponents(moments, nonzero)
        points = {}
        # finer if it is not a decaying average
        finer = replace(self._precision, second_step=self._precision.accumulator_step, dead_zone=0.5)
        for name, v in moments.items():
            precision = self._precision if self._slot(name) in _AVERAGE_SLOTS else finer
            points[name] = quantize_second(v, nonzero[name], precision, exponents.get(name))
            values[name] = points[name].dequantize(v.dtype)
        return points

    def _slot(self, name: str) -> str:
        """The optimizer's name for a moment; torch.distributed.checkpoint joins names with dots."""
        return re.split("[/.]", self._tensors.global_name(name))[-1]

    def _split_second_exponents(
        self, moments: Mapping[str, Tensor], nonzero: Mapping[str, Tensor | None]
    ) -> dict[str, Exponents]:
        """Exponents of those second moments that are split over ranks, by local name."""
        tensors = self._tensors
        split = {name: v for name, v in moments.items() if not tensors.is_whole(name)}
        with_zeros = tensors.union(name for name, v in split.items() if log2_steps(v, nonzero[name])[1] is not None)

        def logs(name: str) -> Tensor:
            steps, present = log2_steps(split[name], nonzero[name])
            return steps if present is None else steps * present

        def present(name: str) -> Tensor:
            steps, present = log2_steps(split[name], nonzero[name])
            return torch.ones_like(steps) if present is None else present.to(torch.float32)

        sums = tensors.marginals(split, logs)
        counts = tensors.marginals((name for name in split if tensors.global_name(name) in with_zeros), present)
        exponents = {name: second_exponents_from_sums(log, counts.get(name)) for name, log in sums.items()}
        return {name: self._slice(name, Lattice("log", *exponents[tensors.global_name(name)])) for name in split}

    def quantize_firsts(
        self, second_values: Mapping[str, Tensor], seeds: Mapping[str, int]
    ) -> dict[str, LatticeTensor]:
        """Quantize first moments, by name: relative to the second ones if every shard has one of the same place."""
        tensors, moments = self._tensors, self._moments_of_role(Role.MOMENT1)
        is_paired = {
            name: self._pairs.get(name, "") in second_values and second_values[self._pairs[name]].dtype == torch.float32
            for name in moments
        }
        paired = tensors.tensors_where_all(is_paired)
        momentum = {name: m for name, m in moments.items() if tensors.global_name(name) not in paired}
        without_zeros = tensors.tensors_where_all({name: bool(m.all()) for name, m in momentum.items()})
        names = [name for name in moments if name not in momentum or tensors.global_name(name) in without_zeros]
        split = [name for name in names if not tensors.is_whole(name)]

        def squares(name: str) -> Tensor:
            if name in momentum:
                return as_matrix(moments[name]).to(torch.float32).square()
            return relative_squares(moments[name], second_values[self._pairs[name]])

        sums = tensors.marginals(split, squares)
        points = dict[str, LatticeTensor | None]()
        for name in names:
            m, total = moments[name], sums.get(tensors.global_name(name)) if name in split else None
            if name in momentum:
                points[name] = self._quantize_momentum(name, m, seeds[name], total)
            else:
                other = self._pairs[name]
                rows = None if total is None else self._split_first_rows(name, total)
                points[name] = quantize_first(m, second_values[other], other, seeds[name], self._precision, rows)
        failed = tensors.union(name for name, lattice in points.items() if lattice is None)
        return {n: x for n, x in points.items() if x is not None and tensors.global_name(n) not in failed}

    def _split_first_rows(self, name: str, sums: Marginals) -> Tensor:
        rows = first_row_exponents(sums.mean_along(1).to(torch.float32), self._precision)
        return self._slice(name, Lattice("relative", rows, torch.zeros(1, dtype=torch.int16)))[0]

    def _quantize_momentum(self, name: str, m: Tensor, seed: int, sums: Marginals | None) -> LatticeTensor | None:
        if sums is None:
            return quantize_momentum(m, seed, self._precision)
        counts = scale_counts("linear", sums.shape)
        exponents = momentum_exponents(sums.mean, sums.mean_along(1), sums.mean_along(0), counts, self._precision)
        if exponents is None:
            return None
        return quantize_momentum(m, seed, self._precision, self._slice(name, Lattice("linear", *exponents)))

    def _slice(self, name: str, lattice: Lattice) -> Exponents:
        """The exponents of a shard's rows and columns, from the lattice of its global tensor."""
        shard = self._tensors.local_shards[name]
        part = shard.spec.slice_lattice(lattice, shard.sizes)
        return part.rows, part.columns


def quantize_second(
    v: Tensor, nonzero: Tensor | None, precision: MomentPrecision, exponents: Exponents | None = None
) -> LatticeTensor:
    """Quantize a second moment; where it is zero it stays zero, unless `nonzero` (bool) forbids it.

    Args:
        exponents: None: those of the means of `v`.
    """
    logs, present = log2_steps(v, nonzero)
    rows, columns = (
        _second_exponents(logs, present, scale_counts("log", tuple(v.shape))) if exponents is None else exponents
    )
    lattice = Lattice("log", rows, columns, step=precision.second_step)
    by_row, by_column = (scales.to(v.device, torch.float32) for scales in (rows, columns))
    positions = logs.sub_(by_row[:, None]).sub_(by_column).div_(precision.second_step)
    is_mean = positions.abs() < precision.dead_zone
    codes = positions.round().masked_fill_(is_mean, 0).clamp_(ZERO_CODE + 1, -ZERO_CODE)
    if present is not None:
        codes.masked_fill_(~present, ZERO_CODE)
    return LatticeTensor(codes.to(torch.int16).reshape(v.shape), lattice)


def log2_steps(v: Tensor, nonzero: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """log2 of a second moment in eighths of an octave, as a matrix; and where it is not zero (None: everywhere).

    Args:
        nonzero: bool, of the shape of `v`: where it counts as not zero even if it is.
    """
    values = as_matrix(v).to(torch.float32)
    present = values > 0 if nonzero is None else (values > 0) | as_matrix(nonzero)
    logs = values.clamp(min=_MIN_SECOND_MOMENT).log2_().mul_(STEPS_PER_OCTAVE)
    return logs, None if bool(present.all()) else present


def quantize_first(
    m: Tensor, v: Tensor, relative_to: str, seed: int, precision: MomentPrecision, rows: Tensor | None = None
) -> LatticeTensor | None:
    """Quantize a first moment relative to the square root of `v`, which a reader decodes as `relative_to`.

    Args:
        rows: exponents of rows; None: those of the means of `relative_squares`.
    """
    rows = first_row_exponents(relative_squares(m, v).mean(1), precision) if rows is None else rows
    lattice = Lattice("relative", rows, torch.zeros(1, dtype=torch.int16), seed=seed)
    return quantize_to_lattice(m, lattice, second_moments=v, relative_to=relative_to)


def relative_squares(m: Tensor, v: Tensor) -> Tensor:
    """The squares of a first moment divided by the second one, 0 where that is not finite; a matrix."""
    return as_matrix(m).to(torch.float32).square().div_(as_matrix(v)).nan_to_num_(0.0, 0.0, 0.0)


def first_row_exponents(means: Tensor, precision: MomentPrecision) -> Tensor:
    """Exponents of the rows of a first moment, from the row means of `relative_squares`."""
    steps = (means.sqrt() * precision.first_max).clamp(
        max=precision.first_step, min=2.0 ** (-MAX_SCALE_EXPONENT / STEPS_PER_OCTAVE)
    )
    return _log2_exponents(steps)


def quantize_momentum(
    m: Tensor, seed: int, precision: MomentPrecision, exponents: Exponents | None = None
) -> LatticeTensor | None:
    """Quantize a first moment without a second one (momentum); None if some values are zero and must stay so.

    Args:
        exponents: None: those of the means of the squares of `m`. If given, no value is zero.
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
) -> Exponents | None:
    """Exponents of a momentum's rows and columns, from mean squares; None if all values are zero.

    Args:
        mean_square: of all values.
        rows, columns: mean squares by row and by column.
        counts: how many exponents of rows and of columns the lattice has.
    """
    if not 0 < mean_square < math.inf:
        return None
    rows = (rows / mean_square).sqrt() if counts[0] > 1 else torch.ones(1, device=rows.device)
    columns = (columns / mean_square).sqrt() if counts[1] > 1 else torch.ones(1, device=columns.device)
    tiny = 2.0**-20
    return _log2_exponents(rows.clamp(min=tiny) * (mean_square**0.5 * precision.momentum_step)), _log2_exponents(
        columns.clamp(min=tiny)
    )


def _second_exponents(logs: Tensor, present: Tensor | None, counts: tuple[int, int]) -> Exponents:
    """Means of logarithms by row and by column, over the values that are present (None: all); rounded."""
    if present is None:
        rows, columns, mean = logs.mean(1), logs.mean(0), logs.mean()
    else:
        weight = present.to(torch.float32)
        logs = logs * weight
        mean = logs.sum() / weight.sum().clamp(min=1)
        rows, columns = (
            torch.where(weight.sum(axis) > 0, logs.sum(axis) / weight.sum(axis).clamp(min=1), mean) for axis in (1, 0)
        )
    return _round_exponents(rows, torch.zeros(1) if counts[1] == 1 else columns - mean)


def second_exponents_from_sums(logs: Marginals, present: Marginals | None) -> Exponents:
    """Exponents of a second moment's rows and columns, from sums over all its shards.

    Args:
        logs: sums of the logarithms of the values that are present.
        present: counts of these values; None: all of them are.
    """
    nrows, ncolumns = scale_counts("log", logs.shape)
    if present is None:
        rows, columns, mean = logs.mean_along(1), logs.mean_along(0), logs.mean
    else:
        mean = logs.total / max(1.0, present.total)
        pairs = ((logs.row_sums, present.row_sums), (logs.column_sums, present.column_sums))
        rows, columns = (torch.where(n > 0, sums / n.clamp(min=1), mean) for sums, n in pairs)
        rows = rows if nrows > 1 else torch.tensor([mean])
    return _round_exponents(rows, torch.zeros(1) if ncolumns == 1 else columns - mean)


def _round_exponents(rows: Tensor, columns: Tensor) -> Exponents:
    limit = MAX_SCALE_EXPONENT // 2
    rows = rows.round().clamp(-2 * limit + limit // 4, limit)
    return rows.to(torch.int16).cpu(), columns.round().clamp(-limit // 4, limit // 4).to(torch.int16).cpu()


def _log2_exponents(values: Tensor) -> Tensor:
    limit = MAX_SCALE_EXPONENT // 2
    return (values.log2() * STEPS_PER_OCTAVE).round().clamp(-limit, limit).to(torch.int16).cpu()


def _required_nonzero(m: Tensor | None, v: Tensor) -> Tensor | None:
    """Where a second moment must not become zero: where the first one is not, which Adam divides by it; bool."""
    return None if m is None or m.shape != v.shape else m != 0
