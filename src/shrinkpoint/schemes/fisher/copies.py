"""Finds weights beside the model that track it: averages of its weights, target networks, teachers, references.

Such a copy has the names of the model's weights after a prefix, or their shapes in the same order (a list of
`shadow_params`), and values near to theirs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor, as_matrix
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, Reference
from shrinkpoint.quantize.statistics import ValueSums, value_sums
from shrinkpoint.schemes.select import WEIGHT_DTYPES, TensorSelection
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

MAX_DISTANCE = 1.0
"""The largest distance of a copy from the model, relative to its weights. At 1 the model is as far away as zero is.
Networks of two seeds are 1.41 apart. An EMA of decay 0.9999 was at 0.87 after 400 steps (docs/fisher_studies.md)."""
_SEPARATOR = re.compile("[/.]")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightCopy:
    """Weights beside the model that track it.

    Attributes:
        name: what their names begin with: "ema/module.".
        sources: local names of the model's weights by local names of this rank's weights of the copy.
        global_names: of the weights of all ranks, in the same order on every rank.
        tensors: local names of all tensors that the model has too, small ones and buffers included, by local name in
            the model. `evaluate` measures the copy with their values.
        distance: sqrt(2 r), where r is the mean of |copy - model|^2 / (|copy|^2 + |model|^2) over matrices, weighted
            by their sizes. Between copies that is about |copy - model| / |model|, between unrelated networks 1.41.
        sums: of the values of the copy's local weights, by name.
    """

    name: str
    sources: Mapping[str, str]
    global_names: tuple[str, ...]
    tensors: Mapping[str, str] = field(repr=False)
    distance: float
    sums: Mapping[str, ValueSums] = field(repr=False)

    def model_values(self, values: Mapping[str, Tensor], state: FlatState) -> dict[str, Tensor]:
        """Values with which the model computes what the copy computes, by local name in the model.

        Args:
            values: other values of weights of the copy, by local name.
        """
        return {
            name: values.get(own, state.tensors[own]).to(state.tensors[name].dtype)
            for name, own in self.tensors.items()
        }


def find_copies(
    state: FlatState,
    tensors: GlobalTensors,
    selection: TensorSelection,
    selected: Sequence[str],
    unmeasured: Collection[str],
    reference: Reference | None,
) -> list[WeightCopy]:
    """Find the copies of a model's weights in a state; a collective.

    A network with an optimizer of its own is no copy, nor is one with values that are not finite. One that is further
    away than `MAX_DISTANCE` is a copy only if it was one in the parent checkpoint: the model has left it behind.

    Args:
        selection: of the model's weights.
        selected: global names of all of them, whether they have moved or not.
        unmeasured: global names of those that `evaluate` does not look at, and so are neither lossy nor copied.
    """
    casts = {name: tensors.global_names[source] for name, source in selection.cast_sources.items()}
    narrow = tensors.reduce(casts, lambda shards: shards[0])
    measured = {*selected}.difference(unmeasured)
    weights = [
        *(cast for cast, source in narrow.items() if source in measured),
        *(n for n in selected if n in measured),
    ]
    excluded = {*selected, *narrow, *selection.nonfinite}
    sizes = {tensors.shapes[name] for name in weights}
    others = {
        name: shape
        for name, shape in tensors.shapes.items()
        if shape in sizes and name not in excluded and tensors.roles[name] in (Role.PARAMETER, Role.OTHER)
    }
    if not others:
        return []
    trained = tensors.union(state.infos.keys() & (state.optimizer_info.keys() | state.moment_kinds.keys()))
    others = {name: shape for name, shape in others.items() if name not in trained}
    matches = match_weights(others, {name: tensors.shapes[name] for name in weights})
    found = (_make_copy(match, state, tensors, reference) for match in matches)
    copies = {copy.name: copy for copy in found if copy is not None}
    return [*copies.values()]


class Match(NamedTuple):
    """Tensors that match weights.

    Attributes:
        pairs: the weight's name by the name of its match.
        prefixes: of the names of both, where equal names follow them; of a list, where the same shapes do.
    """

    pairs: dict[str, str]
    prefixes: list[tuple[str, str]]

    @property
    def name(self) -> str:
        """The common beginning of all names, up to a separator."""
        first, last = min(self.pairs), max(self.pairs)
        ends = (end.end() for end in _SEPARATOR.finditer(first) if last.startswith(first[: end.end()]))
        return first[: max(ends, default=0)]


def match_weights(others: Mapping[str, Shape], weights: Mapping[str, Shape]) -> list[Match]:
    """Match sets of tensors with weights of the same names after a prefix, or of the same shapes in order in a list.

    Args:
        others, weights: shapes by name, in the order of the state.

    Returns:
        One for each entry of the state and set of weights.

    >>> weights = {"model/0.weight": (4, 8), "model/1.weight": (8, 4)}
    >>> match_weights({"ema/module.0.weight": (4, 8), "ema/module.1.weight": (8, 4), "lr": (1,)}, weights)[0].prefixes
    [('ema/module.', 'model/')]
    >>> match_weights({"ema/shadow_params/0": (4, 8), "ema/shadow_params/1": (8, 4)}, weights)[0].pairs
    {'ema/shadow_params/0': 'model/0.weight', 'ema/shadow_params/1': 'model/1.weight'}
    """
    index: dict[object, list[tuple[str, dict[str, Shape]]]] = {}
    for prefix, members in _by_prefix(weights).items():
        for key in (frozenset(members.items()), tuple(members.values())):
            index.setdefault(key, []).append((prefix, members))
    matches: list[Match] = []
    seen: set[str] = set()
    for prefix, members in sorted(_by_prefix(others).items(), key=lambda item: (-len(item[1]), -len(item[0]))):
        if any(prefix + suffix in seen for suffix in members):
            continue
        found = index.get(frozenset(members.items()), [])
        if not found and all(suffix.isdecimal() for suffix in members):
            found = index.get(tuple(members.values()), [])
        if found:
            source, targets = max(found, key=lambda item: _num_shared_parts(prefix, item[0]))
            suffixes = members if members.keys() == targets.keys() else targets
            pairs = {prefix + own: source + other for own, other in zip(members, suffixes, strict=True)}
            seen |= pairs.keys()
            _join(Match(pairs, [(prefix, source)]), matches)
    return matches


def _by_prefix(shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Shapes by what follows a prefix that ends with a separator, for each prefix of a name."""
    prefixes: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        for end in (0, *(match.end() for match in _SEPARATOR.finditer(name))):
            prefixes.setdefault(name[:end], {})[name[end:]] = shape
    return prefixes


