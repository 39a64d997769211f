"""Whether `evaluate` can be trusted: is its answer finite, does it repeat it, does it look at what it is given?"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import dither
from shrinkpoint.schemes.picks import Picks
from shrinkpoint.schemes.quality import Quality, Reading, Values, scale_of
from shrinkpoint.state import FlatState

Make = Callable[[], Values]
Together = Callable[[Callable[[], Any]], list[Any]]
"""What each of several processes computed, on all of them; of one process, what it did."""

REPEAT = 16
"""Saves after which an `evaluate` that has always repeated itself is asked twice again."""
NOTICED = 0.25
"""Of what may be lost: noise above it is said aloud."""
STEADY = "fix its batches and its seed, and call model.eval()"
"""What to do about noise."""
_CLEAR = 2.0
"""Times the noise by which an answer for other weights differs at least, where there is noise."""
BEYOND = 1.25
"""Times what may be lost: an interval that reaches further is that of too few examples. A search goes to the limit, so
that the interval around what it chooses always reaches a little beyond."""
_KEPT = 0.9
"""Of what noise was, where answers differ less now: one bad moment is not to make a whole run lossless."""
_MORE = 3
"""Further answers for the same weights, the first time, where noise is worth a word."""
_WIDE = math.sqrt(12.0)
"""Of a deviation: the width of evenly distributed noise of one deviation."""


@dataclass(frozen=True)
class Problem:
    """Why nothing may be lost.

    Attributes:
        found: what `evaluate` did.
        do: what the reader of this can do about it.
    """

    found: str
    do: str


class Calibration:
    """What a run knows of its `evaluate`; forgotten where the run goes on from a checkpoint.

    Attributes:
        noise: the largest difference seen between answers for the same weights, relative to these, forgotten by and by;
            None: not known.
        reacts: whether clearly different weights were seen to have another answer.
        saves: that were measured.
    """

    def __init__(self) -> None:
        self.noise: float | None = None
        self.reacts, self.saves = False, 0
        self._examples, self._is_doubted = 0, False

    @property
    def known(self) -> tuple[float | None, bool, int]:
        """All of it, to be compared with what other processes know."""
        return self.noise, self.reacts, self.saves

    def learn(self, known: tuple[float | None, bool, int] | None) -> None:
        """Take what is known elsewhere; None: nothing."""
        self.noise, self.reacts, self.saves = known or (None, False, 0)

    def problem(
        self, quality: Quality, others: Sequence[Make], allowed: Callable[[float], float] | None = None,
        together: Together = lambda compute: [compute()],
    ) -> Problem | None:  # fmt: skip
        """Measure the unchanged weights, which is `quality.base` from then on, and say why nothing may be lost.

        The first time, `evaluate` is called twice, and then with clearly different weights, one set after the other
        until it answers something else.

        Args:
            others: each makes such weights.
            allowed: by how much an answer may become worse, relative to its `scale`, of which this is a function;
                None: nobody said.
            together: replicas each measure, and all decide from what all of them found.

        Returns:
            None where `evaluate` can be trusted.
        """
        mine: list[Reading] = []

        def ask() -> list[float]:
            mine[:] = self._repeated(quality, allowed)
            return [one.value for one in mine]

        values = [value for told in together(ask) for value in told]
        broken = next((one for one in values if not math.isfinite(one)), None)
        if broken is not None:
            return Problem(f"evaluate returned {broken} for the state itself", "see whether training has diverged")
        quality.base = _middle(mine, values)
        self._examples = 0 if quality.base.examples is None else quality.base.examples.numel()
        spread, kept = (max(values) - min(values)) / quality.scale, _KEPT if len(mine) > 1 else 1.0
        self.noise = max(kept * (self.noise or 0.0), spread)
        self.saves += 1
        least = math.inf if allowed is None else allowed(quality.scale)
        if 0 < least <= self.noise:
            return Problem(f"{self.differs}, and only {least:.2%} may be lost", STEADY)
        self.reacts = self.reacts or self._sees(quality, others, together)
        if not self.reacts:
            found = f"evaluate returns {quality.base.value:g} for clearly different weights as well"
            do = "let it measure the model, or the state, that it is given, each time anew, on enough examples"
            return Problem(found, do)
        return None

    @property
    def differs(self) -> str:
        """The noise in words."""
        return f"evaluate differs by {self.noise or 0.0:.2%} between calls with the same weights"

    def warning(self, allowed: float) -> str:
        """What to say of noise where so much may be lost, relative to the answer; "": nothing."""
        if self.noise is None or self.noise <= NOTICED * allowed:
            return ""
        return f"{self.differs}, which is much where {allowed:.2%} may be lost, and is taken off that: {STEADY}"

    def doubt(self, rise: float, interval: tuple[float, float], allowed: float) -> str:
        """What to say, once in a run, where there are too few examples for what is allowed; "": nothing.

        Args:
            rise, interval, allowed: all relative to the answer for the state.
        """
        if self._is_doubted or interval[1] <= BEYOND * allowed:
            return ""
        self._is_doubted = True
        ends = " to ".join(f"{end:+.2%}" for end in interval)
        return (
            f"evaluate measures a rise of {rise:+.2%} on {self._examples} examples (95 % confidence: {ends}), "
            f"so on others it may be above the {allowed:.2%} that is allowed: let it measure more of them"
        )

    def _repeated(self, quality: Quality, allowed: Callable[[float], float] | None) -> list[Reading]:
        """Answers for the unchanged weights: two, where noise is not known or counts; more, where these differ."""
        found = [quality.measure({})]
        if not found[0].is_finite:
            return found
        counts = 0.0 if allowed is None else NOTICED * allowed(scale_of(found[0].value))
        if self.noise is None or self.saves % REPEAT == 0 or self.noise > counts / 4:
            found.append(quality.measure({}))
        if len(found) == 2 and found[1].is_finite and not found[1].is_as(found[0]):
            found.append(quality.measure({}))
            values = [one.value for one in found]
            if self.noise is None and max(values) - min(values) > counts * scale_of(values[0]):
                found += [quality.measure({}) for _ in range(_MORE)]
        return found

    def _sees(self, quality: Quality, others: Sequence[Make], together: Together) -> bool:
        """Whether `evaluate` answers something else, on every process, for one of several sets of other weights."""
        clear = _CLEAR * (self.noise or 0.0) * quality.scale

        def differs(make: Make) -> bool:
            found = quality.measure(make())
            if not found.is_finite:
                return True
            apart = abs(found.value - quality.base.value)
            return apart > clear if clear > 0 else not found.is_as(quality.base)

        return any(all(together(lambda make=make: differs(make))) for make in others)  # type: ignore[misc]


def disturbed(picks: Picks, flat: FlatState, title: Callable[[str], str] = str) -> tuple[Make, ...]:
    """Makers of clearly different weights, for those that were picked: with noise of one deviation, and zeros.

    Args:
        title: of a whole weight; its boxes, and copies of these, get noise of the same seed.
    """

    def noise() -> Values:
        return {name: _noisy(x, zlib.crc32(title(name).encode())) for name, x in picks.tensors.items()}

    def zeros() -> Values:
        return {name: torch.zeros_like(x) for name, x in picks.tensors.items()}

    return lambda: picks.replaced(noise(), flat), lambda: picks.replaced(zeros(), flat)


def _noisy(x: Tensor, seed: int) -> Tensor:
    """Where all values are the same, noise is as large as they are; 1, where these are zero."""
    plain = x.detach().to(torch.float32)
    spread = float(plain.std(correction=0)) if x.numel() else 0.0
    if not 0 < spread < math.inf:
        spread = abs(float(plain.reshape(-1)[0])) if x.numel() else 0.0
    width = _WIDE * spread if 0 < spread < math.inf else 1.0
    noise = dither(seed, (1, x.numel()), x.device).reshape(x.shape)
    return (plain + width * noise).to(x.dtype)


def _middle(mine: Sequence[Reading], values: Sequence[float]) -> Reading:
    """The median of all answers; with examples only where all are alike, for else these are not the same ones."""
    first = mine[0]
    alike = all(one.is_as(first) for one in mine) and all(value == first.value for value in values)
    return first if alike else Reading(statistics.median(values))
