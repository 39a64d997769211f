"""Measures one system on one series, against the states that it was given and the user's quality function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shrinkpoint.bench.distortion import ROLE_GROUPS, Distortion
from shrinkpoint.bench.result import BenchResult, ResultRow
from shrinkpoint.bench.series import Series
from shrinkpoint.bench.systems import RoundTrip, System
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.schemes.evaluate import call_evaluate, relative_degradation
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.flatten import flatten


@dataclass
class QualityFunction:
    """What a state is worth: a function of it, and the answers for the states of a series, which are asked for once.

    Args:
        evaluate: of a state, as it was saved; returns a loss or a score, the same for the same state.
        higher_is_better: it is a score.
    """

    evaluate: Callable[[Any], Any] = field(repr=False)
    higher_is_better: bool = False
    _values: dict[int, float] = field(default_factory=dict, repr=False)

    def value_of(self, state: Any) -> float:
        """Raises `PolicyError` where `evaluate` raises, or returns no number."""
        with torch.no_grad():
            return call_evaluate(self.evaluate, state).value

    def value_at_step(self, step: int, state: Any) -> float:
        """Of a state of the series."""
        if step not in self._values:
            self._values[step] = self.value_of(state)
        return self._values[step]

    def rise(self, before: float, after: float) -> float:
        """By how much `after` is worse, relative to `before`."""
        return relative_degradation(after, before, higher_is_better=self.higher_is_better)


def measure(system: System, series: Series, quality: QualityFunction | None = None) -> BenchResult:
    """Run a system; an error of ours becomes the outcome's `failure`, so that the others still run."""
    try:
        return BenchResult(system.name, list(_rows(system, series, quality)))
    except ShrinkpointError as error:
        return BenchResult(system.name, failure=str(error))


def _rows(system: System, series: Series, quality: QualityFunction | None) -> Iterator[ResultRow]:
    given = iter(series)
    for returned in system.run(series):
        one = next(given)
        assert one.step == returned.step
        yield _result_row(flatten(one.state), one.state, returned, quality)


def _result_row(flat_state: FlatState, state: Any, round_trip: RoundTrip, quality: QualityFunction | None) -> ResultRow:
    found = Distortion.measure(flat_state, round_trip.tensors)
    errors = {"W": found.weights, "m": found.moment1, "v": found.moment2, "update": found.update}
    values = {
        kind: sum(flat_state.infos[name].numel for name in names) for kind, names in _names_by_group(flat_state).items()
    }
    before = after = rise = None
    if quality is not None:
        before, after = quality.value_at_step(round_trip.step, state), quality.value_of(round_trip.state)
        rise = quality.rise(before, after) if math.isfinite(before) else None
    return ResultRow(
        step=round_trip.step,
        keyframe=round_trip.keyframe,
        raw=sum(info.nbytes for info in flat_state.infos.values()),
        stored=round_trip.stored,
        values=values,
        bits=_bits_per_value(round_trip, values),
        errors={kind: error for kind, error in errors.items() if error is not None},
        exact=found.exact,
        encode=round_trip.encode_seconds,
        decode=round_trip.decode_seconds,
        searched=round_trip.evaluate_seconds,
        quality=before,
        returned=after,
        rise=rise,
        peak=round_trip.peak,
        retention=round_trip.retention,
        choice=round_trip.choice,
    )


def _names_by_group(state: FlatState) -> dict[str, list[str]]:
    return {
        kind: [name for name, info in state.infos.items() if info.role in ROLE_GROUPS[kind]] for kind in ROLE_GROUPS
    }


def _bits_per_value(round_trip: RoundTrip, values: dict[str, int]) -> dict[str, float]:
    stored = {kind: sum(round_trip.roles.get(role.value, 0) for role in ROLE_GROUPS[kind]) for kind in ROLE_GROUPS}
    return {kind: 8 * stored[kind] / count for kind, count in values.items() if count and round_trip.roles}
