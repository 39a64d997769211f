"""The scheme's knowledge of tensors of which several ranks have boxes, merged over these ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec import Lattice, Origin, Points, Reference
from shrinkpoint.codec.lattice import matrix, sides
from shrinkpoint.schemes.fisher import elsewhere
from shrinkpoint.schemes.fisher.curvature import Curvature, comparable
from shrinkpoint.schemes.fisher.drafts import is_linear
from shrinkpoint.schemes.fisher.mergedmoments import moments
from shrinkpoint.schemes.fisher.moments import FEWEST, Steps
from shrinkpoint.schemes.fisher.pool import Pool
from shrinkpoint.schemes.fisher.probes import Rise, curvature_of, kinds_of, noisy
from shrinkpoint.schemes.fisher.spread import FAR, counted, entropy_of
from shrinkpoint.schemes.fisher.weights import lattice_of, usual_squares
from shrinkpoint.schemes.picks import Picks
from shrinkpoint.schemes.shardedpicks import picked
from shrinkpoint.schemes.unmoved import agreed, unmoved
from shrinkpoint.schemes.wholes import Margins, Wholes, merged_moments, moments_of
from shrinkpoint.state import FlatState


class Merged(Pool):
    """See `Pool`. What is decided of a whole tensor is decided on every rank, from the same numbers."""

    def __init__(self, wholes: Wholes) -> None:
        self._wholes = wholes
        self._blank: dict[str, Tensor] = {}
        self._inherits: set[str] = set()
        self._known: dict[str, Curvature] = {}
        self._deviations: dict[str, float] = {}
        self._lattices: dict[tuple[str, float, float], Lattice | None] = {}

    @property
    def leads(self) -> bool:
        """See `Pool`."""
        return self._wholes.rank == 0

    # of one weight

    def title(self, name: str) -> str:
        """See `Pool`."""
        return self._wholes.title(name)

    def counts(self, name: str) -> bool:
        """See `Pool`."""
        return self._wholes.counts(name)

    def numel(self, name: str, x: Tensor) -> int:
        """See `Pool`."""
        return self._wholes.mine[name].place.numel

    def deviation(self, name: str, x: Tensor) -> float:
        """See `Pool`."""
        return self._deviations[self.title(name)]

    def rows(self, name: str, x: Tensor, most: int) -> slice:
        """See `Pool`: those rows of the box that would be chosen of the whole weight."""
        place = self._wholes.mine[name].place
        every = max(1, place.numel // most)
        return slice(-place.first_row % every, None, every)

    def seed(self, name: str, number: int) -> int:
        """See `Pool`."""
        piece = self._wholes.mine[name]
        return piece.place.seed(number, piece.sizes)

    def inherits(self, name: str) -> bool:
        """See `Pool`."""
        return self.title(name) in self._inherits

    def lattice(
        self, name: str, x: Tensor, known: Curvature, usual: float, seed: int, careful: float
    ) -> Lattice | None:
        """See `Pool`: the box's part of the whole weight's lattice."""
        title, piece = self.title(name), self._wholes.mine[name]
        key = title, usual, careful
        if key not in self._lattices:
            self._lattices[key] = lattice_of(
                self._blank[title], self._known[title], usual, 0, careful, self._deviations[title]
            )
        whole = self._lattices[key]
        return None if whole is None else replace(piece.place.cut(whole, piece.sizes), seed=seed)

    # of all weights

    def picks(self, flat: FlatState, reference: Reference | None, alive: Collection[str] | None) -> Picks:
        """See `Pool`."""
        found = picked(self._wholes, flat, alive, smallest=FEWEST, axes=1, owned=flat.optim.keys())
        self._blank = {title: torch.empty(self._wholes.shapes[title], device="meta") for title in found.titles}
        held = {} if reference is None else reference.symbols
        self._inherits = self._wholes.all(
            {name: _is_linear(held.get(name), x) for name, x in found.picks.tensors.items()}
        )
        return found.picks

    def unmoved(self, names: Collection[str], flat: FlatState, reference: Reference | None) -> dict[str, Origin]:
        """See `Pool`."""
        found = agreed(unmoved(names, flat, reference), names, self._wholes)
        titles = self._wholes.anywhere(found)
        self._blank = {title: x for title, x in self._blank.items() if title not in titles}
        return found

    def moments(
        self, flat: FlatState, save: int, seed: int, steps: Steps, made: dict[str, Tensor], kept: Collection[str] = ()
    ) -> Iterable[tuple[str, Points]]:
        """See `Pool`."""
        return moments(self._wholes, flat, save, seed, steps, made, kept).items()

    def curvatures(
        self, weights: Mapping[str, Tensor], flat: FlatState, recorded: Mapping[str, Tensor]
    ) -> dict[str, Curvature]:
        """See `Pool`: the box's squares, and the margins of the whole weight's."""
        found = {name: self._found(name, x, flat, recorded) for name, x in weights.items()}
        told = self._wholes.told(
            {name: (_kind(one), *self._moments(name, weights[name])) for name, one in found.items()}
        )
        self._deviations = {title: merged_moments(note[1:] for note in notes)[1] for title, notes in told.items()}
        squares = {name: one.squares for name, one in found.items() if one.squares is not None}
        margins = self._wholes.margins(squares, squares.__getitem__)
        whole = {
            title: _agreed({kind for kind, *_ in told.get(title, [])}, margins.get(title)) for title in self._blank
        }
        weak = [title for title, one in whole.items() if one.margins is None or one.shape_alone]
        others = elsewhere.margins(self._wholes, flat, weak) if weak else {}
        others = {title: one for title, one in others.items() if math.isfinite(one.mean)}
        self._known = comparable(whole | {title: Curvature(margins=one) for title, one in others.items()})
        for name in (one for one in found if self.title(one) in others):
            made = elsewhere.squares(others[self.title(name)], self._wholes.mine[name], weights[name].device)
            found[name] = Curvature(made, found[name].slope)
        return {name: self._part(one, self._known[self.title(name)]) for name, one in found.items()}

    def probe(self, weights: Mapping[str, Tensor], rise: Rise) -> dict[str, float]:
        """See `Pool`: errors in all boxes of a kind of weights at once."""
        kinds, found = kinds_of(self._blank), dict[str, tuple[float, float]]()
        numbers = {title: number for number, title in enumerate(self._blank, 1)}
        for kind in dict.fromkeys(kinds.values()):
            ours = {name: x for name, x in weights.items() if kinds[self.title(name)] == kind}
            made = {
                name: noisy(x, self.seed(name, numbers[self.title(name)]), self.deviation(name, x))
                for name, x in ours.items()
            }
            each = (
                float((made[name].float() - x.float()).square().sum()) for name, x in ours.items() if self.counts(name)
            )
            found[kind] = rise(made), self.total(sum(each))[0]
        return curvature_of(found)

    def probed(self, weights: Mapping[str, Tensor], found: Mapping[str, float]) -> dict[str, Curvature]:
        """See `Pool`."""
        kinds = kinds_of(self._blank)
        values = {title: found.get(kind, max(found.values())) for title, kind in kinds.items()}
        self._known = {
            title: Curvature(probed=True, margins=_even(tuple(x.shape), values[title]))
            for title, x in self._blank.items()
        }
        self._lattices.clear()
        return {
            name: replace(
                self._known[self.title(name)],
                squares=torch.full((1, 1), values[self.title(name)], device=x.device).expand(matrix(x).shape),
            )
            for name, x in weights.items()
        }

    def usual(self, known: Mapping[str, Curvature], weights: Mapping[str, Tensor]) -> float:
        """See `Pool`."""
        return usual_squares(self._known, self._blank)

    def count(self, weights: Collection[str]) -> int:
        """See `Pool`."""
        return len(self._blank)

    def total(self, *numbers: float) -> tuple[float, ...]:
        """See `Pool`."""
        return self._wholes.total(*numbers)

    def largest(self, number: int | None) -> int | None:
        """See `Pool`."""
        return max((one for one in self._wholes.gather(number) if one is not None), default=None)

    def agreed(self, thing: Any) -> Any:
        """See `Pool`."""
        first, *others = self._wholes.gather(thing)
        return first if all(other == first for other in others) else None

    def shares(self, counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """See `Pool`."""
        told = self._wholes.told({name: both for name, both in counts.items() if self.counts(name)})
        return {
            title: sum(some for some, _ in found) / max(1, sum(every for _, every in found))
            for title, found in told.items()
        }

    def anywhere(self, names: Iterable[str]) -> set[str]:
        """See `Pool`."""
        return self._wholes.anywhere(names)

    def bits(self, codes: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> float:
        """See `Pool`: from how often each code occurs on all ranks."""
        told = self._wholes.told({name: _trimmed(counted(one)) for name, one in codes.items() if self.counts(name)})
        bits = 0.0
        for title, parts in told.items():
            counts = np.zeros(2 * FAR, np.int64)
            for low, some in parts:
                counts[low : low + some.size] += some
            scale = 1.0 if weights is None else math.prod(self._wholes.shapes[title]) / max(1, int(counts.sum()))
            bits += entropy_of(torch.from_numpy(counts)) * scale
        return bits

    def _found(self, name: str, x: Tensor, flat: FlatState, recorded: Mapping[str, Tensor]) -> Curvature:
        facts, piece = flat.optim.get(name), self._wholes.mine[name]
        if facts is not None and piece.sizes != piece.place.shape:
            facts = replace(facts, factors=None, blocks=None)  # these are of whole tensors
        return Curvature.found(x, flat, facts, recorded.get(name))

    def _moments(self, name: str, x: Tensor) -> tuple[int, float, float]:
        return moments_of(x) if self.counts(name) else (0, 0.0, 0.0)

    def _part(self, one: Curvature, whole: Curvature) -> Curvature:
        if whole.margins is None:
            return Curvature(slope=one.slope)
        return replace(one, margins=whole.margins)


def _kind(known: Curvature) -> int:
    """Of what is known of a box: nothing, squares, or those of momentum."""
    return 0 if known.squares is None else 1 + known.shape_alone


def _agreed(kinds: Collection[int], margins: Margins | None) -> Curvature:
    """What is known of a whole weight: of the same kind in all its boxes, and finite; else nothing."""
    if margins is None or len(kinds) != 1 or kinds == {0} or not math.isfinite(margins.mean):
        return Curvature()
    return Curvature(shape_alone=kinds == {2}, margins=margins)


def _even(shape: tuple[int, ...], value: float) -> Margins:
    rows, columns = sides(shape)
    each = torch.ones(rows, dtype=torch.float64), torch.ones(columns, dtype=torch.float64)
    return Margins(shape, value * rows * columns, each[0] * value * columns, each[1] * value * rows)


def _is_linear(held: Any, x: Tensor) -> bool:
    return isinstance(held, Points) and is_linear(held, x)


def _trimmed(counts: Tensor) -> tuple[int, Any]:
    """Where counts begin, and those from there to the last one."""
    places = counts.nonzero().reshape(-1)
    if not places.numel():
        return 0, np.empty(0, np.uint32)
    low, high = int(places[0]), int(places[-1])
    return low, counts[low : high + 1].cpu().numpy().astype(np.uint32)
