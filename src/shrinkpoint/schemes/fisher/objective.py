"""Chooses the step size of the weights for a relative error, a compression ratio or a budget of loss.

For a ratio, `StateBits` estimates the size of all that is stored besides the weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.lattice import STEPS_PER_OCTAVE, LatticeTensor, dither, matrix_shape
from shrinkpoint.codec.reference import QuantizedTensor
from shrinkpoint.codec.twister_record import is_generator_state
from shrinkpoint.errors import PolicyError, warn_user
from shrinkpoint.schemes.base import finite_or_text
from shrinkpoint.schemes.evaluate import Degradation
from shrinkpoint.schemes.fisher.copies import WeightCopy
from shrinkpoint.schemes.fisher.curvature import exponent_bits, total_entropy_bits
from shrinkpoint.schemes.fisher.run_memory import UNKNOWN_ERROR, RunMemory, standard_error
from shrinkpoint.schemes.fisher.steps import (
    Candidates,
    QuantizedWeights,
    StepCandidates,
    from_log_step,
    to_log_step,
)
from shrinkpoint.schemes.planner import PlannedSave
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.info import JSON, Role

_DITHER_PLACES = 16  # of a cell, that the context of a code tells apart


@dataclass(frozen=True)
class StateBits:
    """The size of a whole state in bits."""

    raw: float  # Without compression
    other: float  # What is stored besides the weights
    is_first: bool  # True if this is the first checkpoint of a run, and no file alone

    def ratio(self, bits: float) -> float:
        """The compression ratio of the whole state if the weights have `bits`."""
        return self.raw / max(1.0, self.other + bits)


def count_state_bits(
    save: PlannedSave,
    coded: Collection[str],
    moments: Mapping[str, QuantizedTensor],
    copies: Sequence[WeightCopy],
    dropped: Collection[Role],
    *,
    is_first: bool,
) -> StateBits:
    """Count the bits of a whole state besides the weights: moments and exact tensors. A collective.

    Args:
        coded: names of the weights that do not stay exact, and of their casts.
        copies: of the weights, whose bits are taken to be as many for each value: the others are shared out.
        dropped: roles of tensors that are stored as zeros.
        is_first: this is the first checkpoint of a run.
    """
    tensors, others = save.tensors, save.unchanged | dict(moments)
    coded = {*coded, *others, *(name for copy in copies for name in copy.sources)}
    coded |= {name for name, info in save.state.infos.items() if info.role in dropped}
    sizes = {name: 8 * info.nbytes for name, info in save.state.infos.items() if name in tensors.primary}
    if save.base is not None:
        coded |= {name for name, info in save.state.infos.items() if is_generator_state(info)}
    exact, raw = tensors.collectives.sum_over_ranks(
        sum(size for name, size in sizes.items() if name not in coded), sum(sizes.values())
    )
    # What a reader has already costs nothing.
    inherited = {} if save.base is None else save.base.quantized
    points = {name: own for name, own in others.items() if inherited.get(name) is not own}
    numel, copied = (
        sum(math.prod(tensors.shapes[name]) for name in names)
        for names in (save.selection.global_names, [name for copy in copies for name in copy.global_names])
    )
    share = numel / max(1, numel + copied)
    other = exact + code_bits(tensors, points, inherited)
    return StateBits(share * raw, share * other, is_first=is_first)


def code_bits(
    tensors: GlobalTensors, points: Mapping[str, QuantizedTensor], parents: Mapping[str, QuantizedTensor]
) -> float:
    """The bits of codes and of their lattices, about, summed over global tensors; a collective.

    Of a tensor with dither a reader knows where in its cell each value lies, which tells much of a code.

    Args:
        points: of local shards, by name.
        parents: of the parent checkpoint, whose lattices cost nothing.
    """
    codes, places = {name: own.codes for name, own in points.items()}, dict[str, Tensor]()
    fresh: tuple[list[str], list[str]] = ([], [])
    for name, own in points.items():
        if not isinstance(own, LatticeTensor):
            continue
        parent = parents.get(name)
        if not isinstance(parent, LatticeTensor) or not parent.lattice.has_equal_steps(own.lattice):
            fresh[own.lattice.spacing == "relative"].append(name)
        if own.lattice.seed:
            at = dither(own.lattice.seed, matrix_shape(tuple(own.codes.shape)), own.codes.device) + 0.5
            places[name] = (at * _DITHER_PLACES).to(torch.int32).reshape(own.codes.shape)
            codes[name] = own.codes.to(torch.int32) * _DITHER_PLACES + places[name]
    exponents = exponent_bits(tensors, fresh[0]) + exponent_bits(tensors, fresh[1], by_column=False)
    return exponents + total_entropy_bits(tensors, codes) - total_entropy_bits(tensors, places)


MAX_LOG_STEP, MIN_LOG_STEP = to_log_step(4.0), to_log_step(1 / 256)
"""The largest and the smallest step size of a budget."""
FINE_LOG_STEP = to_log_step(1 / 64)
"""The smallest step size of a ratio. Below it, the codes of most values of a keyframe do not fit into a byte, and cost
nearly as much as the weights themselves; some weights may be out of reach."""
DEFAULT_LOG_STEP = to_log_step(1.0)
"""The step size if nothing is known of the loss: one standard deviation."""
TARGET_SHARE = 0.5
"""The share of the budget that new steps aim at, because predictions are uncertain."""
GROW_BELOW = 0.1
"""The share of the budget below which a measured rise lets the next checkpoint take larger steps."""
_FIRST_SCANNED, _LAST_SCANNED, _MAX_SCANNED = to_log_step(16.0), to_log_step(64.0), 16
"""The first and the largest step size of a fine-tune, and how many are tried."""
_FAR = 8.0  # budgets from which steps are halved
MAX_TRIALS = 5
"""The largest number of evaluations of candidates in one save; it is one if the steps do not change."""
_MIN_STEP, _MAX_STEP = 2.0**-24, 2.0**6
"""Step sizes in standard deviations beyond which a relative error means nothing."""
MAX_RELATIVE_ERROR = 2.0
"""The largest `relative_error`, in standard deviations of a tensor: beyond it, little but signs would remain."""
DEFAULT_BUDGET = 1e-3
"""The rise of the loss that is allowed if nothing is asked for and nothing measures it, in nats."""
DEFAULT_SHARE = 0.1
"""The rise of the loss that is allowed if nothing is asked for and it is measured, in per cent of the loss."""
_CHANGE_THRESHOLD = to_log_step(2**0.5)
"""The difference to the best step size from which steps are changed, because a change costs bits."""
MIN_BUDGET_SHARE = 1 / 16
"""The least share of the budget that a checkpoint may spend, whatever earlier restores have left."""
_GROWTH_THRESHOLD = 3 * _CHANGE_THRESHOLD
_LARGER = 2 * _CHANGE_THRESHOLD
"""The factor by which steps are enlarged after many saves whose rises were far below the budget: twice as large."""
MAX_SHARE_OF_LARGER = 0.75
"""The share of the budget within which the rise of such steps must be."""
"""The same for larger steps at a run's first save, because they cost an evaluation; later saves take them anyway."""
_FIRST_STEP, _FIRST_SHARE, _FIRST_EXPONENT = 1.6, 0.01, 0.4
"""The first step size, in standard deviations, for a budget of this share of the loss, and the power of other shares:
guesses from a few trainings."""


