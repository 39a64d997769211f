"""Learns the factor of the predicted rise of a run's loss, and how far it can be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from shrinkpoint.schemes.evaluate import Degradation
from shrinkpoint.schemes.fisher.rounding import MAX_HYSTERESIS
from shrinkpoint.schemes.fisher.steps import QuantizedWeights
from shrinkpoint.sharding.collectives import Collectives
from shrinkpoint.tensors.info import JSON

UNKNOWN_ERROR = 1.0
"""The deviation of ln N where no pair was measured: of what a framework counted, or one rise taught."""
MAX_TERMS_ERROR = 0.5
"""The deviation of ln N from which a pair of opposite errors is measured, which costs one evaluation."""
_SINGLE_ERROR = 0.7
"""The deviation of ln (rise / predicted) of single rises, which the slope of the loss is part of."""
_PAIR_ERROR = 0.3
"""The same of pairs, which have no slope."""
_MIN_EXCESS = 1 / 64
"""The excess of hysteresis over rounding to the nearest, in steps, at which it begins to grow again."""
_DRIFT = 0.15
"""The largest change of ln N from one save to the next."""
_NORMAL_QUANTILE = 1.645
_CLEAR = 2.0
"""Standard errors above which a rise is not chance."""
_HELD_ERROR = 1.0
"""The deviation of rise / predicted that is assumed of weights with hysteresis, worth `_HELD_WEIGHT` measurements."""
_HELD_WEIGHT = 2.0
_MAX_RATIO = 1e4
"""Ratios of measured and predicted rises beyond it say no more: training has diverged, or the prediction is none."""
MIN_PATIENCE = 4
"""Saves in a row whose rises are far below the budget, before larger steps are tried the first time."""
_MAX_PATIENCE = 256
_QUIET_SHARE = 0.1
_MIN_INTERVALS = 4.0
"""Least ratio of the updates between two saves to those that a restore may lose."""
_HELD_DECAY = 0.8
"""The weight of what earlier saves have shown, relative to that of the next one."""


@dataclass
class HeldRatios:
    """The rise of weights with hysteresis, as a multiple of the predicted one: its weighted mean and variance.

    Such a checkpoint is an average over time. Its rise is often negative, so that its logarithm cannot be learned.
    """

    weight: float = 0.0
    mean: float = 1.0
    scatter: float = 0.0

    def add(self, ratio: float) -> None:
        """Take a measured ratio into account."""
        ratio = min(max(ratio, -_MAX_RATIO), _MAX_RATIO)
        before = self.weight * _HELD_DECAY
        self.weight = before + 1.0
        change = ratio - self.mean
        self.mean += change / self.weight
        self.scatter = self.scatter * _HELD_DECAY + change * change * before / self.weight

    @property
    def deviation(self) -> float:
        """The deviation of the next ratio from the mean."""
        variance = (self.scatter + _HELD_WEIGHT * _HELD_ERROR**2) / (self.weight + _HELD_WEIGHT)
        return math.sqrt(variance * (1 + 1 / (self.weight + _HELD_WEIGHT)))


@dataclass(frozen=True)
class QuietSaves:
    """Counts the saves whose rises are far below the budget, after which larger steps are tried.

    Steps that were made smaller in a bad moment would otherwise stay for the rest of the chain: of weights with
    hysteresis, N is not learned.
    """

    count: int = 0  # Saves in a row
    patience: int = MIN_PATIENCE  # Saves after which larger steps are tried; twice as many after each trial that failed

    @property
    def are_over(self) -> bool:
        return self.count >= self.patience

    def after(self, share: float) -> QuietSaves:
        """The same after a save whose rise was this share of what is allowed, noise included."""
        return replace(self, count=self.count + 1 if share < _QUIET_SHARE else 0)

    def after_trial(self, *, is_accepted: bool) -> QuietSaves:
        """The same after larger steps were tried."""
        return QuietSaves(0, MIN_PATIENCE // 2 if is_accepted else min(2 * self.patience, _MAX_PATIENCE))


@dataclass(frozen=True)
class Progress:
    """The gain of training between saves; it says what a restore without first moments would lose."""

    updates: int | None = None  # Of the optimizer at the last save; None if unknown
    interval: int | None = None  # Updates between the last two saves; None if unknown
    quality: float | None = None  # The loss that was measured last, or minus the score; None if none was
    measured_at: int | None = None  # Updates when it was
    gain: float | None = None  # The fall of the loss in an update, between the last two measurements; None if unknown

    def after(self, updates: int | None, quality: float | None) -> Progress:
        """The progress at the next save.

        Args:
            updates: of the optimizer; None if it counts none.
            quality: the loss, or minus the score, in its own unit; None if it was not measured.
        """
        if updates is None:
            return Progress()
        if updates == self.updates:  # nothing was trained
            return self
        known = self.updates is not None and updates > self.updates
        interval = updates - self.updates if known and self.updates is not None else None
        if quality is None or not math.isfinite(quality):
            return replace(self, updates=updates, interval=interval)
        gain = None
        if self.quality is not None and self.measured_at is not None and updates > self.measured_at:
            gain = (self.quality - quality) / (updates - self.measured_at)
        return Progress(updates, interval, quality, updates, gain)

    def affords(self, steps: float, restores: int, budget: float) -> bool:
        """True if every restore may lose so many steps of training.

        That is so where a run that is killed at any moment loses more by the steps since its last save, and where all
        restores together raise the loss by no more than half the budget.

        Args:
            steps: that a restore loses.
            restores: that have lost them already.
            budget: in the loss's own unit.
        """
        if self.interval is None or self.gain is None or self.interval <= _MIN_INTERVALS * steps:
            return False
        return self.gain * steps * (restores + 1) <= budget / 2

    def to_json(self) -> list[JSON]:
        """The fields in their order."""
        return [self.updates, self.interval, self.quality, self.measured_at, self.gain]

    @classmethod
    def from_json(cls, value: JSON) -> Progress:
        """The progress that a manifest records; none where it is of no use."""
        if not isinstance(value, list) or len(value) != 5:
            return cls()
        counts = [x if type(x) is int and 0 <= x < 1 << 62 else None for x in value]
        numbers = [x if isinstance(x, float) and math.isfinite(x) else None for x in value]
        return cls(counts[0], counts[1], numbers[2], counts[3], numbers[4])


@dataclass(frozen=True)
class Prediction:
    """Forecast of the next measurement of a rise."""

    rise: float  # In the loss's unit
    interval: tuple[float, float]  # In which it lies in nine of ten cases, as far as is known


@dataclass
class RunMemory:
    """State that is learned during a run and recorded in every manifest.

    Attributes:
        log_step: the step size of the parent checkpoint, in eighths of an octave; None if there is none.
        num_terms: N of the predicted rise; None if unknown.
        terms_error: the standard deviation of ln N.
        max_hysteresis: up to which a save begins, in steps: less after one whose rise was too large.
        held: what weights with hysteresis have cost.
        noise: the standard error of the last measured rise.
        slope: what the slope of the loss added to a rise, in roots of the curvature term; 0 if unknown.
        quiet: how long rises have been far below the budget.
        restored_rise: what earlier restores have left of the budget's rise, in the loss's own unit.
        progress: what training gains between saves.
        peak_lr: the largest learning rate that was seen.
    """

    log_step: int | None = None
    num_terms: float | None = None
    terms_error: float = UNKNOWN_ERROR
    max_hysteresis: float = MAX_HYSTERESIS
    held: HeldRatios = field(default_factory=HeldRatios)
    noise: float = 0.0
    slope: float = 0.0
    quiet: QuietSaves = field(default_factory=QuietSaves)
    restored_rise: float = 0.0
    progress: Progress = field(default_factory=Progress)
    peak_lr: float = 0.0

    @property
    def needs_pair(self) -> bool:
        """True if N is so uncertain that a pair of opposite errors is worth an evaluation."""
        return self.num_terms is None or self.terms_error > MAX_TERMS_ERROR

    def begin_save(self) -> None:
        """Trust N a little less: the curvature of the loss changes during training."""
        self.terms_error = min(math.hypot(self.terms_error, _DRIFT), UNKNOWN_ERROR)

    def synchronize(self, ranks: Collectives, num_terms: float | None) -> None:
        """Forget what ranks remember differently. A collective.

        Args:
            num_terms: N where none is known.
        """
        learned = self.num_terms, self.terms_error, self.held, self.quiet
        own = self.log_step, self.max_hysteresis, self.restored_rise, self.progress, learned, self.peak_lr
        *by_field, rates = zip(*ranks.all_gather(own), strict=True)
        log_step, hysteresis, rise, progress, agreed = (x[0] if x.count(x[0]) == len(x) else None for x in by_field)
        self.log_step, self.max_hysteresis = log_step, hysteresis or MAX_HYSTERESIS
        self.restored_rise, self.progress, self.peak_lr = rise or 0.0, progress or Progress(), max(rates)
        unknown = None, UNKNOWN_ERROR, HeldRatios(), QuietSaves()
        self.num_terms, self.terms_error, self.held, self.quiet = agreed or unknown
        self.num_terms = self.num_terms or num_terms

    def set_terms(self, num_terms: float) -> None:
        """Take an N that was measured by other means than those of this class, unless one is known."""
        if self.num_terms is None:
            self.num_terms, self.terms_error = num_terms, _PAIR_ERROR

    def predict(self, weights: QuantizedWeights) -> Prediction | None:
        """The rise that these weights will cause; None if N is unknown."""
        if self.num_terms is None:
            return None
        level = self.num_terms * weights.curvature_term
        noise = _NORMAL_QUANTILE * math.hypot(self.noise, self.slope * math.sqrt(max(weights.curvature_term, 0.0)))
        if weights.hysteresis > 0.5:
            spread = math.hypot(_NORMAL_QUANTILE * self.held.deviation * level, noise)
            rise = self.held.mean * level
            return Prediction(rise, (rise - spread, rise + spread))
        factor = math.exp(_NORMAL_QUANTILE * math.hypot(self.terms_error, _SINGLE_ERROR))
        return Prediction(level, (level / factor - noise, level * factor + noise))

    def update(self, weights: QuantizedWeights, change: Degradation, min_rise: float) -> None:
        """Learn from a measured rise.

        Of weights that are rounded to the nearest, N is learned by at most a factor of 2, since a single rise is noisy.
        The first time, the rise counts as at least `min_rise`, so that steps do not become too large at once. Of
        weights with hysteresis it is not: such a checkpoint often has a lower loss than the newest weights, and other
        steps lose that.

        Args:
            change: of the loss, measured with `weights`.
            min_rise: in the same unit.
        """
        rise, term = change.rise, weights.curvature_term
        self.noise = standard_error(change.differences)
        if term <= 0 or not math.isfinite(rise):
            return
        predicted = None if self.num_terms is None else self.num_terms * term
        if predicted is None:
            if weights.hysteresis <= 0.5:
                self._set(max(rise, min_rise) / term, UNKNOWN_ERROR)
        elif not 0 < predicted < math.inf:
            return
        elif weights.hysteresis > 0.5:
            self.held.add(rise / predicted)
        else:
            if rise > 0 and abs(rise - predicted) > _CLEAR * self.noise:
                self._doubt(rise / predicted, _SINGLE_ERROR)
            ratio = min(max(rise / predicted, 0.5), 2.0)
            self._learn(ratio, math.hypot(_SINGLE_ERROR, self.noise / predicted))

    def update_from_pair(
        self, weights: QuantizedWeights, change: Degradation, opposite: Degradation, min_rise: float
    ) -> None:
        """Learn N from the rises of two errors of opposite signs, whose mean has no part from the slope of the loss.

        Where that mean is not clearly positive, N becomes at most what is just compatible with it.
        """
        rise, term = (change.rise + opposite.rise) / 2, weights.curvature_term
        if term <= 0 or not math.isfinite(rise):
            return
        self.noise, noise = standard_error(change.differences), 0.0
        slope = abs(change.rise - opposite.rise) / 2 / math.sqrt(term)
        self.slope = slope if math.isfinite(slope) else 0.0
        if change.differences is not None and opposite.differences is not None:
            noise = standard_error((change.differences + opposite.differences) / 2)
        if rise <= _CLEAR * noise:
            highest = max(rise + _CLEAR * noise, min_rise) / term
            highest = highest if self.num_terms is None else min(self.num_terms, highest)
            self._set(highest, min(self.terms_error, _PAIR_ERROR))  # another pair would soon say no more
            return
        error = math.hypot(_PAIR_ERROR, noise / rise)
        predicted = None if self.num_terms is None else self.num_terms * term
        if predicted is None or not 0 < predicted < math.inf:
            self._set(rise / term, error)
        else:
            ratio = min(max(rise / predicted, 1 / _MAX_RATIO), _MAX_RATIO)
            self._doubt(ratio, error)
            self._learn(ratio, error)

    def _set(self, num_terms: float, error: float) -> None:
        """Take an N that is a number; others, which rounding makes of extreme rises, say nothing."""
        if 0 < num_terms < math.inf:
            self.num_terms, self.terms_error = num_terms, min(error, UNKNOWN_ERROR)

    def _doubt(self, ratio: float, error: float) -> None:
        """Trust N less where a measured ratio is further from 1 than both errors explain: training has changed."""
        excess = math.log(min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)) ** 2 - error**2
        if excess > self.terms_error**2:
            self.terms_error = min(math.sqrt(excess), UNKNOWN_ERROR)

    def _learn(self, ratio: float, error: float) -> None:
        """Multiply N by a measured ratio, as far as that is more certain than N: a Kalman filter of ln N."""
        assert self.num_terms is not None
        share = self.terms_error**2 / (self.terms_error**2 + error**2)
        self._set(self.num_terms * ratio**share, self.terms_error)
        self.terms_error *= math.sqrt(1 - share)

    def adapt_hysteresis(self, weights: QuantizedWeights, share: float, target: float) -> None:
        """Let the next save begin with less hysteresis if this one was too much of it, and with more if all is well.

        Args:
            share: the rise of the loss that was measured with `weights`, as a share of what is allowed.
            target: the share below which all is well.
        """
        excess = weights.hysteresis - 0.5
        if not share <= 1:  # nan is too much
            self.max_hysteresis = 0.5 + excess / 2
        elif share < target:
            self.max_hysteresis = min(MAX_HYSTERESIS, 0.5 + max(2 * (self.max_hysteresis - 0.5), _MIN_EXCESS))

    def to_json(self) -> dict[str, JSON]:
        """The entries of a manifest from which `from_json` continues."""
        held = self.held
        return {
            "terms": self.num_terms,
            "terms_error": self.terms_error,
            "size": self.log_step,
            "held": [held.weight, held.mean, held.scatter],
            "slope_scale": self.slope,
            "quiet": [self.quiet.count, self.quiet.patience],
            "restored_rise": self.restored_rise,
            "progress": self.progress.to_json(),
            "peak_lr": self.peak_lr,
        }

    @classmethod
    def from_json(cls, loss: dict[str, JSON], num_terms: float | None) -> RunMemory:
        """The memory that a manifest records, after a restore. Any entry may be missing or of no use.

        Args:
            num_terms: N where none is recorded.
        """
        memory = cls(num_terms=num_terms)
        log_step, terms, error, held = (loss.get(key) for key in ("size", "terms", "terms_error", "held"))
        if type(log_step) is int and abs(log_step) < 1 << 10:
            memory.log_step = log_step
        if isinstance(terms, float) and 0 < terms < math.inf:
            memory.num_terms = terms
            if isinstance(error, float) and 0 < error <= UNKNOWN_ERROR:
                memory.terms_error = error
        if isinstance(slope := loss.get("slope_scale"), float) and 0 <= slope < math.inf:
            memory.slope = slope
        if isinstance(held, list) and len(held) == 3 and all(isinstance(x, float) and math.isfinite(x) for x in held):
            weight, mean, scatter = (float(x) for x in held if isinstance(x, float))
            if weight >= 0 and scatter >= 0:
                memory.held = HeldRatios(weight, mean, scatter)
        quiet = loss.get("quiet")
        if isinstance(quiet, list) and len(quiet) == 2:
            count, patience = (min(n, _MAX_PATIENCE) if type(n) is int and n > 0 else 0 for n in quiet)
            memory.quiet = QuietSaves(count, max(MIN_PATIENCE // 2, patience))
        if isinstance(peak := loss.get("peak_lr"), float) and 0 <= peak < math.inf:
            memory.peak_lr = peak
        memory.restored_rise, memory.progress = rise_after_restore(loss), Progress.from_json(loss.get("progress"))
        return memory


def rise_after_restore(loss: dict[str, JSON]) -> float:
    """The rise of the loss in a state that is restored, beside a run that was never restored; in the loss's own unit.

    Args:
        loss: of the manifest that is restored, in which any entry may be missing or of no use. Where the rise was not
            measured, the predicted one counts.
    """
    own = None
    if loss.get("chosen") is not None:
        trials = loss.get("tried")
        last = trials[-1] if isinstance(trials, list) and trials else None
        own = last.get("predicted") if loss.get("rise") is None and isinstance(last, dict) else loss.get("rise")
    known = [x for x in (loss.get("restored_rise"), own) if isinstance(x, float) and math.isfinite(x)]
    return max(0.0, sum(known))


def standard_error(differences: Tensor | None) -> float:
    """Standard error of the mean of differences of examples; 0 if there are fewer than two."""
    if differences is None or differences.numel() < 2:
        return 0.0
    return float(differences.std()) / math.sqrt(differences.numel())
