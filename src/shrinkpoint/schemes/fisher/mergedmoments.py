"""As `moments`, of tensors of which several ranks have boxes: their lattices are parts of those of whole tensors."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import Lattice, LatticeTensor, as_matrix, scale_counts
from shrinkpoint.schemes.fisher.moments import (
    MIN_LATTICE_NUMEL,
    MOMENT_DTYPES,
    MomentPrecision,
    exponents_from_marginals,
    first_row_exponents,
    log2_steps,
    momentum_exponents,
    precision_for,
    quantize_first,
    quantize_momentum,
    quantize_second,
    relative_squares,
    required_nonzero,
)
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role


def moments(
    wholes: GlobalTensors,
    flat: FlatState,
    save: int,
    seed: int,
    steps: MomentPrecision,
    made: dict[str, Tensor],
    kept: Collection[str] = (),
) -> dict[str, LatticeTensor]:
    """Points of the boxes of every moment that is large enough and finite; a collective.

    Args:
        save, seed, steps, made, kept: as of `moments.moments`.
    """
    one = _Moments(wholes, flat, steps, kept)
    out = one.seconds(made)
    numbers = {
        name: zlib.crc32(f"{seed}/{save}/{wholes.global_name(name)}".encode()) or 1
        for name in flat.infos
        if flat.infos[name].role is Role.MOMENT1
    }
    seeds = {
        name: wholes.local_shards[name].spec.dither_seed(number, wholes.local_shards[name].sizes)
        for name, number in numbers.items()
    }
    out.update(one.firsts(made, seeds))
    return out


class _Moments:
    def __init__(self, wholes: GlobalTensors, flat: FlatState, steps: MomentPrecision, kept: Collection[str]) -> None:
        self._wholes, self._flat, self._steps, self._kept = wholes, flat, steps, kept
        fit = {
            name: flat.tensors[name]
            for name, info in flat.infos.items()
            if info.role in (Role.MOMENT1, Role.MOMENT2)
            and flat.tensors[name].dtype in MOMENT_DTYPES
            and wholes.local_shards[name].spec.global_numel >= MIN_LATTICE_NUMEL
        }
        usable = wholes.tensors_where_all({name: math.isfinite(max_abs(x)) for name, x in fit.items()})
        self._usable = {name: x for name, x in fit.items() if x.numel() and wholes.global_name(name) in usable}
        pairs = {facts.moment1: facts.moment2 for facts in flat.optimizer_info.values() if facts.moment1 is not None}
        self._pairs = {one: other for one, other in pairs.items() if other is not None and self._beside(one, other)}
        self._owners = {other: one for one, other in self._pairs.items()}

    def _beside(self, name: str, other: str) -> bool:
        both = name in self._usable and other in self._usable
        return both and self._wholes.is_colocated(name, other)

    def _of(self, role: Role) -> dict[str, Tensor]:
        return {
            name: x
            for name, x in self._usable.items()
            if self._flat.infos[name].role is role and name not in self._kept
        }

    def seconds(self, made: dict[str, Tensor]) -> dict[str, LatticeTensor]:
        """Of second moments; fills `made` with their values."""
        found = self._of(Role.MOMENT2)
        positive = self._wholes.tensors_where_all({name: not bool((x < 0).any()) for name, x in found.items()})
        found = {name: x for name, x in found.items() if self._wholes.global_name(name) in positive}
        floors = {name: required_nonzero(self._usable.get(self._owners.get(name, "")), x) for name, x in found.items()}
        gaps = {name for name, x in found.items() if log2_steps(x, floors[name])[1] is not None}
        gaps = self._wholes.union(gaps)

        def logs(name: str) -> Tensor:
            values, there = log2_steps(found[name], floors[name])
            return values if there is None else values * there

        def present(name: str) -> Tensor:
            values, there = log2_steps(found[name], floors[name])
            return torch.ones_like(values) if there is None else there.to(torch.float32)

        totals = self._wholes.marginals(found, logs)
        counts = self._wholes.marginals((name for name in found if self._wholes.global_name(name) in gaps), present)
        whole = {title: exponents_from_marginals(one, counts.get(title)) for title, one in totals.items()}
        out = {}
        for name, x in found.items():
            title = self._wholes.global_name(name)
            sides = self._cut(name, Lattice("log", *whole[title]))
            out[name] = quantize_second(x, floors[name], precision_for(re.split("[/.]", title)[-1], self._steps), sides)
            made[name] = out[name].dequantize(x.dtype)
        return out

    def firsts(self, made: Mapping[str, Tensor], seeds: Mapping[str, int]) -> dict[str, LatticeTensor]:
        """Of first moments: relative to the second ones, where all boxes have these beside them."""
        wholes, found = self._wholes, self._of(Role.MOMENT1)
        related = {
            name: self._pairs.get(name, "") in made and made[self._pairs[name]].dtype == torch.float32 for name in found
        }
        relative = wholes.tensors_where_all(related)
        alone = {name: x for name, x in found.items() if wholes.global_name(name) not in relative}
        full = wholes.tensors_where_all({name: bool(x.all()) for name, x in alone.items()})
        names = [name for name in found if name not in alone or wholes.global_name(name) in full]

        def squares(name: str) -> Tensor:
            if name in alone:
                return as_matrix(found[name]).to(torch.float32).square()
            return relative_squares(found[name], made[self._pairs[name]])

        margins = wholes.marginals(names, squares)
        out = dict[str, LatticeTensor | None]()
        for name in names:
            sums, x = margins[wholes.global_name(name)], found[name]
            if name in alone:
                both = momentum_exponents(
                    sums.mean, sums.mean_along(1), sums.mean_along(0), scale_counts("linear", sums.shape), self._steps
                )
                sides = None if both is None else self._cut(name, Lattice("linear", *both))
                out[name] = None if sides is None else quantize_momentum(x, seeds[name], self._steps, sides)
            else:
                rows = first_row_exponents(sums.mean_along(1).to(torch.float32), self._steps)
                rows, _ = self._cut(name, Lattice("relative", rows, torch.zeros(1, dtype=torch.int16)))
                other = self._pairs[name]
                out[name] = quantize_first(x, made[other], other, seeds[name], self._steps, rows)
        left_out = wholes.union(name for name, one in out.items() if one is None)
        return {n: one for n, one in out.items() if one is not None and wholes.global_name(n) not in left_out}

    def _cut(self, name: str, lattice: Lattice) -> tuple[Tensor, Tensor]:
        """Exponents of a box's rows and columns."""
        piece = self._wholes.local_shards[name]
        part = piece.spec.slice_lattice(lattice, piece.sizes)
        return part.rows, part.columns
