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
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import (
    MAX_LATTICE_CODE,
    MAX_SCALE_EXPONENT,
    STEPS_PER_OCTAVE,
    ZERO_CODE,
    Lattice,
    LatticeTensor,
    dither,
    matrix_shape,
    scale_counts,
)
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.device.reads import Reading, Reads, copy_together
from shrinkpoint.quantize.lattice import PowerZones, lattice_positions, quantize_second_moment, quantize_to_lattice
from shrinkpoint.quantize.statistics import (
    LOG_UNITS_PER_OCTAVE,
    MatrixSums,
    SecondMomentSums,
    relative_squares,
    square_sums,
)
from shrinkpoint.schemes.fisher.first_moments import first_step_factor
from shrinkpoint.schemes.fisher.moment_statistics import (
    FIRST_KINDS,
    MIN_LATTICE_NUMEL,
    MOMENT_DTYPES,
    MomentSamples,
    MomentStatistics,
)
from shrinkpoint.schemes.planner import PlannedSave
from shrinkpoint.schemes.select import unchanged_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role
from shrinkpoint.tensors.optimizers import MomentKind

MOMENT_ROLES = (Role.MOMENT1, Role.MOMENT2)
DROPPED_ROLES: Mapping[str, tuple[Role, ...]] = {"drop": MOMENT_ROLES, "second": (Role.MOMENT1,)}
"""Roles of moments that are zero after a restore, by the argument `moments` of the scheme."""
SECOND_KINDS = (MomentKind.SQUARE_MEAN, MomentKind.ACCUMULATOR)

_MAX_SERIAL_NUMEL = 2048  # up to which torch takes logarithms in the calling thread

MOMENTUM_STEPS: Mapping[MomentKind, float] = {
    MomentKind.MOMENTUM: 8.0,
    MomentKind.GRADIENT_MEAN: 0.5,
    MomentKind.SCALED: 8.0,
    MomentKind.ORTHOGONALIZED: 2.4,
    MomentKind.SIGN: 2.4,
}
# The noise of a dither averages out where a step is a multiple of the moment, even if it is divided by another one.
# Where the moment is orthogonalized or reduced to its sign, noise is amplified: a training does better with the few
# large values alone.
DEAD_ZONES: Mapping[MomentKind, float] = {
    MomentKind.ORTHOGONALIZED: 0.8,
    MomentKind.SIGN: 0.8,
}
_STOCHASTIC_KINDS = (MomentKind.MOMENTUM, MomentKind.SCALED)
"""Moments whose zeros must stay zeros: rounded up or down by chance, with an error of zero on average, as by dither."""
_MAX_FINER = 2.5
"""The largest factor by which restores make steps of momentum with a dead zone smaller; each loses small values."""
_SPREAD = 12
"""Eighths of an octave by which a second moment differs from the mean of its row and column, about. So the mean of n of
them is known to 12 / sqrt(n) eighths, and its exponent need not be nearer."""
_MAX_TOLERANCE = 4
"""Eighths of an octave by which an exponent may differ at most from what it would be now."""
_MAX_HALF_OCTAVES = 30
"""Half octaves by which a row's step of a first moment is below the largest, at most. It hardly moves a weight
then, and all exponents of the tensor differ by less than a byte says."""
_LIMIT = MAX_SCALE_EXPONENT // 2 - 2 * _MAX_TOLERANCE
"""The largest exponent of a row or column, from which `Lattice.rounded` may still go on by its tolerance."""

Exponents = tuple[Tensor, Tensor]
"""Exponents of a lattice's rows and columns, int16, in eighths of an octave."""


_SECOND_ZONES = PowerZones(dead=0.5, above=0.5, below=0.8)


