"""Quantizes an optimizer's moments to lattices.

Second moments become powers of two around the mean of their row and column: what is left is mostly the noise of an
average over few gradients. First moments become multiples of the square root of the decoded second ones, which is what
Adam divides them by, with subtractive dither, so that an average over weights, and over saves, is unbiased. Rounded to
the nearest, small ones would all become zero, and ten steps of training with them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.lattice import (
    MAX_SCALE_EXPONENT,
    STEPS_PER_OCTAVE,
    Lattice,
    LatticeTensor,
    matrix_shape,
    scale_counts,
)
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.quantize.lattice import quantize_second_moment, quantize_to_lattice
from shrinkpoint.quantize.statistics import (
    LOG_UNITS_PER_OCTAVE,
    SecondMomentSums,
    relative_squares,
    square_sums,
)
from shrinkpoint.schemes.fisher.curvature import MomentStatistics
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.optimizers import MomentKind

MOMENT_DTYPES = (torch.float32, torch.bfloat16)
MIN_LATTICE_NUMEL = 16
"""Values of a tensor below which it is not quantized."""
FIRST_KINDS = (
    MomentKind.GRADIENT_MEAN,
    MomentKind.MOMENTUM,
    MomentKind.ORTHOGONALIZED,
    MomentKind.SIGN,
    MomentKind.SCALED,
)
SECOND_KINDS = (MomentKind.SQUARE_MEAN, MomentKind.ACCUMULATOR)

_MAX_SERIAL_NUMEL = 2048  # up to which torch takes logarithms in the calling thread

# Where a step is a multiple of the moment, its noise averages out in the weights. Where the moment is orthogonalized,
# reduced to its sign or divided by another one, noise is amplified.
MOMENTUM_STEPS: Mapping[MomentKind, float] = {
    MomentKind.MOMENTUM: 4.0,
    MomentKind.GRADIENT_MEAN: 0.5,
    MomentKind.SCALED: 1.0,
    MomentKind.ORTHOGONALIZED: 0.5,
    MomentKind.SIGN: 1.0,
}

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
        momentum_steps: of first moments that are not relative to a second one, by kind, in root mean squares of their
            row and column.
    """

    first_step: float = 2.0
    first_max: float = 8.0
    second_step: int = 24
    dead_zone: float = 0.6
    accumulator_step: int = 4
    momentum_steps: Mapping[MomentKind, float] = field(default_factory=lambda: MOMENTUM_STEPS)


def moments_to_lattices(
    tensors: GlobalTensors,
    state: FlatState,
    save_number: int,
    seed: int,
    precision: MomentPrecision,
    statistics: MomentStatistics | None = None,
    unchanged: Mapping[str, LatticeTensor] | None = None,
) -> dict[str, LatticeTensor]:
    """Quantize every moment of a kind that has a grid, if it is large enough and finite; the others stay exact.

    A collective.

    Args:
        tensors: the tensors of `state` on all ranks.
        save_number: a number that no other save of this run has, for the dither.
        statistics: of the second moments of `state`; None: none have been computed.
        unchanged: moments that have points already, by name; they are not quantized again.

    Returns:
        Points by name, second moments first.
    """
    statistics = MomentStatistics(state) if statistics is None else statistics
    quantizer = _MomentQuantizer(tensors, state, precision, statistics, unchanged or {})
    seconds = quantizer.quantize_seconds()
    seeds = {}
    for name, kind in state.moment_kinds.items():
        if kind in FIRST_KINDS:
            shard, label = tensors.local_shards[name], f"{seed}/{save_number}/{tensors.global_names[name]}"
            seeds[name] = shard.spec.dither_seed(zlib.crc32(label.encode()) or 1, shard.sizes)
    return seconds | quantizer.quantize_firsts(seconds, seeds)


