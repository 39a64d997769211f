"""Checks whether `evaluate` can be trusted: its answer is finite, repeats itself and depends on the weights.

Also warns, once in a run, where a scheme loses something and no `evaluate` measures it."""

from __future__ import annotations

import math
import statistics
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import dither
from shrinkpoint.errors import UnmeasuredLossWarning
from shrinkpoint.schemes.evaluate import DegradationMetric, Reading, TrialValues, scale_of
from shrinkpoint.schemes.select import TensorSelection
from shrinkpoint.tensors.flat_state import FlatState

MEASURE_ADVICE = 'Pass evaluate= to a scheme that measures, such as Fisher(budget="1%", evaluate=...)'


class UnmeasuredLossNotice:
    """Says so once in a run; a scheme has one."""

    def __init__(self) -> None:
        self._was_given = False

    def warn_once(self, scheme: object, *, quiet: bool = False) -> None:
        """Warn, the first time.

        Args:
            scheme: the scheme, as it is written.
            quiet: another process says it.
        """
        if self._was_given or quiet:
            return
        self._was_given = True
        text = f"the loss is not measured: {scheme} says how far values move, and not what that costs. {MEASURE_ADVICE}"
        warnings.warn(text, UnmeasuredLossWarning, stacklevel=4)


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
"""Of what noise was, where answers differ less now: one bad moment is not to make a whole run lossless."""
_EXTRA_REPEATS = 3
"""Further answers for the same weights, the first time, where noise is worth a word."""
_UNIFORM_WIDTH = math.sqrt(12.0)
"""Of a deviation: the width of evenly distributed noise of one deviation."""


@dataclass(frozen=True)
class EvaluateProblem:
    """Why nothing may be lost.

    Attributes:
        observation: what `evaluate` did.
        advice: what the reader of this can do about it.
    """

    observation: str
    advice: str


