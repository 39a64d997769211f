"""Measures one system on one series: sizes, errors, seconds, and the quality before and after the round trip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.progress import track
from shrinkpoint.tensors.compare import same_bits
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import Role
from shrinkpoint_lab.bench.result import BenchResult, ResultRow
from shrinkpoint_lab.bench.series import QualityFunction, Series
from shrinkpoint_lab.bench.systems import RoundTrip, System

ROLE_GROUPS: Mapping[str, tuple[Role, ...]] = {
    "W": (Role.PARAMETER, Role.MASTER),
    "m": (Role.MOMENT1,),
    "v": (Role.MOMENT2,),
}
"""Roles of the weights (W), the first moments (m) and the second moments (v)."""
DEFAULT_EPS = 1e-8
"""The epsilon of Adam where a state does not record it."""


@dataclass(frozen=True)
class Distortion:
    """Relative errors of a decoded state: L2 norm of the error over that of the original, over all tensors of a group.

    Attributes:
        weights, moment1, moment2: errors of these groups of tensors; None if the state has none.
        update: error of Adam's direction `m / (sqrt(v) + eps)`, which decides the next step; None without moments.
        exact: every tensor of the state came back bit for bit.
    """

    weights: float | None
    moment1: float | None
    moment2: float | None
    update: float | None
    exact: bool

    @classmethod
    @torch.no_grad()
    def measure(cls, original: FlatState, decoded: Mapping[str, Tensor]) -> Distortion:
        """Compares the decoded tensors of a state with the original."""
        weights, moment1, moment2 = (
            _relative_error((original.tensors[name], decoded[name]) for name in names)
            for names in _names_by_group(original).values()
        )
        update = _relative_error(_adam_updates(original, decoded))
        exact = all(same_bits(tensor, decoded[name]) for name, tensor in original.tensors.items())
        return cls(weights, moment1, moment2, update, exact)


def _names_by_group(state: FlatState) -> dict[str, list[str]]:
    infos = state.infos.items()
    return {group: [name for name, info in infos if info.role in roles] for group, roles in ROLE_GROUPS.items()}


def _adam_updates(original: FlatState, decoded: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of Adam's direction of each parameter, from the original and from the decoded moments."""
    for info in original.optimizer_info.values():
        if info.moment1 is None or info.moment2 is None:
            continue
        update, decoded_update = (
            tensors[info.moment1].double() / (tensors[info.moment2].double().sqrt() + (info.eps or DEFAULT_EPS))
            for tensors in (original.tensors, decoded)
        )
        if update.shape == decoded_update.shape:
            yield update, decoded_update


def _relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """L2 norm of the error over that of the original, over pairs (original, decoded); None without a float tensor."""
    squared_error = squared_norm = 0.0
    has_floats = False
    for original, decoded in pairs:
        if not original.is_floating_point():
            continue
        has_floats = True
        wide = original.detach().to("cpu", torch.float64)
        squared_error += float((wide - decoded.detach().to("cpu", torch.float64)).square().sum())
        squared_norm += float(wide.square().sum())
    if not has_floats:
        return None
    if squared_norm > 0:
        return math.sqrt(squared_error / squared_norm)
    return 0.0 if squared_error == 0 else math.inf


def measure(system: System, series: Series, quality: QualityFunction | None = None) -> BenchResult:
    """Runs a system on a series; an error of this library becomes the result's `failure`."""
    entries, rows = iter(series), []
    try:
        for round_trip in track(system.run(series), f"{system.name}: checkpoints", len(series)):
            entry = next(entries)
            assert entry.step == round_trip.step
            rows.append(_result_row(entry.state, round_trip, quality))
    except ShrinkpointError as error:
        return BenchResult(system.name, failure=str(error))
    return BenchResult(system.name, rows)


def _result_row(state: Any, round_trip: RoundTrip, quality: QualityFunction | None) -> ResultRow:
    flat_state = flatten(state)
    distortion = Distortion.measure(flat_state, round_trip.tensors)
    errors = {
        "W": distortion.weights,
        "m": distortion.moment1,
        "v": distortion.moment2,
        "update": distortion.update,
    }
    values = {
        group: sum(flat_state.infos[name].numel for name in names)
        for group, names in _names_by_group(flat_state).items()
    }
    original_value = decoded_value = rise = None
    if quality is not None:
        original_value = quality.value_at_step(round_trip.step, state)
        decoded_value = quality.value_of(round_trip.state)
        rise = quality.rise(original_value, decoded_value) if math.isfinite(original_value) else None
    return ResultRow(
        step=round_trip.step,
        keyframe=round_trip.keyframe,
        raw=sum(info.nbytes for info in flat_state.infos.values()),
        stored=round_trip.stored,
        values=values,
        bits=_bits_per_value(round_trip, values),
        errors={kind: error for kind, error in errors.items() if error is not None},
        exact=distortion.exact,
        encode=round_trip.encode_seconds,
        decode=round_trip.decode_seconds,
        searched=round_trip.evaluate_seconds,
        quality=original_value,
        returned=decoded_value,
        rise=rise,
        peak=round_trip.peak,
        retention=round_trip.retention,
        choice=round_trip.choice,
    )


def _bits_per_value(round_trip: RoundTrip, values: Mapping[str, int]) -> dict[str, float]:
    """Stored bits for each value of a group; empty where the system does not tell roles apart."""
    if not round_trip.roles:
        return {}
    stored = {group: sum(round_trip.roles.get(role.value, 0) for role in roles) for group, roles in ROLE_GROUPS.items()}
    return {group: 8 * stored[group] / count for group, count in values.items() if count}
