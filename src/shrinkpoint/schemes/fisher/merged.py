"""The scheme's knowledge of tensors of which several ranks have boxes, merged over these ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.lattice import Lattice, LatticeTensor, as_matrix, matrix_shape
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.quantize.entropy import CODE_LIMIT, count_codes, entropy_bits_of_counts
from shrinkpoint.schemes.fisher import remote_moments
from shrinkpoint.schemes.fisher.curvature import Curvature, drop_relative
from shrinkpoint.schemes.fisher.mergedmoments import moments
from shrinkpoint.schemes.fisher.moments import MIN_LATTICE_NUMEL, MomentPrecision
from shrinkpoint.schemes.fisher.pool import Pool
from shrinkpoint.schemes.fisher.probe import (
    MeasureLossIncrease,
    add_uniform_noise,
    curvature_by_group,
    group_by_pattern,
)
from shrinkpoint.schemes.fisher.step_candidates import is_linear
from shrinkpoint.schemes.fisher.steps import geometric_mean_curvature, make_lattice
from shrinkpoint.schemes.select import TensorSelection, select_tensors, unchanged_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals, count_mean_m2, merge_mean_std
from shrinkpoint.tensors.flat_state import FlatState


class Merged(Pool):
    """See `Pool`. What is decided of a whole tensor is decided on every rank, from the same numbers."""

    def __init__(self, wholes: GlobalTensors) -> None:
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
        return self._wholes.global_name(name)

    def counts(self, name: str) -> bool:
        """See `Pool`."""
        return self._wholes.is_primary(name)

    def numel(self, name: str, x: Tensor) -> int:
        """See `Pool`."""
        return self._wholes.local_shards[name].spec.global_numel

    def deviation(self, name: str, x: Tensor) -> float:
        """See `Pool`."""
        return self._deviations[self.title(name)]

    def rows(self, name: str, x: Tensor, most: int) -> slice:
        """See `Pool`: those rows of the box that would be chosen of the whole weight."""
        place = self._wholes.local_shards[name].spec
        every = max(1, place.global_numel // most)
        return slice(-place.first_row % every, None, every)

    def seed(self, name: str, number: int) -> int:
        """See `Pool`."""
        piece = self._wholes.local_shards[name]
        return piece.spec.dither_seed(number, piece.sizes)

    def inherits(self, name: str) -> bool:
        """See `Pool`."""
        return self.title(name) in self._inherits

    def lattice(
        self, name: str, x: Tensor, known: Curvature, usual: float, seed: int, careful: float
    ) -> Lattice | None:
        """See `Pool`: the box's part of the whole weight's lattice."""
        title, piece = self.title(name), self._wholes.local_shards[name]
        key = title, usual, careful
        if key not in self._lattices:
            self._lattices[key] = make_lattice(
                self._blank[title], self._known[title], usual, 0, careful, self._deviations[title]
            )
        whole = self._lattices[key]
        return None if whole is None else replace(piece.spec.slice_lattice(whole, piece.sizes), seed=seed)

    # of all weights

    def global_tensors(self, state: FlatState) -> GlobalTensors:
        return self._wholes

    def picks(self, flat: FlatState, reference: Reference | None, alive: Collection[str] | None) -> TensorSelection:
        """See `Pool`."""
        found = select_tensors(
            flat,
            self._wholes,
            alive,
            min_numel=MIN_LATTICE_NUMEL,
            min_dims=1,
            optimized_names=flat.optimizer_info.keys(),
        )
        self._blank = {title: torch.empty(self._wholes.shapes[title], device="meta") for title in found.global_names}
        held = {} if reference is None else reference.quantized
        self._inherits = self._wholes.tensors_where_all(
            {name: _is_linear(held.get(name), x) for name, x in found.tensors.items()}
        )
        return found

    def unmoved(
        self, names: Collection[str], flat: FlatState, reference: Reference | None
    ) -> dict[str, QuantizedTensor]:
        """See `Pool`."""
        found = unchanged_tensors(names, flat, reference, self._wholes)
        titles = self._wholes.union(found)
        self._blank = {title: x for title, x in self._blank.items() if title not in titles}
        return found

    def moments(
        self,
        flat: FlatState,
        save: int,
        seed: int,
        steps: MomentPrecision,
        made: dict[str, Tensor],
        kept: Collection[str] = (),
    ) -> Iterable[tuple[str, LatticeTensor]]:
        """See `Pool`."""
        return moments(self._wholes, flat, save, seed, steps, made, kept).items()

    def curvatures(
        self, weights: Mapping[str, Tensor], flat: FlatState, recorded: Mapping[str, Tensor]
    ) -> dict[str, Curvature]:
        """See `Pool`: the box's squares, and the margins of the whole weight's."""
        found = {name: self._found(name, x, flat, recorded) for name, x in weights.items()}
        told = self._wholes.gather_by_tensor(
            {name: (_kind(one), *self._moments(name, weights[name])) for name, one in found.items()}
        )
        self._deviations = {title: merge_mean_std(note[1:] for note in notes)[1] for title, notes in told.items()}
        squares = {name: one.squares for name, one in found.items() if one.squares is not None}
        margins = self._wholes.marginals(squares, squares.__getitem__)
        whole = {
            title: _agreed({kind for kind, *_ in told.get(title, [])}, margins.get(title)) for title in self._blank
        }
        weak = [title for title, one in whole.items() if one.marginals is None or one.relative_only]
        others = remote_moments.remote_marginals(self._wholes, flat, weak) if weak else {}
        others = {title: one for title, one in others.items() if math.isfinite(one.mean)}
        self._known = drop_relative(whole | {title: Curvature(marginals=one) for title, one in others.items()})
        for name in (one for one in found if self.title(one) in others):
            made = remote_moments.rank_one_squares(
                others[self.title(name)], self._wholes.local_shards[name], weights[name].device
            )
            found[name] = Curvature(made, found[name].slope)
        return {name: self._part(one, self._known[self.title(name)]) for name, one in found.items()}

    def probe(self, weights: Mapping[str, Tensor], rise: MeasureLossIncrease) -> dict[str, float]:
        """See `Pool`: errors in all boxes of a kind of weights at once."""
        kinds, found = group_by_pattern(self._blank), dict[str, tuple[float, float]]()
        numbers = {title: number for number, title in enumerate(self._blank, 1)}
        for kind in dict.fromkeys(kinds.values()):
            ours = {name: x for name, x in weights.items() if kinds[self.title(name)] == kind}
            made = {
                name: add_uniform_noise(x, self.seed(name, numbers[self.title(name)]), self.deviation(name, x))
                for name, x in ours.items()
            }
            each = (
                float((made[name].float() - x.float()).square().sum()) for name, x in ours.items() if self.counts(name)
            )
            found[kind] = rise(made), self.total(sum(each))[0]
        return curvature_by_group(found)

    def probed(self, weights: Mapping[str, Tensor], found: Mapping[str, float]) -> dict[str, Curvature]:
        """See `Pool`."""
        kinds = group_by_pattern(self._blank)
        values = {title: found.get(kind, max(found.values())) for title, kind in kinds.items()}
        self._known = {
            title: Curvature(probed=True, marginals=_even(tuple(x.shape), values[title]))
            for title, x in self._blank.items()
        }
        self._lattices.clear()
        return {
            name: replace(
                self._known[self.title(name)],
                squares=torch.full((1, 1), values[self.title(name)], device=x.device).expand(as_matrix(x).shape),
            )
            for name, x in weights.items()
        }

    def usual(self, known: Mapping[str, Curvature], weights: Mapping[str, Tensor]) -> float:
        """See `Pool`."""
        return geometric_mean_curvature(self._known, self._blank)

    def count(self, weights: Collection[str]) -> int:
        """See `Pool`."""
        return len(self._blank)

    def total(self, *numbers: float) -> tuple[float, ...]:
        """See `Pool`."""
        return self._wholes.sum_over_ranks(*numbers)

    def largest(self, number: int | None) -> int | None:
        """See `Pool`."""
        return max((one for one in self._wholes.all_gather(number) if one is not None), default=None)

    def agreed(self, thing: Any) -> Any:
        """See `Pool`."""
        first, *others = self._wholes.all_gather(thing)
        return first if all(other == first for other in others) else None

    def shares(self, counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """See `Pool`."""
        told = self._wholes.gather_by_tensor({name: both for name, both in counts.items() if self.counts(name)})
        return {
            title: sum(some for some, _ in found) / max(1, sum(every for _, every in found))
            for title, found in told.items()
        }

    def anywhere(self, names: Iterable[str]) -> set[str]:
        """See `Pool`."""
        return self._wholes.union(names)

    def bits(self, codes: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> float:
        """See `Pool`: from how often each code occurs on all ranks."""
        told = self._wholes.gather_by_tensor(
            {name: _trimmed(count_codes(one)) for name, one in codes.items() if self.counts(name)}
        )
        bits = 0.0
        for title, parts in told.items():
            counts = np.zeros(2 * CODE_LIMIT, np.int64)
            for low, some in parts:
                counts[low : low + some.size] += some
            scale = 1.0 if weights is None else math.prod(self._wholes.shapes[title]) / max(1, int(counts.sum()))
            bits += entropy_bits_of_counts(torch.from_numpy(counts)) * scale
        return bits

    def _found(self, name: str, x: Tensor, flat: FlatState, recorded: Mapping[str, Tensor]) -> Curvature:
        facts, piece = flat.optimizer_info.get(name), self._wholes.local_shards[name]
        if facts is not None and piece.sizes != piece.spec.global_shape:
            facts = replace(facts, factors=None, blocks=None)  # these are of whole tensors
        return Curvature.from_optimizer(x, flat, facts, recorded.get(name))

    def _moments(self, name: str, x: Tensor) -> tuple[int, float, float]:
        return count_mean_m2(x) if self.counts(name) else (0, 0.0, 0.0)

    def _part(self, one: Curvature, whole: Curvature) -> Curvature:
        if whole.marginals is None:
            return Curvature(slope=one.slope)
        return replace(one, marginals=whole.marginals)


def _kind(known: Curvature) -> int:
    """Of what is known of a box: nothing, squares, or those of momentum."""
    return 0 if known.squares is None else 1 + known.relative_only


def _agreed(kinds: Collection[int], margins: Marginals | None) -> Curvature:
    """What is known of a whole weight: of the same kind in all its boxes, and finite; else nothing."""
    if margins is None or len(kinds) != 1 or kinds == {0} or not math.isfinite(margins.mean):
        return Curvature()
    return Curvature(relative_only=kinds == {2}, marginals=margins)


def _even(shape: tuple[int, ...], value: float) -> Marginals:
    rows, columns = matrix_shape(shape)
    each = torch.ones(rows, dtype=torch.float64), torch.ones(columns, dtype=torch.float64)
    return Marginals(shape, value * rows * columns, each[0] * value * columns, each[1] * value * rows)


def _is_linear(held: Any, x: Tensor) -> bool:
    return isinstance(held, LatticeTensor) and is_linear(held, x)


def _trimmed(counts: Tensor) -> tuple[int, Any]:
    """Where counts begin, and those from there to the last one."""
    places = counts.nonzero().reshape(-1)
    if not places.numel():
        return 0, np.empty(0, np.uint32)
    low, high = int(places[0]), int(places[-1])
    return low, counts[low : high + 1].cpu().numpy().astype(np.uint32)