class Calibration:
    """What a run knows of its `evaluate`; forgotten where the run goes on from a checkpoint.

    Attributes:
        noise: the largest difference seen between answers for the same weights, relative to these, forgotten by and by;
            None: not known.
        has_reacted: whether clearly different weights were seen to have another answer.
        num_saves: that were measured.
    """

    def __init__(self) -> None:
        self.noise: float | None = None
        self.has_reacted, self.num_saves = False, 0
        self._num_examples, self._is_interval_warned = 0, False

    @property
    def state(self) -> tuple[float | None, bool, int]:
        """All of it, to be compared with what other processes know."""
        return self.noise, self.has_reacted, self.num_saves

    def set_state(self, state: tuple[float | None, bool, int] | None) -> None:
        """Take what is known elsewhere; None: nothing."""
        self.noise, self.has_reacted, self.num_saves = state or (None, False, 0)

    def find_problem(
        self,
        quality: DegradationMetric,
        perturbations: Sequence[MakeValues],
        max_rise: Callable[[float], float] | None = None,
        compute_on_all: ComputeOnAll = lambda compute: [compute()],
    ) -> EvaluateProblem | None:
        """Measure the unchanged weights, which is `quality.base` from then on, and say why nothing may be lost.

        The first time, `evaluate` is called twice, and then with clearly different weights, one set after the other
        until it answers something else.

        Args:
            perturbations: each makes such weights.
            max_rise: by how much an answer may become worse, relative to its `scale`, of which this is a function;
                None if unknown.
            compute_on_all: replicas each measure, and all decide from what all of them found.

        Returns:
            None where `evaluate` can be trusted.
        """
        mine: list[Reading] = []

        def ask() -> list[float]:
            mine[:] = self._repeat_evaluation(quality, max_rise)
            return [one.value for one in mine]

        values = [value for told in compute_on_all(ask) for value in told]
        broken = next((one for one in values if not math.isfinite(one)), None)
        if broken is not None:
            return EvaluateProblem(
                f"evaluate returned {broken} for the state itself", "see whether training has diverged"
            )
        quality.baseline = _median_reading(mine, values)
        self._num_examples = 0 if quality.baseline.examples is None else quality.baseline.examples.numel()
        spread, kept = (max(values) - min(values)) / quality.scale, _NOISE_DECAY if len(mine) > 1 else 1.0
        self.noise = max(kept * (self.noise or 0.0), spread)
        self.num_saves += 1
        least = math.inf if max_rise is None else max_rise(quality.scale)
        if 0 < least <= self.noise:
            return EvaluateProblem(f"{self.noise_text}, and only {least:.2%} may be lost", NOISE_ADVICE)
        self.has_reacted = self.has_reacted or self._reacts_to(quality, perturbations, compute_on_all)
        if not self.has_reacted:
            found = f"evaluate returns {quality.baseline.value:g} for clearly different weights as well"
            do = "let it measure the model, or the state, that it is given, each time anew, on enough examples"
            return EvaluateProblem(found, do)
        return None

    @property
    def noise_text(self) -> str:
        """The noise in words."""
        return f"evaluate differs by {self.noise or 0.0:.2%} between calls with the same weights"

    def noise_warning(self, max_rise: float) -> str:
        """What to say of noise where so much may be lost, relative to the answer; "": nothing."""
        if self.noise is None or self.noise <= NOISE_WARNING_SHARE * max_rise:
            return ""
        return (
            f"{self.noise_text}, which is much where {max_rise:.2%} may be lost, and is taken off that: {NOISE_ADVICE}"
        )

    def interval_warning(self, rise: float, interval: tuple[float, float], max_rise: float) -> str:
        """What to say, once in a run, where there are too few examples for what is allowed; "": nothing.

        Args:
            rise, interval, allowed: all relative to the answer for the state.
        """
        if self._is_interval_warned or interval[1] <= MAX_INTERVAL_RATIO * max_rise:
            return ""
        self._is_interval_warned = True
        ends = " to ".join(f"{end:+.2%}" for end in interval)
        return (
            f"evaluate measures a rise of {rise:+.2%} on {self._num_examples} examples (95 % confidence: {ends}), "
            f"so on others it may be above the {max_rise:.2%} that is allowed: let it measure more of them"
        )

    def _repeat_evaluation(
        self, quality: DegradationMetric, max_rise: Callable[[float], float] | None
    ) -> list[Reading]:
        """Answers for the unchanged weights: two, where noise is not known or counts; more, where these differ."""
        found = [quality.evaluate({})]
        if not found[0].is_finite:
            return found
        counts = 0.0 if max_rise is None else NOISE_WARNING_SHARE * max_rise(scale_of(found[0].value))
        if self.noise is None or self.num_saves % REPEAT_INTERVAL == 0 or self.noise > counts / 4:
            found.append(quality.evaluate({}))
        if len(found) == 2 and found[1].is_finite and not found[1].equals(found[0]):
            found.append(quality.evaluate({}))
            values = [one.value for one in found]
            if self.noise is None and max(values) - min(values) > counts * scale_of(values[0]):
                found += [quality.evaluate({}) for _ in range(_EXTRA_REPEATS)]
        return found

    def _reacts_to(
        self, quality: DegradationMetric, perturbations: Sequence[MakeValues], compute_on_all: ComputeOnAll
    ) -> bool:
        """Whether `evaluate` answers something else, on every process, for one of several sets of other weights."""
        clear = _MIN_NOISE_RATIO * (self.noise or 0.0) * quality.scale

        def differs(make: MakeValues) -> bool:
            found = quality.evaluate(make())
            if not found.is_finite:
                return True
            apart = abs(found.value - quality.baseline.value)
            return apart > clear if clear > 0 else not found.equals(quality.baseline)

        return any(all(compute_on_all(lambda make=make: differs(make))) for make in perturbations)  # type: ignore[misc]


def make_perturbations(
    selection: TensorSelection, state: FlatState, global_name: Callable[[str], str] = str
) -> tuple[MakeValues, ...]:
    """Makers of clearly different weights, for those that were picked: with noise of one deviation, and zeros.

    Args:
        global_name: of a whole weight; its boxes, and copies of these, get noise of the same seed.
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
    width = _UNIFORM_WIDTH * spread if 0 < spread < math.inf else 1.0
    noise = dither(seed, (1, x.numel()), x.device).reshape(x.shape)
    return (plain + width * noise).to(x.dtype)


def _median_reading(readings: Sequence[Reading], values: Sequence[float]) -> Reading:
    """The median of all answers; with examples only where all are alike, for else these are not the same ones."""
    first = readings[0]
    alike = all(one.equals(first) for one in readings) and all(value == first.value for value in values)
    return first if alike else Reading(statistics.median(values))