@dataclass(frozen=True)
class StepChoice:
    """The chosen step size.

    Attributes:
        weights: quantized with it; None if nothing that was tried is within the budget, so that nothing may be lost.
        trials: as the manifest records them.
        rise: of the loss, measured; None if it was not.
        interval: the confidence interval of the rise; None if unknown.
    """

    weights: QuantizedWeights | None
    trials: list[JSON] = field(default_factory=list)
    rise: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Global names of weights that no points of this step size reach, and which therefore stay exact."""
        return () if self.weights is None else self.weights.left_out


class Measure(Protocol):
    """Measures how much quantized weights degrade the loss."""

    def __call__(self, quantized: QuantizedWeights, *, mirrored: bool = False) -> Degradation:
        """Measures; `mirrored`: weights with the opposite errors."""
        ...


class _Trial(NamedTuple):
    """Weights that were measured."""

    change: Degradation
    rise: float  # To be compared with the budget: nan, or at least that of `change`
    record: dict[str, JSON]  # As a manifest has it


class Objective(ABC):
    """A target for which a step size is chosen."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, JSON]:
        """The target as a manifest has it: "relative_error", "ratio", or "budget".

        A budget is a text in per cent, or a number in the loss's own unit, which the scheme's argument `nats` takes.
        """
        raise NotImplementedError

    def unmet(self, measured: str = "the loss") -> str:
        """The observation that no steps are fine enough, for a warning."""
        return f"no step sizes keep the rise of {measured} within {self.settings.get('budget')}"

    @abstractmethod
    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        """Choose a step size.

        Args:
            candidates: the weights.
            memory: updated with what is learned.
            measure: None if nothing can be measured.
            state_bits: the size of the rest of the state; only a ratio needs it.

        Raises:
            PolicyError: a ratio that cannot be reached, at the first checkpoint.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ErrorTarget(Objective):
    """A relative error."""

    error: float  # The root mean square of the error in standard deviations, in the geometric mean over all weights

    @property
    def settings(self) -> dict[str, JSON]:
        return {"relative_error": self.error}

    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        log_step = to_log_step(min(max(self.error * math.sqrt(12), _MIN_STEP), _MAX_STEP))
        return _accept(_quantize(candidates, log_step, memory), memory, measure)


@dataclass(frozen=True)
class RatioTarget(Objective):
    """A compression ratio."""

    ratio: float  # How many times smaller the whole state becomes

    @property
    def settings(self) -> dict[str, JSON]:
        return {"ratio": self.ratio}

    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        low, high, target = FINE_LOG_STEP, MAX_LOG_STEP, state_bits.raw / self.ratio - state_bits.other
        if memory.log_step is not None and abs(candidates.bits(memory.log_step) - target) < 0.1 * target:
            low = high = memory.log_step
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if candidates.bits(middle) <= target else (middle + 1, high)
        if low == MAX_LOG_STEP and candidates.bits(low) > target:
            reachable = state_bits.ratio(candidates.bits(low))
            found = f"{self.ratio:g}x, but the largest steps make this state only about {reachable:.3g}x smaller"
            if state_bits.is_first:  # later ones warn: what is reachable changes during a run
                unit = 10.0 ** (math.floor(math.log10(reachable)) - 1)
                expected = f"at most {math.floor(reachable / unit) * unit:g}"  # two digits
                do = "pass a smaller ratio, or a budget with evaluate="
                raise PolicyError("ratio", found=found, expected=expected, do=do)
            warn_user(f"ratio: {found}, and are used. Pass a smaller ratio")
        return _accept(_quantize(candidates, low, memory), memory, measure)


@dataclass(frozen=True)
class LossBudget(Objective):
    """The rise of the loss that a checkpoint may cause."""

    budget: float  # In the loss's own unit; unused if `share` is given
    share: float | None = None  # In per cent of the loss itself; `in_loss_unit` converts it to a budget
    noise: float = 0.0  # Of a measurement, which is subtracted from the budget
    scale: float | None = None  # The loss; None if unknown

    @property
    def settings(self) -> dict[str, JSON]:
        return {"budget": self.budget if self.share is None else f"{self.share:g}%"}

    def in_loss_unit(self, scale: float, noise: float = 0.0) -> LossBudget:
        """The same budget in the loss's own unit.

        Args:
            scale: the loss that a share refers to.
            noise: of a measurement, in the loss's unit.
        """
        budget = self.budget if self.share is None else self.share / 100 * scale
        return LossBudget(budget, noise=noise, scale=scale)

    def after_restores(self, restored_rise: float) -> LossBudget:
        """The part of a budget in the loss's own unit that earlier restores leave."""
        return replace(self, budget=max(self.budget - restored_rise, MIN_BUDGET_SHARE * self.budget))

    def relative_budget(self, scale: float) -> float:
        """The budget as a fraction of `scale`."""
        return self.budget / scale if self.share is None else self.share / 100

    @property
    def _max_rise(self) -> float:
        """The largest measured rise that is accepted."""
        return self.budget - self.noise

    def choose(
        self, candidates: StepCandidates, memory: RunMemory, measure: Measure | None, state_bits: StateBits
    ) -> StepChoice:
        """Choose the largest steps whose measured rise is within the budget, within `MAX_TRIALS` trials.

        Where hysteresis raises the loss by too much, weights are rounded to the nearest with the same steps before
        smaller ones are tried, which cost many more bits. Without `measure` the prediction decides; without a
        prediction, the step size is `DEFAULT_LOG_STEP`.
        """
        if measure is None and candidates.no_curvature:  # a prediction in no unit decides nothing
            log_step = DEFAULT_LOG_STEP if memory.log_step is None else memory.log_step
            return _accept(candidates.quantize(log_step), RunMemory(), None)
        can_grow = memory.log_step is None
        log_step = self._initial_step(candidates, memory, is_measured=measure is not None)
        held = memory.log_step
        is_larger = measure is not None and held is not None and log_step > held and memory.quiet.are_over
        if measure is None:  # what hysteresis costs is not in the prediction
            return _accept(candidates.quantize(log_step, max_hysteresis=0.5), memory, None)
        trials: list[JSON] = []
        best: StepChoice | None = None
        limit = memory.max_hysteresis
        for _ in range(MAX_TRIALS):
            weights = candidates.quantize(log_step, max_hysteresis=limit)
            trial = self._measure_trial(weights, memory, measure, is_first=state_bits.is_first, number=len(trials))
            trials.append(trial.record)
            if is_larger and held is not None:
                is_larger = False
                # Not by a narrow margin, since few weights were held by the steps before.
                is_accepted = trial.rise <= MAX_SHARE_OF_LARGER * self._max_rise
                memory.quiet = memory.quiet.after_trial(is_accepted=is_accepted)
                if not is_accepted:
                    log_step = held
                    continue
            elif len(trials) == 1:
                noise = 2 * standard_error(trial.change.differences)
                memory.quiet = memory.quiet.after((trial.rise + noise) / self._max_rise)
            is_fallback = limit < memory.max_hysteresis
            if weights.hysteresis > 0.5 or (trial.rise <= self._max_rise and not is_fallback):
                memory.adapt_hysteresis(weights, trial.rise / self._max_rise, TARGET_SHARE)
            if trial.rise <= self._max_rise:
                best = StepChoice(weights, trials, trial.change.rise, trial.change.interval)
                log_step = self._predicted_step(candidates, memory) if can_grow else weights.log_step
                if log_step < weights.log_step + (_GROWTH_THRESHOLD if state_bits.is_first else 2):
                    return best
            elif best is not None:  # a rise of nan is not accepted either
                return best
            elif weights.hysteresis > 0.5:  # rounding to the nearest costs fewer bits than other steps
                limit, can_grow = 0.5, False
            else:
                log_step, can_grow = self._reduce_step(weights, trial.rise), False
        return best or StepChoice(None, trials)

    def scan(self, candidates: Candidates, memory: RunMemory, measure: Measure) -> StepChoice:
        """Find the largest steps whose measured rise is within the budget, from large ones down, unpredicted."""
        trials: list[JSON] = []
        best: StepChoice | None = None
        log_step, was_rejected = _FIRST_SCANNED, False
        while MIN_LOG_STEP <= log_step <= _LAST_SCANNED and len(trials) < _MAX_SCANNED:
            weights = candidates.quantize(log_step)
            change = measure(weights)
            trials.append(_trial_json(weights, memory, change.rise))
            if change.rise <= self._max_rise:
                best = StepChoice(weights, trials, change.rise, change.interval)
                if was_rejected:
                    break
                log_step += STEPS_PER_OCTAVE
            elif best is not None:
                break
            else:
                was_rejected = True
                is_far = not change.rise < _FAR * self._max_rise
                log_step -= STEPS_PER_OCTAVE if is_far else STEPS_PER_OCTAVE // 2
        return best or StepChoice(None, trials)

    def _measure_trial(
        self, weights: QuantizedWeights, memory: RunMemory, measure: Measure, number: int, *, is_first: bool
    ) -> _Trial:
        """Measure weights, and the opposite errors of those within the budget where N is uncertain; `memory` learns.

        Args:
            number: of the trial in its save.
            is_first: this is a run's first save, which has other things to find out: there the opposite errors of the
                first trial are measured alone, and only where `evaluate` has the losses of examples.
        """
        change, min_rise = measure(weights), GROW_BELOW * self.budget
        record = _trial_json(weights, memory, change.rise)
        rise = change.rise
        is_affordable = not is_first or (number == 0 and change.differences is not None)
        is_comparable = weights.hysteresis <= 0.5 or memory.terms_error >= UNKNOWN_ERROR
        if memory.needs_pair and is_comparable and rise <= self._max_rise and is_affordable:
            opposite = measure(weights, mirrored=True)
            record["opposite"] = finite_or_text(opposite.rise)
            memory.update_from_pair(weights, change, opposite, min_rise)
            if rise + standard_error(change.differences) > self._max_rise:
                rise = max(rise, (rise + opposite.rise) / 2)  # what these examples gain by chance others do not
        else:
            memory.update(weights, change, min_rise)
        return _Trial(change, rise, record)

    def _initial_step(self, candidates: StepCandidates, memory: RunMemory, *, is_measured: bool) -> int:
        """The parent's step size, unless another is clearly better; not a smaller one if the rise is measured."""
        best = self._predicted_step(candidates, memory)
        if memory.log_step is None:
            return best
        if is_measured and memory.quiet.are_over:
            return min(memory.log_step + _LARGER, MAX_LOG_STEP)
        change = min(best - memory.log_step, 2 * _CHANGE_THRESHOLD)
        if abs(change) <= _CHANGE_THRESHOLD or (is_measured and change < 0):
            return memory.log_step
        return memory.log_step + change

    def _predicted_step(self, candidates: StepCandidates, memory: RunMemory) -> int:
        """The step size whose predicted rise is `TARGET_SHARE` of the budget; without a prediction, the parent's."""
        unit = candidates.curvature_term(0) * (memory.num_terms or 0.0)
        if not 0 < unit < math.inf:
            return self._first_step if memory.log_step is None else memory.log_step
        return min(max(to_log_step(math.sqrt(TARGET_SHARE * self._max_rise / unit)), MIN_LOG_STEP), MAX_LOG_STEP)

    @property
    def _first_step(self) -> int:
        """The step size of a first trial where nothing is known of the loss but its level."""
        if self.scale is None:
            return DEFAULT_LOG_STEP
        step = to_log_step(_FIRST_STEP * (self.budget / self.scale / _FIRST_SHARE) ** _FIRST_EXPONENT)
        return min(max(step, MIN_LOG_STEP), MAX_LOG_STEP)

    def _reduce_step(self, weights: QuantizedWeights, rise: float) -> int:
        """A smaller step size after one whose rise is too large, by a factor of sqrt(2) to 8."""
        share = TARGET_SHARE * self._max_rise / rise if math.isfinite(rise) else 0.0
        change = max(-6 * _CHANGE_THRESHOLD, to_log_step(math.sqrt(max(share, 1e-9))))
        return max(MIN_LOG_STEP, weights.log_step + min(-_CHANGE_THRESHOLD, change))


