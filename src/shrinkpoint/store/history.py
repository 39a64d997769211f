"""The order in which the checkpoints of a run were saved, and which of them its present line of history left behind.

A run that goes back from step 3000 to step 2000 and saves step 2100 has two lines: 3000 was saved earlier and has the
higher step. Clocks do not tell which is newer, since a clock may go back. So each checkpoint has a number, higher than
all numbers that were there when it was saved (`sequence`), and the ranges of numbers that its line left behind
(`abandoned`). An ordinary run numbers its checkpoints by their steps, and so do files of earlier releases. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from shrinkpoint.errors import warn_user
from shrinkpoint.store.manifest import Manifest, Ranges

T = TypeVar("T")
_log = logging.getLogger("shrinkpoint")


class Place(NamedTuple):
    """The place of a checkpoint in the history of its run."""

    sequence: int  # higher means saved later
    abandoned: Ranges = ()  # first and last number of each range of checkpoints that its line left behind, rising


def place_of(manifest: Manifest[int | None]) -> Place:
    return Place(manifest.sequence, manifest.abandoned)


def is_abandoned(place: Place, newest: Place) -> bool:
    """True if the line that ends with `newest` left a checkpoint behind."""
    return any(low <= place.sequence <= high for low, high in newest.abandoned)


def newest_place(places: Iterable[Place]) -> Place:
    """The place of the checkpoint that was saved last."""
    return max(places, key=lambda place: place.sequence, default=Place(-1))


def oldest_first(
    items: Iterable[T], place: Callable[[T], Place], *, counts: Callable[[T], bool] = lambda item: True
) -> list[T]:
    """Sort checkpoints by age: first those that the present line left behind, then those of the line, newest last.

    Args:
        place: returns the place of one of them; of two with one number the later one in `items` is the newer.
        counts: False for one that cannot be the newest of the run, such as a forgotten one.
    """
    rising = sorted(items, key=lambda item: place(item).sequence)
    newest = newest_place(place(item) for item in rising if counts(item))
    return sorted(rising, key=lambda item: not is_abandoned(place(item), newest))


@dataclass
class Line:
    """The line of history on which this process saves the checkpoints of a run."""

    place: Place | None = None  # of the checkpoint that was saved or restored last; None: not known
    step: int | None = None  # at which this process saved it; None: it was restored, or others may have saved since
    # Steps and places of checkpoints in the mirror at the last restore, by name
    mirrored: Mapping[str, tuple[int | None, Place]] = field(default_factory=dict)
    _higher: tuple[str, ...] = ()  # names of checkpoints of the line with higher steps than the next one
    _has_warned: bool = False

    def note_restored(self, place: Place | None) -> None:
        self.place, self.step = place, None

    def next_place(self, step: int | None, read_others: Callable[[], Others]) -> Place:
        """The place of a checkpoint that is about to be saved.

        Args:
            read_others: reads what else there is of the run; called only if it may have changed.
        """
        self._higher = ()
        if self.place is not None and self.step is not None and step is not None and self.step < step:
            return Place(max(step, self.place.sequence + 1), self.place.abandoned)
        others = read_others()
        others = others._replace(by_name={**self.mirrored, **others.by_name})
        place = next_place(others.by_name.values(), step, self.place, others.hidden)
        newest = newest_place(other for _, other in others.by_name.values())
        self._higher = tuple(
            name
            for name, (other_step, other) in others.by_name.items()
            if (other_step or 0) > (step or 0) and not is_abandoned(other, newest)
        )
        return place

    def note_saved(self, place: Place, step: int | None, where: str, name: str) -> None:
        """Go on from a checkpoint that was saved; warn once if it was saved below the newest step.

        Where warnings are errors, the text is logged instead: the save is no failure.
        """
        self.place, self.step = place, step
        higher = self._higher
        if not higher or self._has_warned:
            return
        self._has_warned = True
        names = ", ".join(higher if len(higher) < 6 else [*higher[:2], "...", higher[-1]])
        text = (
            f"{where}: {name} was saved below {names}: a restore takes the checkpoint saved last, and retention counts "
            "the others as older"
        )
        try:
            warn_user(text, UserWarning)
        except UserWarning:
            _log.warning("%s", text)


class Others(NamedTuple):
    """The other checkpoints of a run."""

    by_name: Mapping[str, tuple[int | None, Place]]  # step and place of each
    # Numbers of further ones, which are forgotten, cannot be read, or are about to be replaced.
    hidden: Sequence[int] = ()


def abandoned_steps(manifests: Iterable[Manifest]) -> frozenset[int]:
    """The steps of checkpoints that the line of the newest one left behind."""
    ordered = oldest_first(manifests, place_of)
    return frozenset(m.step for m in ordered if is_abandoned(place_of(m), place_of(ordered[-1])))


def next_place(
    places: Iterable[tuple[int | None, Place]], step: int | None, previous: Place | None, hidden: Iterable[int] = ()
) -> Place:
    """The place of a checkpoint that is about to be saved.

    Args:
        places: step and place of every other checkpoint of the run.
        step: of the new one.
        previous: the checkpoint that the run restored or saved last; None: not known. Then the run goes on from the
            newest one of the present line with a lower step. If there is none, it is a new run.
        hidden: numbers of checkpoints that are forgotten or cannot be read.
    """
    ordered = oldest_first(places, lambda item: item[1])
    top = max([*hidden, *(place.sequence for _, place in ordered)], default=-1)
    if previous is None and ordered:
        line = [item for item in ordered if not is_abandoned(item[1], ordered[-1][1])]
        before = [place for other, place in line if step is None or other is None or other < step]
        previous = before[-1] if before else Place(-1)
    ranges = () if previous is None else previous.abandoned
    if previous is not None and previous.sequence < top:
        ranges = (*ranges, (previous.sequence + 1, top))
    numbers = [place.sequence for _, place in ordered]
    held = [(low, high) for low, high in ranges if any(low <= number <= high for number in numbers)]
    return Place(max(step or 0, top + 1), _merge(held))


def _merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            low, high = merged[-1][0], max(high, merged.pop()[1])
        merged.append((low, high))
    return tuple(merged)
