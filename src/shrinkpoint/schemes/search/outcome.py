"""What a search tried, measured and chose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shrinkpoint.schemes.search.space import Point, Space


@dataclass(frozen=True)
class Trial:
    """One point and what was found there.

    Attributes:
        size: predicted bytes.
        degradation: relative to the state without loss; nan where it could not be measured, which meets no threshold.
        seconds: that measuring took.
    """

    point: Point
    size: float
    degradation: float
    seconds: float

    def meets(self, threshold: float) -> bool:
        return self.degradation <= threshold  # False for nan


@dataclass(frozen=True)
class Outcome:
    """The end of a search.

    Attributes:
        chosen: one of `trials`; None where nothing that was tried meets the threshold.
        trials: in the order in which they were measured; each point once.
        method: the name of the search.
        rounds: how often all ranks measured together; without a group, as many as there are trials.
    """

    chosen: Trial | None
    trials: tuple[Trial, ...]
    method: str
    rounds: int

    def to_json(self, space: Space) -> dict[str, Any]:
        """Plain data for a manifest; numbers that JSON cannot say are "nan", "inf", "-inf"."""
        return {
            "method": self.method,
            "rounds": self.rounds,
            "chosen": self.chosen and _plain(self.chosen, space),
            "trials": [_plain(trial, space) for trial in self.trials],
        }


def _plain(trial: Trial, space: Space) -> dict[str, Any]:
    return {
        "settings": {name: _number(value) for name, value in space.settings(trial.point).items()},
        "size": _number(trial.size),
        "degradation": _number(trial.degradation),
        "seconds": round(trial.seconds, 3),
    }


def _number(value: float | int | str) -> float | int | str:
    return value if isinstance(value, (int, str)) or math.isfinite(value) else str(value)