def make_objective(
    budget: str | None,
    nats: float | None,
    ratio: float | None,
    relative_error: float | str | None,
    *,
    is_measured: bool,
) -> Objective:
    """The objective of arguments of `Fisher`; without any, `DEFAULT_SHARE` of a measured loss, or `DEFAULT_BUDGET`.

    Raises:
        PolicyError: an invalid argument, or more than one.
    """
    asked = {"budget": budget, "nats": nats, "ratio": ratio, "relative_error": relative_error}
    names = [name for name, value in asked.items() if value is not None]
    if len(names) > 1:
        found = " and ".join(names)
        raise PolicyError("Fisher", found=found, expected="one of them", do="pass one of them")
    if budget is not None:
        share = _parse_budget(budget)
        if not is_measured:
            found, do = f"{budget!r} of a loss that is not measured", "pass evaluate=, or nats= in the loss's own unit"
            raise PolicyError("budget", found=found, expected="evaluate=", do=do)
        return LossBudget(DEFAULT_BUDGET, 100 * share)
    if ratio is not None:
        do = "pass how many times smaller the state becomes, such as 20"
        return RatioTarget(validate.check_float("ratio", ratio, minimum=1.0, do=do))
    if relative_error is not None:
        return ErrorTarget(validate.check_fraction("relative_error", relative_error, maximum=MAX_RELATIVE_ERROR))
    if nats is None and is_measured:
        return LossBudget(DEFAULT_BUDGET, DEFAULT_SHARE)
    return LossBudget(DEFAULT_BUDGET if nats is None else validate.check_float("nats", nats))