class _MomentQuantizer:
    """Quantizes this rank's shards of the moments of one state; its methods are collectives.

    Exponents are computed from sums by row and by column: of a tensor that this rank has all of, from its own; of one
    that is split, on every rank from the sums over all its shards.
    """

    def __init__(
        self,
        tensors: GlobalTensors,
        state: FlatState,
        precision: MomentPrecision,
        statistics: MomentStatistics,
        unchanged: Mapping[str, LatticeTensor],
    ) -> None:
        self._tensors, self._state, self._precision = tensors, state, precision
        self._statistics, self._unchanged = statistics, unchanged
        self._relative_sums: dict[str, Tensor] = {}  # by first moment: sums by row of m^2 / v'
        large = {
            name: state.tensors[name]
            for name, kind in state.moment_kinds.items()
            if kind in (*FIRST_KINDS, *SECOND_KINDS)
            and state.tensors[name].dtype in MOMENT_DTYPES
            and tensors.local_shards[name].spec.global_numel >= MIN_LATTICE_NUMEL
        }
        finite = tensors.tensors_where_all({name: statistics.is_finite(name) for name in large})
        alike = tensors.reduce({name: state.moment_kinds[name] for name in large}, lambda kinds: len({*kinds}) == 1)
        usable = {name for name in finite if alike[name]}
        self._usable = {name: x for name, x in large.items() if x.numel() and tensors.global_names[name] in usable}
        pairs = {info.moment1: info.moment2 for info in state.optimizer_info.values() if info.moment1 is not None}
        self._pairs = {
            first: second for first, second in pairs.items() if second is not None and self._are_paired(first, second)
        }
        self._firsts = {second: first for first, second in self._pairs.items()}

    def _are_paired(self, first: str, second: str) -> bool:
        usable = first in self._usable and second in self._usable
        return usable and self._tensors.is_colocated(first, second)

    def _moments_of_kinds(self, kinds: Collection[MomentKind]) -> dict[str, Tensor]:
        return {
            name: moment
            for name, moment in self._usable.items()
            if self._state.moment_kinds[name] in kinds and name not in self._unchanged
        }

    def quantize_seconds(self) -> dict[str, LatticeTensor]:
        """Quantize second moments, by name."""
        moments = self._moments_of_kinds(SECOND_KINDS)
        firsts = {name: self._usable.get(self._firsts.get(name, "")) for name in moments}
        sums = {name: self._statistics.sums(name, with_first=firsts[name] is not None) for name in moments}
        valid = self._tensors.tensors_where_all({name: not sums[name].has_negative for name in moments})
        sums = {name: sums[name] for name in moments if self._tensors.global_names[name] in valid}
        exponents = self._split_second_exponents(sums)
        # finer if it is not a decaying average
        finer = replace(self._precision, second_step=self._precision.accumulator_step, dead_zone=0.5)

        def quantize(name: str, threads: int) -> tuple[LatticeTensor, Tensor | None]:
            v, m = moments[name], firsts[name]
            is_mean = self._state.moment_kinds[name] is MomentKind.SQUARE_MEAN
            precision = self._precision if is_mean else finer
            rows, columns = exponents.get(name) or second_exponents(tuple(v.shape), sums[name])
            lattice = Lattice("log", rows, columns, step=precision.second_step)
            return quantize_second_moment(v, m, lattice, precision.dead_zone, threads)

        results = map_tensors(quantize, {name: moments[name] for name in sums})
        for name, (_, relative_sums) in results.items():
            if relative_sums is not None:
                self._relative_sums[self._firsts[name]] = relative_sums
        return {name: points for name, (points, _) in results.items()}

    def _split_second_exponents(self, sums: Mapping[str, SecondMomentSums]) -> dict[str, Exponents]:
        """Exponents of those second moments that are split over ranks, by local name."""
        tensors = self._tensors
        split = {name: moment for name, moment in sums.items() if name not in tensors.whole}
        with_zeros = tensors.union(name for name in split if sums[name].has_absent(self._usable[name].numel()))
        logs = tensors.marginals(split, lambda name: (split[name].logs.rows, split[name].logs.columns))
        counts = tensors.marginals(
            (name for name in split if tensors.global_names[name] in with_zeros),
            lambda name: (split[name].counts.rows, split[name].counts.columns),
        )
        exponents = {name: second_exponents_from_sums(log, counts.get(name)) for name, log in logs.items()}
        return {name: self._slice(name, Lattice("log", *exponents[tensors.global_names[name]])) for name in split}

    def quantize_firsts(
        self, seconds: Mapping[str, LatticeTensor], seeds: Mapping[str, int]
    ) -> dict[str, LatticeTensor]:
        """Quantize first moments, by name: relative to the second ones if every shard has one of the same place.

        Args:
            seconds: the second moments that have just been quantized.
        """
        tensors, moments = self._tensors, self._moments_of_kinds(FIRST_KINDS)
        second_points = {**self._unchanged, **seconds}
        is_paired = {
            name: self._state.moment_kinds[name] is MomentKind.GRADIENT_MEAN
            and (second := self._pairs.get(name, "")) in second_points
            and self._state.tensors[second].dtype == torch.float32
            for name in moments
        }
        paired = tensors.tensors_where_all(is_paired)
        momentum = {
            name: m
            for name, m in moments.items()
            if tensors.global_names[name] not in paired and not self._is_divided_vector(name)
        }
        without_zeros = tensors.tensors_where_all({name: bool(m.all()) for name, m in momentum.items()})
        names = [name for name in moments if tensors.global_names[name] in paired | without_zeros]

        def local_sums(name: str) -> tuple[Tensor, Tensor]:
            if name in momentum:
                sums = square_sums(moments[name])
                return sums.rows, sums.columns
            rows = self._row_sums(name)
            return rows, torch.zeros(matrix_shape(tuple(moments[name].shape))[1], dtype=torch.float64)

        sums = tensors.marginals((name for name in names if name not in tensors.whole), local_sums)
        exponents = self._row_exponents(name for name in names if name not in momentum and name in tensors.whole)

        def quantize(name: str, threads: int) -> LatticeTensor | None:
            m, total = moments[name], sums.get(tensors.global_names[name])
            if name in momentum:
                return self._quantize_momentum(name, m, seeds[name], total)
            second = self._pairs[name]
            rows = exponents[name] if total is None else self._split_row_exponents(name, total)
            return quantize_first(m, second_points[second], second, seeds[name], rows, threads)

        points = map_tensors(quantize, {name: moments[name] for name in names})
        failed = tensors.union(name for name, lattice in points.items() if lattice is None)
        return {n: x for n, x in points.items() if x is not None and tensors.global_names[n] not in failed}

    def _is_divided_vector(self, name: str) -> bool:
        """True if a moment is a vector that the optimizer divides by another one.

        A vector has one step, which may be thousands of times what the least of its values are divided by: the biases
        of keys, beside those of queries and values, have next to no gradient.
        """
        is_vector = len(self._tensors.local_shards[name].spec.global_shape) < 2
        return is_vector and self._state.moment_kinds[name] in (MomentKind.GRADIENT_MEAN, MomentKind.SCALED)

    def _row_sums(self, name: str) -> Tensor:
        """Sums by row of the squares of a first moment, relative to the decoded second one."""
        if name not in self._relative_sums:  # the second moment has not changed, and is what a reader decodes
            v = self._state.tensors[self._pairs[name]]
            self._relative_sums[name] = relative_squares(self._usable[name], v).sum(1, dtype=torch.float64).cpu()
        return self._relative_sums[name]

    def _row_exponents(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The exponents of the rows of first moments that this rank has all of; together, as most have few rows."""
        means = {name: self._row_sums(name) / matrix_shape(tuple(self._usable[name].shape))[1] for name in names}
        if not means:
            return {}
        # In pieces, for which torch does not wake its threads: they would take longer than the logarithms.
        pieces = torch.split(torch.cat([*means.values()]), _MAX_SERIAL_NUMEL)
        exponents = torch.cat([first_row_exponents(piece, self._precision) for piece in pieces])
        return dict(zip(means, torch.split(exponents, [len(rows) for rows in means.values()]), strict=True))

    def _split_row_exponents(self, name: str, sums: Marginals) -> Tensor:
        """The exponents of the rows of a shard of a first moment, from the sums of all shards."""
        rows = first_row_exponents(sums.mean_along(1), self._precision)
        return self._slice(name, Lattice("relative", rows, torch.zeros(1, dtype=torch.int16)))[0]

    def _quantize_momentum(self, name: str, m: Tensor, seed: int, sums: Marginals | None) -> LatticeTensor | None:
        step = self._precision.momentum_steps[self._state.moment_kinds[name]]
        if sums is None:
            return quantize_momentum(m, seed, step)
        counts = scale_counts("linear", sums.shape)
        exponents = momentum_exponents(sums.mean, sums.mean_along(1), sums.mean_along(0), counts, step)
        if exponents is None:
            return None
        return quantize_momentum(m, seed, step, self._slice(name, Lattice("linear", *exponents)))

    def _slice(self, name: str, lattice: Lattice) -> Exponents:
        """The exponents of a shard's rows and columns, from the lattice of its global tensor."""
        shard = self._tensors.local_shards[name]
        part = shard.spec.slice_lattice(lattice, shard.sizes)
        return part.rows, part.columns


def quantize_first(
    m: Tensor, v: LatticeTensor, relative_to: str, seed: int, rows: Tensor, threads: int | None = None
) -> LatticeTensor | None:
    """Quantize a first moment relative to the square root of `v`, which is named `relative_to`.

    Args:
        rows: exponents of rows; `first_row_exponents`.
        threads: native threads; None: as many as torch uses.
    """
    lattice = Lattice("relative", rows, torch.zeros(1, dtype=torch.int16), seed=seed)
    return quantize_to_lattice(m, lattice, second_moment=v, relative_to=relative_to, threads=threads)


def first_row_exponents(means: Tensor, precision: MomentPrecision) -> Tensor:
    """Exponents of the rows of a first moment, from the row means of its squares relative to the second moment."""
    steps = (means.to(torch.float32).sqrt() * precision.first_max).clamp(
        max=precision.first_step, min=2.0 ** (-MAX_SCALE_EXPONENT / STEPS_PER_OCTAVE)
    )
    return _log2_exponents(steps)


def quantize_momentum(m: Tensor, seed: int, step: float, exponents: Exponents | None = None) -> LatticeTensor | None:
    """Quantize a first moment without a second one (momentum); None if some values are zero and must stay so.

    Args:
        step: in root mean squares of a row and column.
        exponents: None: those of the means of the squares of `m`. If given, no value is zero.
    """
    if exponents is None:
        if not bool(m.all()):
            return None
        rows, columns = matrix_shape(tuple(m.shape))
        sums = square_sums(m)
        means = float(sums.rows.sum()) / (rows * columns), sums.rows / columns, sums.columns / rows
        exponents = momentum_exponents(*means, scale_counts("linear", tuple(m.shape)), step)
    return None if exponents is None else quantize_to_lattice(m, Lattice("linear", *exponents, seed=seed))


def momentum_exponents(
    mean_square: float, rows: Tensor, columns: Tensor, counts: tuple[int, int], step: float
) -> Exponents | None:
    """Exponents of a momentum's rows and columns, from mean squares; None if all values are zero.

    Args:
        mean_square: of all values.
        rows, columns: mean squares by row and by column.
        counts: how many exponents of rows and of columns the lattice has.
        step: in root mean squares of a row and column.
    """
    if not 0 < mean_square < math.inf:
        return None
    rows = (rows / mean_square).sqrt() if counts[0] > 1 else torch.ones(1, device=rows.device)
    columns = (columns / mean_square).sqrt() if counts[1] > 1 else torch.ones(1, device=columns.device)
    tiny = 2.0**-20
    return _log2_exponents(rows.clamp(min=tiny) * (mean_square**0.5 * step)), _log2_exponents(columns.clamp(min=tiny))


def second_exponents(shape: tuple[int, ...], sums: SecondMomentSums) -> Exponents:
    """Exponents of the rows and columns of a whole second moment of this shape."""
    logs, counts = (
        Marginals(shape, float(part.rows.sum()), part.rows, part.columns) for part in (sums.logs, sums.counts)
    )
    return second_exponents_from_sums(logs, counts)


def second_exponents_from_sums(logs: Marginals, present: Marginals | None) -> Exponents:
    """Exponents of a second moment's rows and columns, from sums over all its shards.

    Args:
        logs: sums of the logarithms of the values that are present, in units of `LOG_UNITS_PER_OCTAVE`.
        present: counts of these values; None: all of them are.
    """
    nrows, ncolumns = scale_counts("log", logs.shape)
    unit, limit = STEPS_PER_OCTAVE / LOG_UNITS_PER_OCTAVE, MAX_SCALE_EXPONENT // 2
    if present is None:
        mean, rows, columns = logs.mean, logs.mean_along(1).numpy(), logs.mean_along(0).numpy()
    else:
        mean = logs.total / max(1.0, present.total)
        rows = _means(logs.row_sums, present.row_sums, mean) if nrows > 1 else np.full(1, mean, np.float32)
        columns = _means(logs.column_sums, present.column_sums, mean) if ncolumns > 1 else np.zeros(1)
    columns = np.zeros(1) if ncolumns == 1 else (columns - mean) * unit
    bounds = (-2 * limit + limit // 4, limit), (-limit // 4, limit // 4)
    by_row, by_column = (
        torch.from_numpy(np.rint(side).clip(*ends).astype(np.int16))
        for side, ends in zip((rows * unit, columns), bounds, strict=True)
    )
    return by_row, by_column


def _means(sums: Tensor, counts: Tensor, mean: float) -> NDArray[np.float64]:
    """Means of rows or columns, given sums and counts; `mean` where nothing was counted. numpy: these are short."""
    present = counts.numpy()
    means = sums.numpy() / np.maximum(present, 1)
    return means if present.all() else np.where(present > 0, means, mean)


def _log2_exponents(values: Tensor) -> Tensor:
    limit = MAX_SCALE_EXPONENT // 2
    return (values.log2() * STEPS_PER_OCTAVE).round().clamp(-limit, limit).to(torch.int16).cpu()
