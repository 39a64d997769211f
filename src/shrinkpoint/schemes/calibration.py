"""Checks whether `evaluate` can be trusted: its answer is finite, repeats itself and depends on the weights.

Also warns, once in a run, where a scheme loses something and no `evaluate` measures it."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import dither
from shrinkpoint.errors import UnmeasuredLossWarning, warn_user
from shrinkpoint.schemes.evaluate import MEASURE_ADVICE, DegradationMetric, Reading, TrialValues, scale_of
from shrinkpoint.schemes.select import TensorSelection
from shrinkpoint.tensors.flat_state import FlatState

MakeValues = Callable[[], TrialValues]
ComputeOnAll = Callable[[Callable[[], Any]], list[Any]]
"""What each of several processes computed, on all of them; of one process, what it did."""

REPEAT_INTERVAL = 16
"""Saves after which an `evaluate` that has always repeated itself is asked twice again."""
NOISE_WARNING_SHARE = 0.25
"""Share of what may be lost: for noise above it, a warning is logged."""
NOISE_ADVICE = "fix its batches and its seed, and call model.eval()"
"""What to do about noise."""
_MIN_NOISE_RATIO = 2.0
"""Times the noise by which an answer for other weights differs at least, where there is noise."""
MAX_INTERVAL_RATIO = 1.25
"""Times what may be lost: an interval that reaches further is that of too few examples. A search goes to the limit, so
that the interval around what it chooses always reaches a little beyond."""
_NOISE_DECAY = 0.9
"""The share of earlier noise that remains where answers differ less now: a single bad moment must not make a whole run
lossless."""
_EXTRA_REPEATS = 3
"""Further answers for the same weights, the first time, where noise deserves a warning."""


class UnmeasuredLossNotice:
    """Warns once in a run that a scheme loses something that nothing measures."""

    def __init__(self) -> None:
        self._was_given = False

    def warn_once(self, scheme: object, *, quiet: bool = False) -> None:
        """Warn, the first time; `quiet`: another process does."""
        if self._was_given or quiet:
            return
        self._was_given = True
        text = f"the loss is not measured: {scheme} says how far values move, and not what that costs. {MEASURE_ADVICE}"
        warn_user(text, UnmeasuredLossWarning)


class EvaluateProblem(NamedTuple):
    """Why nothing may be lost: what `evaluate` did, and what the user can do about it."""

    observation: str
    advice: str


class Calibration:
    """What a run has learned of its `evaluate`; forgotten where the run goes on from a checkpoint.

    Attributes:
        noise: the largest difference between answers for the same weights, relative to these, with slow decay; None if
            unknown.
        has_reacted: whether clearly different weights had another answer.
        num_saves: number of saves that were measured.
    """

    def __init__(self) -> None:
        self.noise: float | None = None
        self.has_reacted, self.num_saves = False, 0
        self._num_examples, self._is_interval_warned = 0, False

    @property
    def state(self) -> tuple[float | None, bool, int]:
        """What processes compare and exchange."""
        return self.noise, self.has_reacted, self.num_saves

    def set_state(self, state: tuple[float | None, bool, int] | None) -> None:
        """Take over the `state` of another process; None: nothing is known."""
        self.noise, self.has_reacted, self.num_saves = state or (None, False, 0)

    @property
    def num_checks(self) -> int:
        """How often `find_problem` will probably evaluate."""
        return 1 + (self.noise is None) + (not self.has_reacted)

    def find_problem(
        self,
        metric: DegradationMetric,
        perturbations: Sequence[MakeValues],
        max_rise: Callable[[float], float] | None = None,
        compute_on_all: ComputeOnAll = lambda compute: [compute()],
    ) -> EvaluateProblem | None:
        """Measure the unchanged weights, which is `metric.baseline` from then on, and say why nothing may be lost.

        The first time, `evaluate` is called twice, and then with clearly different weights, one set after the other
        until it answers something else.

        Args:
            perturbations: each makes such weights.
            max_rise: by how much an answer may become worse, relative to its `scale`, of which this is a function;
                None if unknown.
            compute_on_all: replicas each measure, and all decide from all answers.

        Returns:
            None where `evaluate` can be trusted.
        """
        readings: list[Reading] = []

        def ask() -> list[float]:
            readings[:] = self._repeat_evaluation(metric, max_rise)
            return [reading.value for reading in readings]

        values = [value for answers in compute_on_all(ask) for value in answers]
        broken = next((value for value in values if not math.isfinite(value)), None)
        if failure := find_failure(metric, compute_on_all):
            return failure
        if broken is not None:
            observation = f"evaluate returned {broken} for the state itself"
            return EvaluateProblem(observation, "see whether training has diverged")
        metric.baseline = _median_reading(readings, values)
        self._num_examples = 0 if metric.baseline.examples is None else metric.baseline.examples.numel()
        decay = _NOISE_DECAY if len(readings) > 1 else 1.0
        self.noise = max(decay * (self.noise or 0.0), (max(values) - min(values)) / metric.scale)
        self.num_saves += 1
        limit = math.inf if max_rise is None else max_rise(metric.scale)
        if 0 < limit <= self.noise:
            return EvaluateProblem(f"{self.noise_text}, and only {limit:.2%} may be lost", NOISE_ADVICE)
        has_reacted = self.has_reacted or self._reacts_to(metric, perturbations, compute_on_all)
        if failure := find_failure(metric, compute_on_all):
            return failure
        self.has_reacted = has_reacted
        if has_reacted:
            return None
        observation = f"evaluate returns {metric.baseline.value:g} for clearly different weights as well"
        advice = "let it measure the model, or the state, that it is given, each time anew, on enough examples"
        return EvaluateProblem(observation, advice)

    @property
    def noise_text(self) -> str:
        """The noise in words."""
        return f"evaluate differs by {self.noise or 0.0:.2%} between calls with the same weights"

    def noise_warning(self, max_rise: float) -> str:
        """The warning about noise if so much may be lost, relative to the answer; "" if there is none."""
        if self.noise is None or self.noise <= NOISE_WARNING_SHARE * max_rise:
            return ""
        share = f"much where {max_rise:.2%} may be lost, and is taken off that"
        return f"{self.noise_text}, which is {share}: {NOISE_ADVICE}"

    def interval_warning(self, rise: float, interval: tuple[float, float], max_rise: float) -> str:
        """The warning, once in a run, about too few examples for what is allowed; "" if there is none.

        Args:
            rise, interval, max_rise: all relative to the answer for the state.
        """
        if self._is_interval_warned or interval[1] <= MAX_INTERVAL_RATIO * max_rise:
            return ""
        self._is_interval_warned = True
        ends = " to ".join(f"{end:+.2%}" for end in interval)
        return (
            f"evaluate measures a rise of {rise:+.2%} on {self._num_examples} examples (95 % confidence: {ends}), "
            f"so on others it may be above the {max_rise:.2%} that is allowed: let it measure more of them"
        )

    def _repeat_evaluation(self, metric: DegradationMetric, max_rise: Callable[[float], float] | None) -> list[Reading]:
        """Answers for the unchanged weights: two, where noise is unknown or matters; more, where these differ."""
        readings = [metric.evaluate({})]
        if not readings[0].is_finite:
            return readings
        tolerance = 0.0 if max_rise is None else NOISE_WARNING_SHARE * max_rise(scale_of(readings[0].value))
        if self.noise is None or self.num_saves % REPEAT_INTERVAL == 0 or self.noise > tolerance / 4:
            readings.append(metric.evaluate({}))
        if len(readings) == 2 and readings[1].is_finite and not readings[1].equals(readings[0]):
            readings.append(metric.evaluate({}))
            values = [reading.value for reading in readings]
            if self.noise is None and max(values) - min(values) > tolerance * scale_of(values[0]):
                readings += [metric.evaluate({}) for _ in range(_EXTRA_REPEATS)]
        return readings

    def _reacts_to(
        self, metric: DegradationMetric, perturbations: Sequence[MakeValues], compute_on_all: ComputeOnAll
    ) -> bool:
        """Whether `evaluate` answers something else, on every process, for one of several sets of other weights."""
        min_difference = _MIN_NOISE_RATIO * (self.noise or 0.0) * metric.scale

        def differs(make: MakeValues) -> bool:
            reading = metric.evaluate(make())
            if reading.failure:
                return False
            if not reading.is_finite or min_difference <= 0:
                return not (reading.is_finite and reading.equals(metric.baseline))
            return abs(reading.value - metric.baseline.value) > min_difference

        return any(all(compute_on_all(partial(differs, make))) for make in perturbations)


def find_failure(
    metric: DegradationMetric, compute_on_all: ComputeOnAll = lambda compute: [compute()]
) -> EvaluateProblem | None:
    """The first evaluation that failed on any process, as a problem; None if none did."""
    failed = next(filter(None, compute_on_all(lambda: metric.failure)), None)
    return failed and EvaluateProblem(f"the loss could not be measured: {failed.failure}", failed.advice)


def make_perturbations(
    selection: TensorSelection, state: FlatState, global_name: Callable[[str], str] = str
) -> tuple[MakeValues, ...]:
    """Makers of clearly different weights, for those selected: with noise of one standard deviation, and zeros.

    Args:
        global_name: of a local weight; shards and copies of one global tensor get noise of the same seed.
    """

    def noise() -> TrialValues:
        return {name: _add_noise(x, zlib.crc32(global_name(name).encode())) for name, x in selection.tensors.items()}

    def zeros() -> TrialValues:
        return {name: torch.zeros_like(x) for name, x in selection.tensors.items()}

    return lambda: selection.with_casts(noise(), state), lambda: selection.with_casts(zeros(), state)


def _add_noise(x: Tensor, seed: int) -> Tensor:
    """Where all values are the same, noise is as large as they are; 1, where these are zero."""
    plain = x.detach().to(torch.float32)
    spread = float(plain.std(correction=0)) if x.numel() else 0.0
    if not 0 < spread < math.inf:
        spread = abs(float(plain.reshape(-1)[0])) if x.numel() else 0.0
    width = math.sqrt(12.0) * spread if 0 < spread < math.inf else 1.0  # that of uniform noise with this deviation
    noise = dither(seed, (1, x.numel()), x.device).reshape(x.shape)
    return (plain + width * noise).to(x.dtype)


def _median_reading(readings: Sequence[Reading], values: Sequence[float]) -> Reading:
    """The median of all answers; with examples only if all are equal, since otherwise they are of other examples."""
    first = readings[0]
    are_equal = all(reading.equals(first) for reading in readings) and all(value == first.value for value in values)
    return first if are_equal else Reading(statistics.median(values))
