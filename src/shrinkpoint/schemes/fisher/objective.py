"""What the step sizes are chosen for: a relative error, a compression ratio or a budget of loss."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.schemes.evaluate import Degradation
from shrinkpoint.schemes.fisher.step_candidates import QuantizedWeights, StepCandidates, from_log_step, to_log_step
from shrinkpoint.tensors.info import JSON

MAX_LOG_STEP, MIN_LOG_STEP = to_log_step(4.0), to_log_step(1 / 64)
"""In standard deviations, in the geometric mean over all weights. Below, most points of a keyframe are too far from
zero for a byte, and cost as much as the weights themselves."""
DEFAULT_LOG_STEP = to_log_step(1.0)
"""Where nothing tells how large steps may be."""
TARGET_SHARE = 0.5
"""Of the budget: what steps are made for when they are changed, as predictions are."""
GROW_BELOW = 0.1
"""Of the budget: a rise below it lets the next checkpoint take larger steps."""
MAX_TRIALS = 5
"""Evaluations of drafts in one save, at most; one where the steps stay as they are."""
_MIN_STEP, _MAX_STEP = 2.0**-24, 2.0**6
"""Standard deviations beyond which a number of steps says nothing any more."""
_CHANGE_THRESHOLD = to_log_step(2**0.5)
"""By how much steps may differ from the best ones before they are changed: a change costs bits."""

Measure = Callable[[QuantizedWeights], Degradation]
"""What a draft does to the loss."""


@dataclass(frozen=True)
class StateBits:
    """Bits of a whole state.

    Attributes:
        raw: as it is.
        other: by all that is stored but the weights.
        is_first: whether this is the first checkpoint of a run.
    """

    raw: float
    other: float
    is_first: bool

    def weight_bits(self, ratio: float) -> float:
        """For the weights, where the whole is to be so many times smaller."""
        return self.raw / ratio - self.other

    def ratio(self, bits: float) -> float:
        """Where the weights have so many."""
        return self.raw / max(1.0, self.other + bits)


@dataclass
class RunMemory:
    """What a run teaches, and every manifest says.

    Attributes:
        log_step: of the steps at the checkpoint before, in eighths of an octave; None: there is none.
        num_terms: N of the prediction; None: not known.
    """

    log_step: int | None = None
    num_terms: float | None = None

    def update(self, weights: QuantizedWeights, rise: float, min_rise: float) -> None:
        """N from a measured rise; not all at once, since one error of many is a matter of chance.

        The first time it is taken to be `min_rise`, at least: then too, steps may not become too large at once. Only
        from
        weights that were rounded to the nearest: where some are held at their points, a checkpoint is an average over
        time, which often has a lower loss than the newest weights, and nothing of that is left with other steps.
        """
        if weights.curvature_term <= 0 or not math.isfinite(rise) or weights.hysteresis > 0.5:
            return
        if self.num_terms is None:
            self.num_terms = max(rise, min_rise) / weights.curvature_term
            return
        found = min(max(rise / weights.curvature_term, self.num_terms / 2), self.num_terms * 2)
        self.num_terms = math.sqrt(self.num_terms * found)


@dataclass(frozen=True)
class StepChoice:
    """What was chosen.

    Attributes:
        weights: None: nothing that was tried is within the budget, so that nothing may be lost.
        trials: for the manifest.
        rise: of the loss, measured; None: nothing was.
        interval: in which the rise may lie on other examples; None: not known.
    """

    weights: QuantizedWeights | None
    trials: list[JSON] = field(default_factory=list)
    rise: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Weights that no points of this size reach, and which therefore stay exact."""
        return () if self.weights is None else self.weights.left_out


class Objective(ABC):
    """Something that was asked for."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, JSON]:
        """For the manifest."""
        raise NotImplementedError

    @abstractmethod
    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        """Choose.

        Args:
            memory: changed where something was learned.
            measure: None: nothing can be measured.
            state_bits: what else is stored, should a ratio be asked for.

        Raises:
            PolicyError: a ratio that cannot be reached, at the first checkpoint.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ErrorTarget(Objective):
    """The root mean square of the error, in standard deviations: the geometric mean over all weights."""

    error: float

    @property
    def settings(self) -> dict[str, JSON]:
        return {"relative_error": self.error}

    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        """See `Objective`."""
        size = to_log_step(min(max(self.error * math.sqrt(12), _MIN_STEP), _MAX_STEP))
        return _accept(candidates.quantize(size), memory, measure)


@dataclass(frozen=True)
class RatioTarget(Objective):
    """How many times smaller the whole state becomes."""

    ratio: float

    @property
    def settings(self) -> dict[str, JSON]:
        return {"ratio": self.ratio}

    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        """See `Objective`."""
        low, high, left = MIN_LOG_STEP, MAX_LOG_STEP, state_bits.weight_bits(self.ratio)
        if memory.log_step is not None and abs(candidates.bits(memory.log_step) - left) < 0.1 * left:
            low = high = memory.log_step
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if candidates.bits(middle) <= left else (middle + 1, high)
        if low == MAX_LOG_STEP and candidates.bits(low) > left:
            self._report_unreachable(state_bits.ratio(candidates.bits(low)), state_bits.is_first)
        return _accept(candidates.quantize(low), memory, measure)

    def _report_unreachable(self, reachable: float, is_first: bool) -> None:
        """A run that has been going on is not ended by it: what it holds changes, and so does what can be reached."""
        found = f"{self.ratio:g}x, while the largest steps there are make this state about {reachable:.3g}x smaller"
        if is_first:
            expected, do = f"at most {_round_down(reachable):g}", "ask for less, or for a budget with evaluate="
            raise PolicyError("ratio", found=found, expected=expected, do=do)
        warnings.warn(f"ratio: {found}: these are taken", LossWarning, stacklevel=6)


