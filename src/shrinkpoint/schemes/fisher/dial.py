"""How large the steps are: three ways to ask for it, one answer."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.record import JSON
from shrinkpoint.schemes.fisher.drafts import Draft, Drafts, multiplier_of, size_of
from shrinkpoint.schemes.quality import Change

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

Measure = Callable[[Draft], Change]
"""What a draft does to the loss."""


@dataclass(frozen=True)
class Room:
    """Bits of a whole state.

    Attributes:
        raw: as it is.
        taken: by all that is stored but the weights.
        first: whether this is the first checkpoint of a run.
    """

    raw: float
    taken: float
    first: bool

    def left(self, ratio: float) -> float:
        """For the weights, where the whole is to be so many times smaller."""
        return self.raw / ratio - self.taken

    def ratio(self, bits: float) -> float:
        """Where the weights have so many."""
        return self.raw / max(1.0, self.taken + bits)


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
        interval: in which the rise may lie on other examples; None: not known.
    """

    draft: Draft | None
    tried: list[JSON] = field(default_factory=list)
    rise: float | None = None
    interval: tuple[float, float] | None = None

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
    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, room: Room) -> Answer:
        """Choose.

        Args:
            learned: changed where something was learned.
            measure: None: nothing can be measured.
            room: what else is stored, should a ratio be asked for.

        Raises:
            PolicyError: a ratio that cannot be reached, at the first checkpoint.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ByError(Dial):
    """The root mean square of the error, in standard deviations: the geometric mean over all weights."""

    error: float

    @property
    def settings(self) -> dict[str, JSON]:
        return {"relative_error": self.error}

    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, room: Room) -> Answer:
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

    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, room: Room) -> Answer:
        """See `Dial`."""
        low, high, left = SMALLEST, LARGEST, room.left(self.ratio)
        if learned.size is not None and abs(drafts.bits(learned.size) - left) < 0.1 * left:
            low = high = learned.size
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if drafts.bits(middle) <= left else (middle + 1, high)
        if low == LARGEST and drafts.bits(low) > left:
            self._refuse(room.ratio(drafts.bits(low)), room.first)
        return _taken(drafts.draft(low), learned, measure)

    def _refuse(self, reachable: float, first: bool) -> None:
        """A run that has been going on is not ended by it: what it holds changes, and so does what can be reached."""
        found = f"{self.ratio:g}x, while the largest steps there are make this state about {reachable:.3g}x smaller"
        if first:
            expected, do = f"at most {_floor(reachable):g}", "ask for less, or for a budget with evaluate="
            raise PolicyError("ratio", found=found, expected=expected, do=do)
        warnings.warn(f"ratio: {found}: these are taken", LossWarning, stacklevel=6)


@dataclass(frozen=True)
class ByBudget(Dial):
    """The rise of the loss that a checkpoint may cause.

    Attributes:
        budget: in the loss's own unit.
        share: instead of that: of the loss itself, in per cent, from which `of` makes a budget.
        noise: of a measurement; it counts against the budget.
    """

    budget: float
    share: float | None = None
    noise: float = 0.0

    @property
    def settings(self) -> dict[str, JSON]:
        return {"budget": self.budget if self.share is None else f"{self.share:g}%"}

    def of(self, scale: float, noise: float = 0.0) -> ByBudget:
        """The same in the loss's own unit.

        Args:
            scale: what a share is of.
            noise: of a measurement.
        """
        return ByBudget(self.budget if self.share is None else self.share / 100 * scale, noise=noise)

    def relative(self, scale: float) -> float:
        """The share of `scale` that may be lost."""
        return self.budget / scale if self.share is None else self.share / 100

    @property
    def _allowed(self) -> float:
        """What a measured rise may be."""
        return self.budget - self.noise

    def turn(self, drafts: Drafts, learned: Learned, measure: Measure | None, room: Room) -> Answer:
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
            change = measure(draft)
            tried.append(_line(draft, learned, change.rise))
            learned.hear(draft, change.rise, LOW * self.budget)
            if change.rise <= self._allowed:
                held = Answer(draft, tried, change.rise, change.interval)
                size = self._best(drafts, learned) if free else draft.size
                if size <= draft.size + 1:
                    return held
            elif held is not None:  # nan, too, is too much
                return held
            else:
                size, free = self._smaller(draft, change.rise), False
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
        return min(max(size_of(math.sqrt(AIM * self._allowed / unit)), SMALLEST), LARGEST)

    def _smaller(self, draft: Draft, rise: float) -> int:
        share = AIM * self._allowed / rise if math.isfinite(rise) else 0.0
        return max(SMALLEST, draft.size + min(-_SLACK, max(-6 * _SLACK, size_of(math.sqrt(max(share, 1e-9))))))


def _taken(draft: Draft, learned: Learned, measure: Measure | None) -> Answer:
    """A draft that is taken whatever it does to the loss."""
    change = Change(math.nan) if measure is None else measure(draft)
    rise = None if measure is None else change.rise
    return Answer(draft, [_line(draft, learned, rise)], rise, change.interval)


def _floor(ratio: float) -> float:
    """Two digits of it, rounded down."""
    unit = 10.0 ** (math.floor(math.log10(ratio)) - 1)
    return math.floor(ratio / unit) * unit


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
