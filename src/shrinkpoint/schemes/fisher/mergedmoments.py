"""As `moments`, of tensors of which several ranks have boxes: their lattices are parts of those of whole tensors."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from shrinkpoint.codec import Lattice, Points
from shrinkpoint.codec.lattice import matrix, spans
from shrinkpoint.record import Role
from shrinkpoint.schemes.fisher.moments import (
    DTYPES,
    FEWEST,
    Steps,
    factors_of,
    first,
    first_rows,
    floor_of,
    logarithms,
    lone,
    lone_sides,
    relative_squares,
    second,
    steps_of,
)
from shrinkpoint.schemes.picks import largest
from shrinkpoint.schemes.wholes import Wholes
from shrinkpoint.state import FlatState


def moments(
    wholes: Wholes,
    flat: FlatState,
    save: int,
    seed: int,
    steps: Steps,
    made: dict[str, Tensor],
    kept: Collection[str] = (),
) -> dict[str, Points]:
    """Points of the boxes of every moment that is large enough and finite; a collective.

    Args:
        save, seed, steps, made, kept: as of `moments.moments`.
    """
    one = _Moments(wholes, flat, steps, kept)
    out = one.seconds(made)
    numbers = {
        name: zlib.crc32(f"{seed}/{save}/{wholes.title(name)}".encode()) or 1
        for name in flat.infos
        if flat.infos[name].role is Role.MOMENT1
    }
    seeds = {name: wholes.mine[name].place.seed(number, wholes.mine[name].sizes) for name, number in numbers.items()}
    out.update(one.firsts(made, seeds))
    return out


class _Moments:
    def __init__(self, wholes: Wholes, flat: FlatState, steps: Steps, kept: Collection[str]) -> None:
        self._wholes, self._flat, self._steps, self._kept = wholes, flat, steps, kept
        fit = {
            name: flat.tensors[name]
            for name, info in flat.infos.items()
            if info.role in (Role.MOMENT1, Role.MOMENT2)
            and flat.tensors[name].dtype in DTYPES
            and wholes.mine[name].place.numel >= FEWEST
        }
        usable = wholes.all({name: math.isfinite(largest(x)) for name, x in fit.items()})
        self._usable = {name: x for name, x in fit.items() if x.numel() and wholes.title(name) in usable}
        pairs = {facts.moment1: facts.moment2 for facts in flat.optim.values() if facts.moment1 is not None}
        self._pairs = {one: other for one, other in pairs.items() if other is not None and self._beside(one, other)}
        self._owners = {other: one for one, other in self._pairs.items()}

    def _beside(self, name: str, other: str) -> bool:
        both = name in self._usable and other in self._usable
        return both and self._wholes.is_beside(name, other)

    def _of(self, role: Role) -> dict[str, Tensor]:
        return {
            name: x
            for name, x in self._usable.items()
            if self._flat.infos[name].role is role and name not in self._kept
        }

    def seconds(self, made: dict[str, Tensor]) -> dict[str, Points]:
        """Of second moments; fills `made` with their values."""
        found = self._of(Role.MOMENT2)
        positive = self._wholes.all({name: not bool((x < 0).any()) for name, x in found.items()})
        found = {name: x for name, x in found.items() if self._wholes.title(name) in positive}
        floors = {name: floor_of(self._usable.get(self._owners.get(name, "")), x) for name, x in found.items()}
        gaps = {name for name, x in found.items() if logarithms(x, floors[name])[1] is not None}
        gaps = self._wholes.anywhere(gaps)

        def logs(name: str) -> Tensor:
            values, there = logarithms(found[name], floors[name])
            return values if there is None else values * there

        def present(name: str) -> Tensor:
            values, there = logarithms(found[name], floors[name])
            return torch.ones_like(values) if there is None else there.to(torch.float32)

        totals = self._wholes.margins(found, logs)
        counts = self._wholes.margins((name for name in found if self._wholes.title(name) in gaps), present)
        whole = {title: factors_of(one, counts.get(title)) for title, one in totals.items()}
        out = {}
        for name, x in found.items():
            title = self._wholes.title(name)
            sides = self._cut(name, Lattice("log", *whole[title]))
            out[name] = second(x, floors[name], steps_of(re.split("[/.]", title)[-1], self._steps), sides)
            made[name] = out[name].values(x.dtype)
        return out

    def firsts(self, made: Mapping[str, Tensor], seeds: Mapping[str, int]) -> dict[str, Points]:
        """Of first moments: relative to the second ones, where all boxes have these beside them."""
        wholes, found = self._wholes, self._of(Role.MOMENT1)
        related = {
            name: self._pairs.get(name, "") in made and made[self._pairs[name]].dtype == torch.float32 for name in found
        }
        relative = wholes.all(related)
        alone = {name: x for name, x in found.items() if wholes.title(name) not in relative}
        full = wholes.all({name: bool(x.all()) for name, x in alone.items()})
        names = [name for name in found if name not in alone or wholes.title(name) in full]

        def squares(name: str) -> Tensor:
            if name in alone:
                return matrix(found[name]).to(torch.float32).square()
            return relative_squares(found[name], made[self._pairs[name]])

        margins = wholes.margins(names, squares)
        out = dict[str, Points | None]()
        for name in names:
            sums, x = margins[wholes.title(name)], found[name]
            if name in alone:
                both = lone_sides(sums.mean, sums.means(1), sums.means(0), spans("linear", sums.shape), self._steps)
                sides = None if both is None else self._cut(name, Lattice("linear", *both))
                out[name] = None if sides is None else lone(x, seeds[name], self._steps, sides)
            else:
                rows = first_rows(sums.means(1).to(torch.float32), self._steps)
                rows, _ = self._cut(name, Lattice("relative", rows, torch.zeros(1, dtype=torch.int16)))
                other = self._pairs[name]
                out[name] = first(x, made[other], other, seeds[name], self._steps, rows)
        left_out = wholes.anywhere(name for name, one in out.items() if one is None)
        return {n: one for n, one in out.items() if one is not None and wholes.title(n) not in left_out}

    def _cut(self, name: str, lattice: Lattice) -> tuple[Tensor, Tensor]:
        """Exponents of a box's rows and columns."""
        piece = self._wholes.mine[name]
        part = piece.place.cut(lattice, piece.sizes)
        return part.rows, part.columns
