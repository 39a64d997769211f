"""How large the steps are: three ways to ask for it, one answer."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from shrinkpoint.errors import LossWarning
from shrinkpoint.record import JSON
from shrinkpoint.schemes.fisher.drafts import Draft, Drafts, multiplier_of, size_of

LARGEST, SMALLEST = size_of(4.0), size_of(1 / 64)
"""In standard deviations, in the geometric mean over all weights. Below, most points of a keyframe are too far from
zero for a byte, and cost as much as the weights themselves."""
UNKNOWN = size_of(1.0)
"""Where nothing tells how large steps may be."""
AIM = 0.5
"""Of the budget: what steps are made for when they are changed, as predictions are."""
LOW = 0.1
"""Of the budget: a rise below it lets the next checkpoint take larger steps."""
TRIALS = 5
"""Evaluations of drafts in one save, at most; one where the steps stay as they are."""
_FINEST, _COARSEST = 2.0**-24, 2.0**6
"""Standard deviations beyond which a number of steps says nothing any more."""
_SLACK = size_of(2**0.5)
"""By how much steps may differ from the best ones before they are changed: a change costs bits."""

Measure = Callable[[Draft], float]
"""By how much a draft raises the loss."""


@dataclass
class Learned:
    """What a run teaches, and every manifest says.

    Attributes:
        size: of the steps at the checkpoint before, in eighths of an octave; None: there is none.
        terms: N of the prediction; None: not known.
    """

    size: int | None = None
    terms: float | None = None

    def hear(self, draft: Draft, rise: float, least: float) -> None:
        """N from a measured rise; not all at once, since one error of many is a matter of chance.

        The first time it is taken to be `least`, at least: then too, steps may not become too large at once. Only from
        weights that were rounded to the nearest: where some are held at their points, a checkpoint is an average over
        time, which often has a lower loss than the newest weights, and nothing of that is left with other steps.
        """
        if draft.curved <= 0 or not math.isfinite(rise) or draft.hold > 0.5:
            return
        if self.terms is None:
            self.terms = max(rise, least) / draft.curved
            return
        found = min(max(rise / draft.curved, self.terms / 2), self.terms * 2)
        self.terms = math.sqrt(self.terms * found)


@dataclass(frozen=True)
class Answer:
    """What was chosen.

    Attributes:
        draft: None: nothing that was tried is within the budget, so that nothing may be lost.
        tried: for the manifest.
        rise: of the loss, measured; None: nothing was.
    """

    draft: Draft | None
    tried: list[JSON] = field(default_factory=list)
    rise: float | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Weights that no points of this size reach, and which therefore stay exact."""
        return () if self.draft is None else self.draft.left_out


class Dial(ABC):
    """Something that was asked for."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, JSON]:
        """For the manifest."""
        raise NotImplementedError

    @abstractmethod
    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, left: float) -> Answer:
        """Choose.

        Args:
            learned: changed where something was learned.
            measure: None: nothing can be measured.
            left: bits that the weights may have, should a ratio be asked for.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ByError(Dial):
    """The root mean square of the error, in standard deviations: the geometric mean over all weights."""

    error: float

    @property
    def settings(self) -> dict[str, JSON]:
        return {"relative_error": self.error}

    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, left: float) -> Answer:
        """See `Dial`."""
        size = size_of(min(max(self.error * math.sqrt(12), _FINEST), _COARSEST))
        return _taken(drafts.draft(size), learned, measure)


@dataclass(frozen=True)
class ByRatio(Dial):
    """How many times smaller the whole state becomes."""

    ratio: float

    @property
    def settings(self) -> dict[str, JSON]:
        return {"ratio": self.ratio}

    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, left: float) -> Answer:
        """See `Dial`."""
        low, high = SMALLEST, LARGEST
        if learned.size is not None and abs(drafts.bits(learned.size) - left) < 0.1 * left:
            low = high = learned.size
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if drafts.bits(middle) <= left else (middle + 1, high)
        if low == LARGEST and drafts.bits(low) > left:
            text = f"at {self.ratio:g}x there is no room for the weights: steps are the largest there are"
            warnings.warn(text, LossWarning, stacklevel=5)
        return _taken(drafts.draft(low), learned, measure)


