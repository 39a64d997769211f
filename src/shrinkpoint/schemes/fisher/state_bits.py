"""Estimates the size of a whole state, for a target that is a ratio."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor, dither, matrix_shape
from shrinkpoint.codec.reference import QuantizedTensor
from shrinkpoint.schemes.fisher.copies import WeightCopy
from shrinkpoint.schemes.fisher.curvature import exponent_bits, total_entropy_bits
from shrinkpoint.schemes.planner import PlannedSave
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.info import Role

_DITHER_PLACES = 16  # of a cell, that the context of a code tells apart


@dataclass(frozen=True)
class StateBits:
    """The size of a whole state in bits."""

    raw: float  # Without compression
    other: float  # What is stored besides the weights
    is_first: bool  # True if this is the first checkpoint of a run, and no file alone

    def weight_bits(self, ratio: float) -> float:
        """The bits that remain for the weights if the whole state is to be `ratio` times smaller."""
        return self.raw / ratio - self.other

    def ratio(self, bits: float) -> float:
        """The compression ratio of the whole state if the weights have `bits`."""
        return self.raw / max(1.0, self.other + bits)


def count_state_bits(
    save: PlannedSave,
    coded: Collection[str],
    moments: Mapping[str, QuantizedTensor],
    copies: Sequence[WeightCopy],
    dropped: Collection[Role],
    *,
    is_first: bool,
) -> StateBits:
    """Count the bits of a whole state besides the weights: moments and exact tensors. A collective.

    Args:
        coded: names of the weights that do not stay exact, and of their casts.
        copies: of the weights, whose bits are taken to be as many for each value: the others are shared out.
        dropped: roles of tensors that are stored as zeros.
        is_first: this is the first checkpoint of a run.
    """
    tensors, others = save.tensors, save.unchanged | dict(moments)
    coded = {*coded, *others, *(name for copy in copies for name in copy.sources)}
    coded |= {name for name, info in save.state.infos.items() if info.role in dropped}
    sizes = {name: 8 * info.nbytes for name, info in save.state.infos.items() if name in tensors.primary}
    exact, raw = tensors.collectives.sum_over_ranks(
        sum(size for name, size in sizes.items() if name not in coded), sum(sizes.values())
    )
    # What a reader has already costs nothing.
    inherited = {} if save.base is None else save.base.quantized
    points = {name: own for name, own in others.items() if inherited.get(name) is not own}
    numel, copied = (
        sum(math.prod(tensors.shapes[name]) for name in names)
        for names in (save.selection.global_names, [name for copy in copies for name in copy.global_names])
    )
    share = numel / max(1, numel + copied)
    other = exact + code_bits(tensors, points, inherited)
    return StateBits(share * raw, share * other, is_first=is_first)


def code_bits(
    tensors: GlobalTensors, points: Mapping[str, QuantizedTensor], parents: Mapping[str, QuantizedTensor]
) -> float:
    """The bits of codes and of their lattices, about, summed over global tensors; a collective.

    Of a tensor with dither a reader knows where in its cell each value lies, which tells much of a code.

    Args:
        points: of local shards, by name.
        parents: of the parent checkpoint, whose lattices cost nothing.
    """
    codes, places = {name: own.codes for name, own in points.items()}, dict[str, Tensor]()
    fresh: tuple[list[str], list[str]] = ([], [])
    for name, own in points.items():
        if not isinstance(own, LatticeTensor):
            continue
        parent = parents.get(name)
        if not isinstance(parent, LatticeTensor) or not parent.lattice.has_equal_steps(own.lattice):
            fresh[own.lattice.spacing == "relative"].append(name)
        if own.lattice.seed:
            at = dither(own.lattice.seed, matrix_shape(tuple(own.codes.shape)), own.codes.device) + 0.5
            places[name] = (at * _DITHER_PLACES).to(torch.int32).reshape(own.codes.shape)
            codes[name] = own.codes.to(torch.int32) * _DITHER_PLACES + places[name]
    exponents = exponent_bits(tensors, fresh[0]) + exponent_bits(tensors, fresh[1], by_column=False)
    return exponents + total_entropy_bits(tensors, codes) - total_entropy_bits(tensors, places)