@dataclass(frozen=True)
class MomentPrecision:
    """Step sizes of moments.

    Attributes:
        first_step: of a first moment, in square roots of second moments without their bias towards zero; more where
            beta1 is below 0.9, as far as the moment moves its weight less.
        first_max: the largest step of a first moment, in root mean squares of its row.
        second_step: of a second moment, in eighths of an octave.
        second_zones: where it becomes another point than the nearest. One that is decoded too large makes small updates
            until it has decayed, which costs little; one that is decoded too small makes large ones.
        accumulator_step: like `second_step`, of what never forgets (a sum, a maximum), where no error heals.
        momentum_steps: of first moments that are not relative to a second one, by kind, in root mean squares of their
            row and column.
        dead_zones: half the widths of what becomes 0 of momentum that is rounded to the nearest, by kind, in steps;
            other kinds have dither.
    """

    first_step: float = 2.0
    first_max: float = 10.0
    second_step: int = 40
    second_zones: PowerZones = _SECOND_ZONES
    accumulator_step: int = 4
    momentum_steps: Mapping[MomentKind, float] = field(default_factory=lambda: MOMENTUM_STEPS)
    dead_zones: Mapping[MomentKind, float] = field(default_factory=lambda: DEAD_ZONES)

    @classmethod
    def after_restores(cls, restores: int) -> MomentPrecision:
        """The precision in a run that lossy checkpoints were restored in so often."""
        finer = min(1 + restores / 2, _MAX_FINER)
        return cls(momentum_steps={k: x / finer if k in DEAD_ZONES else x for k, x in MOMENTUM_STEPS.items()})


def quantize_moments(
    save: PlannedSave,
    number: int,
    seed: int,
    precision: MomentPrecision,
    statistics: MomentStatistics,
    samples: MomentSamples | None,
    coarser: Mapping[str, float],
) -> dict[str, QuantizedTensor]:
    """Quantize the moments of a save, by name; those that have not changed at all keep their points. A collective.

    Args:
        number: that no other save of this run has, for the dither.
        samples: of the save before; they become those of this save. None: second moments alone are quantized.
        coarser: how many times larger steps of first moments may be, by name.
    """
    state, tensors = save.state, save.tensors
    roles = (Role.MOMENT2,) if samples is None else MOMENT_ROLES
    names = [name for name, info in state.infos.items() if info.role in roles]
    unchanged = {
        name: points
        for name, points in unchanged_tensors(names, state, save.reference, tensors).items()
        if isinstance(points, LatticeTensor)
    }
    resting = None if samples is None else samples.update(state)
    coded = moments_to_lattices(
        tensors, state, number, seed, precision, statistics, unchanged, save.base, resting, coarser
    )
    return {**unchanged, **coded}


def count_updates(save: PlannedSave) -> int | None:
    """The updates that the optimizer has made, the most of all parameters; None if none are counted. A collective."""
    counts = (info.step for info in save.state.optimizer_info.values() if info.step is not None)
    return save.tensors.collectives.max_over_ranks(max(counts, default=None))


