"""Statistics of moments before they are quantized: sums of second ones, their matrices, and what has not moved."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor, matrix_shape, row_counts
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import QuantizedTensor
from shrinkpoint.device.reads import Reads
from shrinkpoint.quantize.statistics import (
    LOG_UNITS_PER_OCTAVE,
    SecondMomentSums,
    count_codes,
    entropy_bits,
    float_bits,
    log2_units,
    second_moment_sums,
    value_sums,
)
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.tensors.dtypes import as_native_float
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.optimizers import MomentKind

MIN_LATTICE_NUMEL = 16
"""Values of a tensor below which it is not quantized."""
FIRST_KINDS = (
    MomentKind.GRADIENT_MEAN,
    MomentKind.MOMENTUM,
    MomentKind.ORTHOGONALIZED,
    MomentKind.SIGN,
    MomentKind.SCALED,
)
MIN_RESTING_SHARE = 0.75
"""The least share of unchanged values of a moment that keeps its dither: changed ones then take about three times the
bits."""
MOMENT_DTYPES = (torch.float32, torch.bfloat16)
_SAMPLE_VALUES = 256
_SPREAD_STEP = 5.0  # octaves of a code of what is left of a second moment: `MomentPrecision.second_step`
BITS_PER_EXPONENT = 4.0
_BITS_PER_SCALE = 5.0  # of a row or column, whose scales the weight and both moments have
_SPREAD_SAMPLE = 1 << 14


class MomentStatistics:
    """Statistics of the moments of one state: second moments are read once, together with their first moments.

    Args:
        foldable: names of second moments of which this rank has all, so that their matrices can be chosen: by how far
            their values spread around the means of rows and columns. Those of others have one leading axis as rows.
        parents: of an earlier checkpoint, whose matrices are taken where there are any.
    """

    def __init__(
        self, state: FlatState, foldable: Collection[str] = (), parents: Mapping[str, QuantizedTensor] | None = None
    ) -> None:
        self._tensors, self._foldable, self._parents = state.tensors, foldable, parents or {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._leaders: dict[str, str] = {}  # tensors of one parameter share the matrix of its second moment
        self._pairs: dict[str, str] = {}  # second -> first moment, of the same shape and device
        for info in state.optimizer_info.values():
            if (leader := info.squares or info.moment2) is not None:
                names = (name for name in (info.moment1, info.moment2, info.squares) if name is not None)
                self._leaders |= dict.fromkeys(names, leader)
            if info.moment1 is not None and info.moment2 is not None and self._are_alike(info.moment1, info.moment2):
                self._pairs[info.moment2] = info.moment1
        self._seconds = {first: second for second, first in self._pairs.items()}
        self._sums: dict[tuple[str, bool], SecondMomentSums] = {}
        self._unpaired = {
            name
            for name, kind in state.moment_kinds.items()
            if kind in FIRST_KINDS and name not in self._seconds and state.tensors[name].dtype in MOMENT_DTYPES
        }
        self._finite: dict[str, bool] = {}

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of the matrix that a moment is seen as."""
        shape, leader = tuple(self._tensors[name].shape), self._leaders.get(name, name)
        other = self._tensors.get(leader)
        if other is None or tuple(other.shape) != shape or leader not in self._foldable or len(shape) < 3:
            return matrix_shape(shape)
        if leader not in self._shapes:
            parent = self._parents.get(leader)
            if isinstance(parent, LatticeTensor) and parent.codes.shape == other.shape:
                self._shapes[leader] = parent.lattice.matrix_shape(shape)
            elif leader in self._unpaired:  # momentum, which tells too little of a scale: the fewest scales
                self._shapes[leader] = min(((rows, other.numel() // rows) for rows in row_counts(shape)), key=sum)
            else:
                self._shapes[leader] = choose_matrix(other)
        return self._shapes[leader]

    def sums(self, name: str, *, with_first: bool = True) -> SecondMomentSums:
        """The sums of a second moment.

        Args:
            with_first: what is not zero in its first moment, if there is one, counts as present.
        """
        first = self._pairs.get(name) if with_first else None
        if (name, first is not None) not in self._sums:
            others = {name} if first is None else self._pairs  # what is asked of a pair is asked of all soon
            sums = map_tensors(partial(self._sum, with_first=with_first), {key: self._tensors[key] for key in others})
            self._sums |= {(key, first is not None): result for key, result in sums.items()}
        return self._sums[name, first is not None]

    def _sum(self, name: str, threads: int, *, with_first: bool) -> Reads[SecondMomentSums]:
        v, first = as_native_float(self._tensors[name]), self._pairs.get(name) if with_first else None
        m = None if first is None else as_native_float(self._tensors[first])
        if v.dim() > 2:
            shape = self.matrix_shape(name)
            v, m = v.reshape(shape), None if m is None else m.reshape(shape)
        return second_moment_sums.together(v, m, by_column=v.dim() > 1, threads=threads)

    def is_finite(self, name: str) -> bool:
        second = name if name in self._pairs else self._seconds.get(name)
        if second is not None and self.sums(second).is_finite:  # both moments are
            return True
        if name not in self._unpaired:
            return math.isfinite(max_abs(self._tensors[name]))
        if not self._finite:  # what is asked of one of them is asked of all soon
            moments = {key: self._tensors[key] for key in self._unpaired}
            sums = map_tensors(lambda key, threads: value_sums.together(moments[key], threads), moments)
            self._finite = {key: math.isfinite(found.max_magnitude) for key, found in sums.items()}
        return self._finite[name]

    def moment_matrix(self, name: str | None, like: Tensor) -> Tensor | None:
        """A moment as a matrix, float32 or bfloat16; None if there is none of the shape of `like`, or not finite."""
        moment = None if name is None else self._tensors.get(name)
        if name is None or moment is None or moment.shape != like.shape or not moment.is_floating_point():
            return None
        matrix = as_native_float(moment)
        if moment.dim() != 2 or not moment.numel():
            matrix = matrix.reshape(self.matrix_shape(name))
        return matrix.to(like.device) if self.is_finite(name) else None

    def _are_alike(self, first: str, second: str) -> bool:
        m, v = self._tensors.get(first), self._tensors.get(second)
        if m is None or v is None:
            return False
        return m.shape == v.shape and m.device == v.device and m.is_floating_point() and v.is_floating_point()


def choose_matrix(v: Tensor) -> tuple[int, int]:
    """The matrix of a second moment whose values and exponents take the fewest bits, about.

    Stacked matrices (experts, out, in) vary by expert and row: they are a matrix of experts * out rows.

    Args:
        v: of three axes or more.
    """
    values = as_native_float(v).detach()
    counts = dict.fromkeys(row_counts(tuple(v.shape)))
    if len(counts) < 2:
        return matrix_shape(tuple(v.shape))
    bits = {rows: _matrix_bits(values.reshape(rows, -1)) for rows in counts}
    rows = min(bits, key=bits.__getitem__)
    return rows, v.numel() // rows


def _matrix_bits(v: Tensor) -> float:
    """The bits of a second moment that is seen as this matrix, from a sample of its values."""
    sums = second_moment_sums(v)
    rows = sums.logs.rows / sums.counts.rows.clamp(min=1)
    columns = sums.logs.columns / sums.counts.columns.clamp(min=1)
    mean = float(sums.logs.rows.sum()) / max(1.0, float(sums.counts.rows.sum()))
    places = torch.arange(0, v.numel(), -(-v.numel() // _SPREAD_SAMPLE) | 1)
    chosen = v.reshape(-1)[places.to(v.device)].to("cpu", torch.float32)
    fit = rows[places // v.shape[1]] + columns[places % v.shape[1]] - mean
    left = (log2_units(float_bits(chosen)).reshape(-1) - fit)[chosen > 0] / (_SPREAD_STEP * LOG_UNITS_PER_OCTAVE)
    per_value = entropy_bits(count_codes(left.round())) / max(1, left.numel())
    return v.numel() * per_value + _BITS_PER_SCALE * sum(v.shape)


@dataclass
class MomentSamples:
    """Some values of each first moment at the last save, which tell what has not changed since.

    A wrong answer costs bytes, no correctness: of a save that failed the next one knows no more than its samples.
    """

    _values: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def update(self, state: FlatState) -> set[str]:
        """Take samples of a state; return the first moments most values of which are those of the samples before."""
        names, parts = [], []
        for name, kind in state.moment_kinds.items():
            moment = state.tensors[name]
            is_coded = kind in FIRST_KINDS and not moment.is_complex()
            if is_coded and moment.is_contiguous() and moment.numel() >= MIN_LATTICE_NUMEL:
                names.append(name)
                parts.append(moment.detach().view(-1)[:: -(-moment.numel() // _SAMPLE_VALUES)])
        before, self._values = self._values, dict(zip(names, _copy_together(parts), strict=True))
        return {
            name
            for name, values in self._values.items()
            if (old := before.get(name)) is not None
            and old.shape == values.shape
            and int((old == values).sum()) >= MIN_RESTING_SHARE * old.numel()
        }


def _copy_together(parts: list[Tensor]) -> list[Tensor]:
    """Copies of small vectors in host memory, float32; those of one device in one transfer."""
    out: list[Tensor] = [torch.empty(0, dtype=torch.float32)] * len(parts)
    for device in {part.device for part in parts}:
        places = [i for i, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[i].to(torch.float32) for i in places]).cpu()
        for i, values in zip(places, torch.split(joined, [parts[i].numel() for i in places]), strict=True):
            out[i] = values
    return out