def _num_shared_parts(prefix: str, other: str) -> int:
    """Number of parts that two prefixes share at their ends and at their beginnings."""
    a, b = _SEPARATOR.split(prefix)[:-1], _SEPARATOR.split(other)[:-1]
    return sum(
        next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
        for one, two in ((a, b), (a[::-1], b[::-1]))
    )


def _join(found: Match, matches: list[Match]) -> None:
    """Add a match, as a part of one of the same entry of the state with other weights if there is one."""
    entry = _SEPARATOR.split(found.name, maxsplit=1)[0]
    for match in matches:
        is_same = _SEPARATOR.split(match.name, maxsplit=1)[0] == entry
        if is_same and not {*match.pairs.values()} & {*found.pairs.values()}:
            match.pairs.update(found.pairs)
            match.prefixes.extend(found.prefixes)
            return
    matches.append(found)


def _make_copy(
    match: Match, state: FlatState, tensors: GlobalTensors, reference: Reference | None
) -> WeightCopy | None:
    """The copy of a match of global names; None if it is none. A collective."""
    pairs, global_names = match.pairs, tensors.global_names
    local = {name: pairs[global_names[name]] for name in state.infos if global_names[name] in pairs}
    sources = {name: tensors.colocated_name(name, weight) for name, weight in local.items()}
    usable = {
        name: source is not None and state.tensors[name].dtype in WEIGHT_DTYPES for name, source in sources.items()
    }
    if tensors.tensors_where_all(usable) != pairs.keys():
        return None
    own = {name: source for name, source in sources.items() if source is not None and state.tensors[name].numel()}
    sums = map_tensors(
        lambda name, threads: value_sums.together(state.tensors[name], threads),
        {name: state.tensors[name] for name in own},
    )
    distance = _distance(own, state, tensors)
    quantized = {} if reference is None else reference.quantized
    broken = tensors.union(name for name in own if not math.isfinite(sums[name].max_magnitude))
    was_copy = tensors.union(name for name in own if isinstance(quantized.get(name), LatticeTensor)) == pairs.keys()
    if broken or not (distance <= MAX_DISTANCE or was_copy):
        return None
    names = tuple(name for name in tensors.shapes if name in pairs)
    return WeightCopy(match.name, own, names, _evaluated(match, state, tensors), distance, sums)


def _distance(pairs: Mapping[str, str], state: FlatState, tensors: GlobalTensors) -> float:
    """See `WeightCopy.distance`; nan without matrices. On a sample of the rows; a collective."""

    def squares(name: str) -> tuple[float, float]:
        rows = tensors.local_shards[name].spec.sampled_rows(MAX_SAMPLED_VALUES)
        own, weight = (as_matrix(state.tensors[n])[rows].to("cpu", torch.float64) for n in (name, pairs[name]))
        return float((own - weight).square().sum()), float(own.square().sum() + weight.square().sum())

    reports = tensors.reduce_primary(
        {name: squares(name) for name in pairs if len(tensors.local_shards[name].spec.global_shape) > 1},
        lambda ranks: tuple(map(math.fsum, zip(*ranks, strict=True))),
    )
    shares = [(math.prod(tensors.shapes[name]), apart / total) for name, (apart, total) in reports.items() if total]
    numel = sum(count for count, _ in shares)
    return math.sqrt(2 * math.fsum(count * share for count, share in shares) / numel) if numel else math.nan


def _evaluated(match: Match, state: FlatState, tensors: GlobalTensors) -> dict[str, str]:
    """`WeightCopy.tensors` of a match of global names."""
    targets: dict[str, str] = {}
    for own, other in match.prefixes:
        under = [name for name in tensors.shapes if name.startswith(own)]
        parameters = [n for n in tensors.shapes if n.startswith(other) and tensors.roles[n] is Role.PARAMETER]
        if [tensors.shapes[name] for name in under] == [tensors.shapes[name] for name in parameters]:
            targets |= dict(zip(under, parameters, strict=True))
        targets |= {name: other + name[len(own) :] for name in under if other + name[len(own) :] in tensors.shapes}
    targets |= match.pairs
    sources = {
        name: tensors.colocated_name(name, target)
        for name, global_name in tensors.global_names.items()
        if (target := targets.get(global_name)) is not None and target != global_name
    }
    return {source: name for name, source in sources.items() if source is not None}