def moments_to_lattices(
    tensors: GlobalTensors,
    state: FlatState,
    save_number: int,
    seed: int,
    precision: MomentPrecision,
    statistics: MomentStatistics | None = None,
    unchanged: Mapping[str, LatticeTensor] | None = None,
    base: Reference | None = None,
    resting: Collection[str] | None = (),
    coarser: Mapping[str, float] | None = None,
) -> dict[str, LatticeTensor]:
    """Quantize every moment of a kind that has a grid, if it is large enough and finite; the others stay exact.

    A collective.

    Args:
        tensors: the tensors of `state` on all ranks.
        save_number: a number that no other save of this run has, for the dither.
        statistics: of the second moments of `state`; None: none have been computed.
        unchanged: moments that have points already, by name; they are not quantized again.
        base: the parent that these moments may be a difference to; None: there is none.
        resting: first moments most values of which have not changed since `base`, by name; `MomentSamples`. None: first
            moments are not quantized.
        coarser: how many times larger steps of first moments may be, by name; missing: 1.

    Returns:
        Points by name, second moments first.
    """
    statistics = MomentStatistics(state) if statistics is None else statistics
    quantizer = _MomentQuantizer(
        tensors, state, precision, statistics, unchanged or {}, base, resting or (), coarser or {}
    )
    seconds = quantizer.quantize_seconds()
    if resting is None:
        return seconds
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
        base: Reference | None,
        resting: Collection[str],
        coarser: Mapping[str, float],
    ) -> None:
        self._tensors, self._state, self._precision = tensors, state, precision
        self._statistics, self._unchanged = statistics, unchanged
        self._with_zeros = set[str]()  # momentum that is rounded by chance
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
            first: second
            for first, second in pairs.items()
            if second is not None
            and first in self._usable
            and second in self._usable
            and tensors.is_colocated(first, second)
        }
        self._firsts = {second: first for first, second in self._pairs.items()}
        held = {} if base is None else base.quantized
        points = {
            name: parent
            for name, moment in self._usable.items()
            if isinstance(parent := held.get(name), LatticeTensor) and parent.codes.shape == moment.shape
        }
        held_by_all = self._tensors.tensors_where_all({name: name in points for name in self._usable})
        self._parents = {name: x for name, x in points.items() if self._tensors.global_names[name] in held_by_all}
        self._resting = tensors.tensors_where_all({name: name in resting for name in self._parents})
        infos = {info.moment1: info for info in state.optimizer_info.values()}
        self._coarser = {first: coarser.get(first, 1.0) for first in self._pairs}
        self._first_steps = {
            first: precision.first_step * first_step_factor(info.beta1, info.beta2, info.step) * larger
            for first, larger, info in ((first, larger, infos[first]) for first, larger in self._coarser.items())
        }

    def _inherit(self, name: str, lattice: Lattice) -> Lattice:
        """A lattice with exponents that take few bits, most of them the parent's; with its dither if it is resting."""
        parent, is_resting = self._parents.get(name), self._tensors.global_names[name] in self._resting
        before = None if parent is None else parent.lattice
        if before is not None and is_resting:
            lattice = replace(lattice, seed=before.seed)
        elif before is not None and lattice.seed == before.seed and lattice.seed:
            lattice = replace(lattice, seed=lattice.seed ^ 1 or 1)  # two saves of one step
        if lattice.spacing == "log":
            shape, is_whole = self._tensors.local_shards[name].spec.global_shape, name in self._tensors.whole
            rows, columns = lattice.matrix_shape(shape) if is_whole else matrix_shape(shape)
            by_row, by_column = _SPREAD / math.sqrt(max(columns, 1)), _SPREAD / math.sqrt(max(rows, 1))
            tolerance = min(max(round(by_row), 1), _MAX_TOLERANCE), min(max(round(by_column), 1), _MAX_TOLERANCE)
            return lattice.rounded(before, tolerance)
        if before is None or (lattice.spacing == "relative" and not is_resting):
            return lattice  # with new dither nothing is coded as a difference to the parent
        return lattice.rounded(before, (_MAX_TOLERANCE, _MAX_TOLERANCE) if is_resting else (1, 1))

    def _moments_of_kinds(self, kinds: Collection[MomentKind]) -> dict[str, Tensor]:
        return {
            name: moment
            for name, moment in self._usable.items()
            if self._state.moment_kinds[name] in kinds and name not in self._unchanged
        }

    def quantize_seconds(self) -> dict[str, LatticeTensor]:
        moments = self._moments_of_kinds(SECOND_KINDS)
        firsts = {name: self._usable.get(self._firsts.get(name, "")) for name in moments}
        sums = {name: self._statistics.sums(name, with_first=firsts[name] is not None) for name in moments}
        tensors = self._tensors
        valid = tensors.tensors_where_all({name: not sums[name].has_negative for name in moments})
        sums = {name: sums[name] for name in moments if tensors.global_names[name] in valid}
        # Exponents of those second moments that are split over ranks.
        split = {name: moment for name, moment in sums.items() if name not in tensors.whole}
        with_zeros = tensors.union(name for name in split if sums[name].has_absent(self._usable[name].numel()))
        logs = tensors.marginals(split, lambda name: (split[name].logs.rows, split[name].logs.columns))
        counts = tensors.marginals(
            (name for name in split if tensors.global_names[name] in with_zeros),
            lambda name: (split[name].counts.rows, split[name].counts.columns),
        )
        of_all = {name: second_exponents_from_sums(log, counts.get(name)) for name, log in logs.items()}
        exponents = {name: self._slice(name, Lattice("log", *of_all[tensors.global_names[name]])) for name in split}
        # finer if it is not a decaying average
        finer = replace(
            self._precision, second_step=self._precision.accumulator_step, second_zones=PowerZones(dead=0.5)
        )

        def quantize(name: str, threads: int) -> Reads[tuple[LatticeTensor, Tensor | None]]:
            v, m, parent = moments[name], firsts[name], self._parents.get(name)
            if parent is not None and (parent.lattice.spacing != "log" or parent.codes.dtype != torch.int8):
                parent = None
            is_mean = self._state.moment_kinds[name] is MomentKind.SQUARE_MEAN
            precision = self._precision if is_mean else finer
            rows, columns = exponents.get(name) or second_exponents(v.numel(), sums[name])
            if parent is not None and name in tensors.whole and sums[name].has_absent(v.numel()):
                rows = rows + precision.second_step * _fresh_rows(sums[name], parent)
            lattice = self._inherit(name, Lattice("log", rows, columns, step=precision.second_step))
            return quantize_second_moment.together(v, m, lattice, precision.second_zones, parent, threads)

        results = map_tensors(quantize, {name: moments[name] for name in sums})
        for name, (_, relative_sums) in results.items():
            if relative_sums is not None:
                self._relative_sums[self._firsts[name]] = relative_sums
        return {name: points for name, (points, _) in results.items()}

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
            and self._pairs.get(name, "") in second_points
            for name in moments
        }
        paired = tensors.tensors_where_all(is_paired)
        momentum = {
            name: m
            for name, m in moments.items()
            if tensors.global_names[name] not in paired and not self._is_divided_vector(name)
        }
        kinds = {name: self._state.moment_kinds[name] for name in momentum}
        dithered = [name for name, kind in kinds.items() if kind not in self._precision.dead_zones]
        flags = copy_together({name: momentum[name].all() for name in dithered})
        without_zeros = tensors.tensors_where_all({name: bool(flag) for name, flag in flags.items()})
        self._with_zeros = {name for name in dithered if tensors.global_names[name] not in without_zeros}
        exact = {name for name in self._with_zeros if kinds[name] not in _STOCHASTIC_KINDS}
        names = [n for n in moments if (n in momentum and n not in exact) or tensors.global_names[n] in paired]

        def local_sums(name: str) -> tuple[Tensor, Tensor]:
            if name in momentum:
                sums = square_sums(moments[name])
                return sums.rows, sums.columns
            rows = self._row_sums(name)
            return rows, torch.zeros(matrix_shape(tuple(moments[name].shape))[1], dtype=torch.float64)

        sums = tensors.marginals((name for name in names if name not in tensors.whole), local_sums)
        exponents = self._row_exponents(name for name in names if name not in momentum and name in tensors.whole)

        def quantize(name: str, threads: int) -> Reads[LatticeTensor | None]:
            m, total = moments[name], sums.get(tensors.global_names[name])
            if name in momentum:
                return (yield from self._quantize_momentum(name, m, seeds[name], total))
            second = self._pairs[name]
            rows = exponents[name] if total is None else self._split_row_exponents(name, total)
            lattice = self._inherit(
                name, Lattice("relative", rows, torch.zeros(1, dtype=torch.int16), seed=seeds[name])
            )
            v = second_points[second]
            dtype = self._state.tensors[second].dtype
            return (
                yield from quantize_to_lattice.together(
                    m, lattice, second_moment=v, relative_to=second, second_dtype=dtype, threads=threads
                )
            )

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
            v, shape = self._state.tensors[self._pairs[name]], self._statistics.matrix_shape(self._pairs[name])
            squares = relative_squares(self._usable[name].reshape(shape), v.reshape(shape))
            self._relative_sums[name] = squares.sum(1, dtype=torch.float64).cpu()
        return self._relative_sums[name]

    def _row_exponents(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The exponents of the rows of first moments that this rank has all of; together, as most have few rows."""
        sums = {name: self._row_sums(name) for name in names}
        means = {
            name: rows * (self._coarser[name] ** 2 / (self._usable[name].numel() // len(rows)))
            for name, rows in sums.items()
        }
        if not means:
            return {}
        # In pieces, for which torch does not wake its threads: they would take longer than the logarithms.
        largest = torch.cat([torch.full_like(rows, self._first_steps[name]) for name, rows in means.items()])
        joined = torch.split(torch.cat([*means.values()]), _MAX_SERIAL_NUMEL), torch.split(largest, _MAX_SERIAL_NUMEL)
        pieces = [first_row_exponents(rows, limit, self._precision) for rows, limit in zip(*joined, strict=True)]
        exponents = torch.cat(pieces)
        return dict(zip(means, torch.split(exponents, [len(rows) for rows in means.values()]), strict=True))

    def _split_row_exponents(self, name: str, sums: Marginals) -> Tensor:
        """The exponents of the rows of a shard of a first moment, from the sums of all shards."""
        means = sums.mean_along(1) * self._coarser[name] ** 2
        rows = first_row_exponents(means, torch.full_like(means, self._first_steps[name]), self._precision)
        return self._slice(name, Lattice("relative", rows, torch.zeros(1, dtype=torch.int16)))[0]

    def _quantize_momentum(
        self, name: str, m: Tensor, seed: int, sums: Marginals | None
    ) -> Reads[LatticeTensor | None]:
        kind = self._state.moment_kinds[name]
        step, dead_zone = self._precision.momentum_steps[kind], self._precision.dead_zones.get(kind)
        if sums is None:
            exponents = yield from own_momentum_exponents.together(m, step)
        else:
            counts = scale_counts("linear", sums.shape)
            exponents = momentum_exponents(sums.mean, sums.mean_along(1), sums.mean_along(0), counts, step)
            exponents = None if exponents is None else self._slice(name, Lattice("linear", *exponents))
        if exponents is None:
            return None
        is_dithered = dead_zone is None and name not in self._with_zeros
        lattice = self._inherit(name, Lattice("linear", *exponents, seed=seed if is_dithered else 0))
        if name in self._with_zeros:
            return round_stochastically(m, lattice, seed)
        return (yield from quantize_momentum.together(m, lattice, dead_zone))

    def _slice(self, name: str, lattice: Lattice) -> Exponents:
        """The exponents of a shard's rows and columns, from the lattice of its global tensor."""
        shard = self._tensors.local_shards[name]
        part = shard.spec.slice_lattice(lattice, shard.sizes)
        return part.rows, part.columns


def _fresh_rows(sums: SecondMomentSums, parent: LatticeTensor) -> Tensor:
    """1 for each row of which something is present for the first time, such as of an embedding's, and 0 for others.

    A code is stored as the difference to the parent's, and none above 0 has a difference of a byte to a zero's. With
    exponents of a step more hardly any code of such a row is above 0.
    """
    present = sums.counts.rows > 0
    was_zero = (parent.codes.reshape(len(present), -1) == ZERO_CODE).all(1).cpu()
    return (was_zero & present).to(torch.int16)


def first_row_exponents(means: Tensor, largest: Tensor, precision: MomentPrecision) -> Tensor:
    """Exponents of the rows of a first moment: of the largest step, or of one so many half octaves below it.

    Args:
        means: of its squares relative to the second moment, by row.
        largest: steps; `first_step_factor`.
    """
    steps = means.to(torch.float32).sqrt() * precision.first_max
    largest = largest.to(torch.float32)
    half_octaves = ((steps / largest).log2() * 2).round().clamp(-_MAX_HALF_OCTAVES, 0)
    return _log2_exponents(largest * (half_octaves / 2).exp2())


@Reading
def quantize_momentum(m: Tensor, lattice: Lattice, dead_zone: float | None = None) -> Reads[LatticeTensor | None]:
    """Quantize a first moment without a second one (momentum); None if points do not reach as far as it.

    Args:
        dead_zone: half the width of what becomes 0, in steps; None: the nearest points.
    """
    if dead_zone is None:
        return (yield from quantize_to_lattice.together(m, lattice))
    zeros = torch.zeros(m.shape, dtype=torch.int8, device=m.device)
    return (yield from quantize_to_lattice.together(m, lattice, previous_codes=zeros, hysteresis=dead_zone))


def round_stochastically(m: Tensor, lattice: Lattice, seed: int) -> LatticeTensor | None:
    """Quantize a momentum to the point below or above each value, by chance, so that its mean is the value.

    A zero stays zero. None if points do not reach as far as the momentum.
    """
    positions = lattice_positions(m, lattice)
    codes = (positions + dither(seed, (positions.shape[0], positions.shape[1]), m.device)).round()
    if not bool((codes.abs() <= MAX_LATTICE_CODE).all()):
        return None
    return LatticeTensor(codes.to(torch.int16).reshape(m.shape), lattice).narrow()


@Reading
def own_momentum_exponents(m: Tensor, step: float) -> Reads[Exponents | None]:
    """`momentum_exponents` of a whole momentum."""
    rows, columns = matrix_shape(tuple(m.shape))
    sums = yield from square_sums.together(m)
    means = float(sums.rows.sum()) / (rows * columns), sums.rows / columns, sums.columns / rows
    return momentum_exponents(*means, scale_counts("linear", tuple(m.shape)), step)


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
    rows = (rows / mean_square).sqrt() if counts[0] > 1 else torch.ones(1, dtype=torch.float32, device=rows.device)
    columns = (
        (columns / mean_square).sqrt() if counts[1] > 1 else torch.ones(1, dtype=torch.float32, device=columns.device)
    )
    tiny = 2.0**-20
    return _log2_exponents(rows.clamp(min=tiny) * (mean_square**0.5 * step)), _log2_exponents(columns.clamp(min=tiny))


def second_exponents(numel: int, sums: SecondMomentSums) -> Exponents:
    """Exponents of the rows and columns of a whole second moment of so many values, seen as the matrix of its sums."""
    rows = sums.logs.rows.numel()
    return _exponents_of_means(rows, 1 if rows == 1 else numel // rows, sums.logs, sums.counts)


def second_exponents_from_sums(logs: Marginals, present: Marginals | None) -> Exponents:
    """Exponents of a second moment's rows and columns, from sums over all its shards.

    Args:
        logs: sums of the logarithms of the values that are present, in units of `LOG_UNITS_PER_OCTAVE`.
        present: counts of these values; None: all of them are.
    """
    rows, columns = matrix_shape(logs.shape)
    if rows == 1:
        mean = logs.mean if present is None else float(np.float32(logs.total / max(1.0, present.total)))
        exponent = min(max(round(mean * STEPS_PER_OCTAVE / LOG_UNITS_PER_OCTAVE), _LIMIT // 4 - 2 * _LIMIT), _LIMIT)
        return torch.tensor([exponent], dtype=torch.int16), torch.zeros(1, dtype=torch.int16)
    if present is None:
        sizes = ((rows,), columns), ((columns,), rows)
        counts = MatrixSums(*(torch.full(shape, float(count), dtype=torch.float64) for shape, count in sizes))
    else:
        counts = MatrixSums(present.row_sums, present.column_sums)
    return _exponents_of_means(rows, columns, MatrixSums(logs.row_sums, logs.column_sums), counts)


def _exponents_of_means(rows: int, columns: int, logs: MatrixSums, counts: MatrixSums) -> Exponents:
    """Exponents of the means of logarithms by row and by column, given their sums and how many values are present."""
    out = torch.empty(rows, dtype=torch.int16), torch.empty(columns, dtype=torch.int16)
    _native.second_exponents(logs.rows, counts.rows, logs.columns, counts.columns, _LIMIT, *out)
    return out


def _log2_exponents(values: Tensor) -> Tensor:
    return (values.log2() * STEPS_PER_OCTAVE).round().clamp(-_LIMIT, _LIMIT).to(torch.int16).cpu()
