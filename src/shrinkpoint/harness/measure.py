"""One system on one series, held against what was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.harness.distortion import GROUPS, Distortion
from shrinkpoint.harness.outcome import Outcome, Row
from shrinkpoint.harness.series import Series
from shrinkpoint.harness.system import Returned, System
from shrinkpoint.schemes.quality import worse
from shrinkpoint.schemes.target import measured
from shrinkpoint.state import FlatState, flatten


@dataclass
class Quality:
    """What a state is worth: a function of it, and the answers for the states of a series, which are asked for once.

    Args:
        evaluate: of a state, as it was saved; returns a loss or a score, the same for the same state.
        higher_is_better: it is a score.
    """

    evaluate: Callable[[Any], Any] = field(repr=False)
    higher_is_better: bool = False
    _known: dict[int, float] = field(default_factory=dict, repr=False)

    def of(self, state: Any) -> float:
        """Raises `PolicyError` where `evaluate` raises, or returns no number."""
        with torch.no_grad():
            return measured(self.evaluate, state).value

    def given(self, step: int, state: Any) -> float:
        """Of a state of the series."""
        if step not in self._known:
            self._known[step] = self.of(state)
        return self._known[step]

    def rise(self, before: float, after: float) -> float:
        """By how much `after` is worse, relative to `before`."""
        return worse(after, before, higher=self.higher_is_better)


def measure(system: System, series: Series, quality: Quality | None = None) -> Outcome:
    """Run a system; an error of ours becomes the outcome's `failure`, so that the others still run."""
    try:
        return Outcome(system.name, list(_rows(system, series, quality)))
    except ShrinkpointError as error:
        return Outcome(system.name, failure=str(error))


def _rows(system: System, series: Series, quality: Quality | None) -> Iterator[Row]:
    given = iter(series)
    for returned in system.run(series):
        one = next(given)
        assert one.step == returned.step
        yield _row(flatten(one.state), one.state, returned, quality)


def _row(flat: FlatState, state: Any, returned: Returned, quality: Quality | None) -> Row:
    found = Distortion.of(flat, returned.tensors)
    errors = {"W": found.weights, "m": found.moment1, "v": found.moment2, "update": found.update}
    values = {kind: sum(flat.infos[name].numel for name in names) for kind, names in _names(flat).items()}
    before = after = rise = None
    if quality is not None:
        before, after = quality.given(returned.step, state), quality.of(returned.state)
        rise = quality.rise(before, after) if math.isfinite(before) else None
    return Row(
        step=returned.step, keyframe=returned.keyframe, raw=sum(info.nbytes for info in flat.infos.values()),
        stored=returned.stored, values=values, bits=_bits(returned, values),
        errors={kind: error for kind, error in errors.items() if error is not None}, exact=found.exact,
        encode=returned.encode, decode=returned.decode, searched=returned.searched, quality=before, returned=after,
        rise=rise, peak=returned.peak, retention=returned.retention, choice=returned.choice,
    )  # fmt: skip


def _names(flat: FlatState) -> dict[str, list[str]]:
    return {kind: [name for name, info in flat.infos.items() if info.role in GROUPS[kind]] for kind in GROUPS}


def _bits(returned: Returned, values: dict[str, int]) -> dict[str, float]:
    stored = {kind: sum(returned.roles.get(role.value, 0) for role in GROUPS[kind]) for kind in GROUPS}
    return {kind: 8 * stored[kind] / count for kind, count in values.items() if count and returned.roles}