@dataclass(frozen=True)
class LossBudget(Objective):
    """The rise of the loss that a checkpoint may cause.

    Attributes:
        budget: in the loss's own unit.
        share: instead of that: of the loss itself, in per cent, from which `in_loss_unit` makes a budget.
        noise: of a measurement; it counts against the budget.
    """

    budget: float
    share: float | None = None
    noise: float = 0.0

    @property
    def settings(self) -> dict[str, JSON]:
        return {"budget": self.budget if self.share is None else f"{self.share:g}%"}

    def in_loss_unit(self, scale: float, noise: float = 0.0) -> LossBudget:
        """The same in the loss's own unit.

        Args:
            scale: what a share is of.
            noise: of a measurement.
        """
        return LossBudget(self.budget if self.share is None else self.share / 100 * scale, noise=noise)

    def relative_budget(self, scale: float) -> float:
        """The share of `scale` that may be lost."""
        return self.budget / scale if self.share is None else self.share / 100

    @property
    def _max_rise(self) -> float:
        """What a measured rise may be."""
        return self.budget - self.noise

    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        """See `Objective`. Without `measure` the prediction decides, and where there is none either, `UNKNOWN`."""
        if measure is None and candidates.no_curvature:  # a prediction in no unit decides nothing
            return _accept(
                candidates.quantize(DEFAULT_LOG_STEP if memory.log_step is None else memory.log_step), RunMemory(), None
            )
        size, free = self._initial_step(candidates, memory, is_measured=measure is not None), memory.log_step is None
        if measure is None:
            return _accept(candidates.quantize(size), memory, None)
        tried: list[JSON] = []
        held: StepChoice | None = None
        for _ in range(MAX_TRIALS):
            draft = candidates.quantize(size)
            change = measure(draft)
            tried.append(_candidate_json(draft, memory, change.rise))
            memory.update(draft, change.rise, GROW_BELOW * self.budget)
            if change.rise <= self._max_rise:
                held = StepChoice(draft, tried, change.rise, change.interval)
                size = self._predicted_step(candidates, memory) if free else draft.log_step
                if size <= draft.log_step + 1:
                    return held
            elif held is not None:  # nan, too, is too much
                return held
            else:
                size, free = self._reduce_step(draft, change.rise), False
        return held or StepChoice(None, tried)

    def _initial_step(self, candidates: StepCandidates, memory: RunMemory, *, is_measured: bool) -> int:
        """The steps of the checkpoint before, unless others are clearly better; not smaller ones if measured."""
        best = self._predicted_step(candidates, memory)
        if memory.log_step is None:
            return best
        change = min(best - memory.log_step, 2 * _CHANGE_THRESHOLD)
        if abs(change) <= _CHANGE_THRESHOLD or (is_measured and change < 0):
            return memory.log_step
        return memory.log_step + change

    def _predicted_step(self, candidates: StepCandidates, memory: RunMemory) -> int:
        """What the prediction says; without one, the steps of the checkpoint before."""
        unit = candidates.curvature_term(0) * (memory.num_terms or 0.0)
        if not 0 < unit < math.inf:
            return DEFAULT_LOG_STEP if memory.log_step is None else memory.log_step
        return min(max(to_log_step(math.sqrt(TARGET_SHARE * self._max_rise / unit)), MIN_LOG_STEP), MAX_LOG_STEP)

    def _reduce_step(self, weights: QuantizedWeights, rise: float) -> int:
        share = TARGET_SHARE * self._max_rise / rise if math.isfinite(rise) else 0.0
        return max(
            MIN_LOG_STEP,
            weights.log_step
            + min(-_CHANGE_THRESHOLD, max(-6 * _CHANGE_THRESHOLD, to_log_step(math.sqrt(max(share, 1e-9))))),
        )


def _accept(weights: QuantizedWeights, memory: RunMemory, measure: Measure | None) -> StepChoice:
    """A draft that is taken whatever it does to the loss."""
    change = Degradation(math.nan) if measure is None else measure(weights)
    rise = None if measure is None else change.rise
    return StepChoice(weights, [_candidate_json(weights, memory, rise)], rise, change.interval)


def _round_down(ratio: float) -> float:
    """Two digits of it, rounded down."""
    unit = 10.0 ** (math.floor(math.log10(ratio)) - 1)
    return math.floor(ratio / unit) * unit


def _candidate_json(weights: QuantizedWeights, memory: RunMemory, rise: float | None) -> JSON:
    """What a manifest says of a draft; the prediction is that from before it was measured."""
    predicted = None if memory.num_terms is None else memory.num_terms * weights.curvature_term
    return {
        "step": round(from_log_step(weights.log_step), 4),
        "hold": round(weights.hysteresis, 3),
        "curvature": predicted,
        "slope": weights.slope_term,
        "rise": rise_to_json(rise),
    }


def rise_to_json(rise: float | None) -> JSON:
    """A rise as a manifest can say it."""
    return rise if rise is None or math.isfinite(rise) else str(rise)