@dataclass(frozen=True)
class ByBudget(Dial):
    """The rise of the loss that a checkpoint may cause.

    Attributes:
        budget: in the loss's own unit.
        share: instead of that: of the loss itself, in per cent, from which `of` makes a budget.
    """

    budget: float
    share: float | None = None

    @property
    def settings(self) -> dict[str, JSON]:
        return {"budget": self.budget if self.share is None else f"{self.share:g}%"}

    def of(self, base: float) -> ByBudget:
        """The same where the state's own loss is `base`, or its score; of 1 where that is zero."""
        return self if self.share is None else ByBudget(self.share / 100 * (abs(base) or 1.0))

    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, left: float) -> Answer:
        """See `Dial`. Without `measure` the prediction decides, and where there is none either, `UNKNOWN`."""
        if measure is None and drafts.supposed:  # a prediction in no unit decides nothing
            return _taken(drafts.draft(UNKNOWN if learned.size is None else learned.size), Learned(), None)
        size, free = self._first(drafts, learned, measured=measure is not None), learned.size is None
        if measure is None:
            return _taken(drafts.draft(size), learned, None)
        tried: list[JSON] = []
        held: Answer | None = None
        for _ in range(TRIALS):
            draft = drafts.draft(size)
            rise = measure(draft)
            tried.append(_line(draft, learned, rise))
            learned.hear(draft, rise, LOW * self.budget)
            if rise <= self.budget:
                held = Answer(draft, tried, rise)
                size = self._best(drafts, learned) if free else draft.size
                if size <= draft.size + 1:
                    return held
            elif held is not None:  # nan, too, is too much
                return held
            else:
                size, free = self._smaller(draft, rise), False
        return held or Answer(None, tried)

    def _first(self, drafts: Drafts, learned: Learned, *, measured: bool) -> int:
        """The steps of the checkpoint before, unless others are clearly better; not smaller ones if measured."""
        best = self._best(drafts, learned)
        if learned.size is None:
            return best
        change = min(best - learned.size, 2 * _SLACK)
        if abs(change) <= _SLACK or (measured and change < 0):
            return learned.size
        return learned.size + change

    def _best(self, drafts: Drafts, learned: Learned) -> int:
        """What the prediction says; without one, the steps of the checkpoint before."""
        unit = drafts.curved(0) * (learned.terms or 0.0)
        if not 0 < unit < math.inf:
            return UNKNOWN if learned.size is None else learned.size
        return min(max(size_of(math.sqrt(AIM * self.budget / unit)), SMALLEST), LARGEST)

    def _smaller(self, draft: Draft, rise: float) -> int:
        share = AIM * self.budget / rise if math.isfinite(rise) else 0.0
        return max(SMALLEST, draft.size + min(-_SLACK, max(-6 * _SLACK, size_of(math.sqrt(max(share, 1e-9))))))


def _taken(draft: Draft, learned: Learned, measure: Measure | None) -> Answer:
    """A draft that is taken whatever it does to the loss."""
    rise = None if measure is None else measure(draft)
    return Answer(draft, [_line(draft, learned, rise)], rise)


def _line(draft: Draft, learned: Learned, rise: float | None) -> JSON:
    """What a manifest says of a draft; the prediction is that from before it was measured."""
    predicted = None if learned.terms is None else learned.terms * draft.curved
    return {
        "step": round(multiplier_of(draft.size), 4), "hold": round(draft.hold, 3), "curvature": predicted,
        "slope": draft.slope, "rise": finite(rise),
    }  # fmt: skip


def finite(rise: float | None) -> JSON:
    """A rise as a manifest can say it."""
    return rise if rise is None or math.isfinite(rise) else str(rise)
