"""Measures one system on one series: sizes, errors, seconds, and the quality before and after the round trip."""

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
from shrinkpoint.tensors.flat_state import FlatState, flatten


@dataclass
class QualityFunction:
    """A user's quality function, and its values for the states of a series, each computed once.

    Attributes:
        evaluate: maps a state, as it was saved, to a loss or a score; it returns the same for the same state.
        higher_is_better: `evaluate` returns a score, not a loss.
    """

    evaluate: Callable[[Any], Any] = field(repr=False)
    higher_is_better: bool = False
    _values: dict[int, float] = field(default_factory=dict, repr=False)

    def value_of(self, state: Any) -> float:
        """Evaluates a state.

        Raises:
            PolicyError: `evaluate` raises, or returns no number.
        """
        with torch.no_grad():
            return call_evaluate(self.evaluate, state).value

    def value_at_step(self, step: int, state: Any) -> float:
        """The value of the state of a step; evaluated once."""
        if step not in self._values:
            self._values[step] = self.value_of(state)
        return self._values[step]

    def rise(self, original: float, decoded: float) -> float:
        """By how much the decoded state's value is worse, relative to the original's."""
        return relative_degradation(decoded, original, higher_is_better=self.higher_is_better)


def measure(system: System, series: Series, quality: QualityFunction | None = None) -> BenchResult:
    """Runs a system on a series; an error of this library becomes the result's `failure`."""
    try:
        return BenchResult(system.name, list(_rows(system, series, quality)))
    except ShrinkpointError as error:
        return BenchResult(system.name, failure=str(error))


def _rows(system: System, series: Series, quality: QualityFunction | None) -> Iterator[ResultRow]:
    entries = iter(series)
    for round_trip in system.run(series):
        entry = next(entries)
        assert entry.step == round_trip.step
        yield _result_row(flatten(entry.state), entry.state, round_trip, quality)


def _result_row(flat_state: FlatState, state: Any, round_trip: RoundTrip, quality: QualityFunction | None) -> ResultRow:
    distortion = Distortion.measure(flat_state, round_trip.tensors)
    errors = {
        "W": distortion.weights,
        "m": distortion.moment1,
        "v": distortion.moment2,
        "update": distortion.update,
    }
    values = {
        kind: sum(flat_state.infos[name].numel for name in names) for kind, names in _names_by_group(flat_state).items()
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


def _names_by_group(state: FlatState) -> dict[str, list[str]]:
    return {
        kind: [name for name, info in state.infos.items() if info.role in ROLE_GROUPS[kind]] for kind in ROLE_GROUPS
    }


def _bits_per_value(round_trip: RoundTrip, values: dict[str, int]) -> dict[str, float]:
    stored = {kind: sum(round_trip.roles.get(role.value, 0) for role in ROLE_GROUPS[kind]) for kind in ROLE_GROUPS}
    return {kind: 8 * stored[kind] / count for kind, count in values.items() if count and round_trip.roles}
