"""The story: a run that is never killed, the same run killed in the middle of a save, the resume, the comparison."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shrinkpoint.demo.child import Child, kill_in_a_save
from shrinkpoint.demo.compare import Section, compare
from shrinkpoint.demo.course import Course
from shrinkpoint.demo.measure import Figures, measure
from shrinkpoint.demo.plan import Plan
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.store import Store
from shrinkpoint.store.manifest import Manifest

ATTEMPTS = 10
Progress = Callable[[str, int], None]
"""Called with the name of a run and the newest step it has made."""


@dataclass(frozen=True)
class Killed:
    """A kill that hit a save.

    Attributes:
        step: the one that was being saved.
        left: files the save left behind: path inside the store -> bytes.
        attempts: kills until one hit.
    """

    step: int
    left: dict[str, int]
    attempts: int


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        whole, resumed: courses of the uninterrupted run and of the process that resumed the killed one.
        untouched: course of the process that was killed, until the first kill: nothing was restored in it.
        live: the last states of both, written with torch.save and compared bit for bit.
        stored: the last state against what the store gives back for its step.
        manifests: what is in the store now.
        figures: bytes and seconds.
    """

    plan: Plan
    killed: Killed
    whole: Course
    resumed: Course
    untouched: Course
    live: list[Section]
    stored: list[Section]
    manifests: list[Manifest]
    figures: Figures

    @property
    def passed(self) -> bool:
        return not any(section.differences for section in (*self.live, *self.stored))

    @property
    def parting(self) -> str | None:
        """In which process the losses first differ from those of the uninterrupted run, and at which step."""
        step = self.untouched.parts_from(self.whole)
        if step is not None:
            return f"at step {step} of the killed process, which had restored nothing: training itself differs here"
        step = self.resumed.parts_from(self.whole)
        return None if step is None else f"at step {step} of the resumed process, which began at {self.resumed.first}"


class Story:
    """Plays one `Plan`; everything but the store goes to a scratch directory.

    Args:
        scratch: an existing directory on the store's file system.
    """

    def __init__(self, plan: Plan, scratch: Path, progress: Progress) -> None:
        self.plan, self.scratch, self.progress = plan, scratch, progress

    def tell(self) -> Outcome:
        """Play it from the beginning to the end.

        Raises:
            ShrinkpointError: a training process failed, or no kill hit a save.
        """
        whole = self._train("never killed", self.scratch / "store")
        shutil.rmtree(self.scratch / "store")  # its last state is kept in a file of its own
        killed, untouched = self._until_killed()
        resumed = self._train("resumed", self.plan.store)
        return self._look(whole, killed, resumed, untouched)

    def _start(self, name: str, store: Path) -> tuple[Child, Course]:
        course = Course()

        def listen(event: dict[str, Any]) -> None:
            course.hear(event)
            self.progress(name, course.last)

        arguments = self.plan.arguments(store, self._final(name))
        return Child(arguments, listen, self.scratch / f"{name}.log"), course

    def _train(self, name: str, store: Path) -> Course:
        child, course = self._start(name, store)
        with child:
            child.wait()
        return course

    def _until_killed(self) -> tuple[Killed, Course]:
        """Kill until a kill hits a save that was not finished, and tell the first attempt's course.

        Each further attempt resumes and goes on; from the start, where no save is left. On a busy machine a kill may
        come late several times.
        """
        since, first = self.plan.first_kill, None
        for attempt in range(1, ATTEMPTS + 1):
            child, course = self._start("killed", self.plan.store)
            with child:
                left = kill_in_a_save(child, self.plan.store, since, self.plan.written)
            first = first or course
            if left:
                step = next(iter(left)).partition("/")[0].removeprefix("step-")
                return Killed(int(step), left, attempt), first
            since = max(since, course.last) + 1
            if since > self.plan.steps:
                shutil.rmtree(self.plan.store)
                since = self.plan.first_kill
        raise ShrinkpointError(
            str(self.plan.store),
            found=f"{ATTEMPTS} kills, each after the save had ended",
            expected="one in the middle of a save",
            do="try a longer run or a larger model",
        )

    def _look(self, whole: Course, killed: Killed, resumed: Course, untouched: Course) -> Outcome:
        one, other = (torch.load(self._final(name), weights_only=True) for name in ("never killed", "resumed"))
        with Store(self.plan.store) as store:
            manifests = list(store.list())
            last, before = (store.load(manifest.step) for manifest in (manifests[-1], manifests[-2]))
        stored = compare({name: other[name] for name in STORED}, {name: last[name] for name in STORED})
        figures = measure(before, last, self.scratch)
        return Outcome(self.plan, killed, whole, resumed, untouched, compare(one, other), stored, manifests, figures)

    def _final(self, name: str) -> Path:
        return self.scratch / f"{name}.pt"


STORED = ("model", "optimizer", "scheduler")


def play(plan: Plan, progress: Progress) -> Outcome:
    """Play the whole story; the store stays, everything else is removed."""
    plan.store.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.store.parent, prefix=".demo-") as scratch:
        return Story(plan, Path(scratch), progress).tell()