def _parse_budget(budget: Any) -> float:
    """Read a share of the loss such as "1%" as a fraction."""
    expected, do = 'a share of the loss such as "1%"', "pass nats= for a rise in the loss's own unit"
    if not isinstance(budget, str):
        raise validate.argument_error("budget", budget, expected, do)
    if validate.parse_percent(budget) is None:
        raise validate.argument_error("budget", budget, expected, "pass a number and %")
    return validate.check_fraction("budget", budget)


def _quantize(candidates: StepCandidates, log_step: int, memory: RunMemory) -> QuantizedWeights:
    """Quantize for a target that does not depend on the rise, which is predicted only where N is known."""
    return candidates.quantize(log_step, with_curvature=memory.num_terms is not None)


def _accept(weights: QuantizedWeights, memory: RunMemory, measure: Measure | None) -> StepChoice:
    """Choose these weights whatever they do to the loss, which is measured if possible."""
    change = Degradation(math.nan) if measure is None else measure(weights)
    rise = None if measure is None else change.rise
    return StepChoice(weights, [_trial_json(weights, memory, rise)], rise, change.interval)


def _trial_json(weights: QuantizedWeights, memory: RunMemory, rise: float | None) -> dict[str, JSON]:
    """One trial as a manifest records it. Call it before `memory` learns from the rise, which is compared with it."""
    record: dict[str, JSON] = {
        "step": round(from_log_step(weights.log_step), 4),
        "hold": round(weights.hysteresis, 3),
        "curvature": None if memory.num_terms is None else memory.num_terms * weights.curvature_term,
        "slope": weights.slope_term,
        "rise": finite_or_text(rise),
    }
    if (prediction := memory.predict(weights)) is not None:
        interval: list[JSON] = [finite_or_text(end) for end in prediction.interval]
        record |= {"predicted": finite_or_text(prediction.rise), "interval": interval}
    return record
