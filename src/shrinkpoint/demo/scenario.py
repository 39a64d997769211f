"""The demo's scenario: a run that is never killed, the same run killed in the middle of a save, the resume, the
comparison.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shrinkpoint.demo.child import TrainingProcess, kill_during_save
from shrinkpoint.demo.measure import Measurements, measure_checkpoint
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.store import Store
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.tensors.compare import SectionComparison, compare_sections


@dataclass(frozen=True)
class DemoOptions:
    """One demo.

    Raises:
        PolicyError: too short for two checkpoints, one to fall back to and one to be killed in.

    Attributes:
        store: where the killed run saves; it stays for a look with the command line.
        steps, every: length of the run, and steps between two checkpoints.
        kill_at: kill in the first save of a step not before this step; None: a little past the middle.
        written: bytes of that save's payload that must stand in its file before the kill.
        keyframe_every: checkpoints between two keyframes.
        background: save in a thread of the training process, or in the loop.
        layers, width, context, batch, threads: of the model and its training.
    """

    store: Path = Path("runs/demo")
    steps: int = 200
    every: int = 10
    kill_at: int | None = None
    written: int = 1
    keyframe_every: int = 10
    background: bool = True
    layers: int = 6
    width: int = 256
    context: int = 128
    batch: int = 8
    threads: int = 2

    def __post_init__(self) -> None:
        if not 0 < 2 * self.every <= self.steps:
            found = f"{self.steps} steps with a checkpoint every {self.every}"
            raise PolicyError("demo", found=found, expected="room for two checkpoints", do="train for more steps")

    @property
    def record_path(self) -> Path:
        """A file beside the store, with what was measured; it also says that the store is a demo's and replaceable."""
        return self.store.with_name(self.store.name + ".json")

    @property
    def first_kill_step(self) -> int:
        return self.kill_at if self.kill_at is not None else self.steps * 6 // 10

    def train_arguments(self, store: Path, final: Path) -> list[str]:
        """The training's command line; the resumed process gets the very same as the killed one."""
        numbers = ("steps", "every", "keyframe_every", "layers", "width", "context", "batch", "threads")
        options = [text for name in numbers for text in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        background = "--background" if self.background else "--no-background"
        return ["--store", str(store), "--final", str(final), background, *options]


@dataclass
class TrainingLog:
    """Events of one process, collected.

    Attributes:
        first_step: the first step it made, 0 while it has made none.
        last_step: the newest.
        skip_reasons: checkpoints that its restore passed over, and why.
        losses: by step.
        stalls: seconds that each save held up the loop, by step.
    """

    first_step: int = 0
    last_step: int = 0
    skip_reasons: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)

    def first_divergence(self, other: TrainingLog) -> int | None:
        """The first step, of those that both made, whose loss is not the same number; None: there is none."""
        common = sorted(self.losses.keys() & other.losses.keys())
        return next((step for step in common if self.losses[step] != other.losses[step]), None)

    def add_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self.first_step, self.skip_reasons = event["step"], event["skipped"]
        elif event["event"] == "step":
            self.last_step = event["step"]
            self.losses[self.last_step] = event["loss"]
        elif event["event"] == "save":
            self.stalls[event["step"]] = event["stall"]


MAX_ATTEMPTS = 10
ProgressCallback = Callable[[str, int], None]
"""Called with the name of a run and the newest step it has made."""


@dataclass(frozen=True)
class KillResult:
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
class DemoResult:
    """How it went.

    Attributes:
        whole, resumed: courses of the uninterrupted run and of the process that resumed the killed one.
        killed_log: course of the process that was killed, until the first kill: nothing was restored in it.
        final_sections: the last states of both, written with torch.save and compared bit for bit.
        store_sections: the last state against what the store gives back for its step.
        manifests: what is in the store now.
        measurements: bytes and seconds.
    """

    options: DemoOptions
    kill: KillResult
    reference_log: TrainingLog
    resumed_log: TrainingLog
    killed_log: TrainingLog
    final_sections: list[SectionComparison]
    store_sections: list[SectionComparison]
    manifests: list[Manifest]
    measurements: Measurements

    @property
    def passed(self) -> bool:
        return not any(section.differences for section in (*self.final_sections, *self.store_sections))

    @property
    def divergence(self) -> str | None:
        """In which process the losses first differ from those of the uninterrupted run, and at which step."""
        step = self.killed_log.first_divergence(self.reference_log)
        if step is not None:
            return f"at step {step} of the killed process, which had restored nothing: training itself differs here"
        step = self.resumed_log.first_divergence(self.reference_log)
        return (
            None
            if step is None
            else f"at step {step} of the resumed process, which began at {self.resumed_log.first_step}"
        )


class Scenario:
    """Plays one `Plan`; everything but the store goes to a scratch directory.

    Args:
        scratch: an existing directory on the store's file system.
    """

    def __init__(self, options: DemoOptions, scratch: Path, on_progress: ProgressCallback) -> None:
        self.options, self.scratch, self.on_progress = options, scratch, on_progress

    def run(self) -> DemoResult:
        """Play it from the beginning to the end.

        Raises:
            ShrinkpointError: a training process failed, or no kill hit a save.
        """
        whole = self._train("never killed", self.scratch / "store")
        shutil.rmtree(self.scratch / "store")  # its last state is kept in a file of its own
        killed, untouched = self._kill_during_save()
        resumed = self._train("resumed", self.options.store)
        return self._compare(whole, killed, resumed, untouched)

    def _start(self, name: str, store: Path) -> tuple[TrainingProcess, TrainingLog]:
        course = TrainingLog()

        def listen(event: dict[str, Any]) -> None:
            course.add_event(event)
            self.on_progress(name, course.last_step)

        arguments = self.options.train_arguments(store, self._final_state_path(name))
        return TrainingProcess(arguments, listen, self.scratch / f"{name}.log"), course

    def _train(self, name: str, store: Path) -> TrainingLog:
        child, course = self._start(name, store)
        with child:
            child.wait()
        return course

    def _kill_during_save(self) -> tuple[KillResult, TrainingLog]:
        """Kill until a kill hits a save that was not finished, and tell the first attempt's course.

        Each further attempt resumes and goes on; from the start, where no save is left. On a busy machine a kill may
        come late several times.
        """
        since, first = self.options.first_kill_step, None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            child, course = self._start("killed", self.options.store)
            with child:
                left = kill_during_save(child, self.options.store, since, self.options.written)
            first = first or course
            if left:
                step = next(iter(left)).partition("/")[0].removeprefix("step-")
                return KillResult(int(step), left, attempt), first
            since = max(since, course.last_step) + 1
            if since > self.options.steps:
                shutil.rmtree(self.options.store)
                since = self.options.first_kill_step
        raise ShrinkpointError(
            str(self.options.store),
            found=f"{MAX_ATTEMPTS} kills, each after the save had ended",
            expected="one in the middle of a save",
            do="try a longer run or a larger model",
        )

    def _compare(
        self, reference_log: TrainingLog, kill: KillResult, resumed_log: TrainingLog, killed_log: TrainingLog
    ) -> DemoResult:
        one, other = (
            torch.load(self._final_state_path(name), weights_only=True) for name in ("never killed", "resumed")
        )
        with Store(self.options.store) as store:
            manifests = list(store.list())
            last, before = (store.load(manifest.step) for manifest in (manifests[-1], manifests[-2]))
        stored = compare_sections(
            {name: other[name] for name in STORE_SECTIONS}, {name: last[name] for name in STORE_SECTIONS}
        )
        figures = measure_checkpoint(before, last, self.scratch)
        return DemoResult(
            self.options,
            kill,
            reference_log,
            resumed_log,
            killed_log,
            compare_sections(one, other),
            stored,
            manifests,
            figures,
        )

    def _final_state_path(self, name: str) -> Path:
        return self.scratch / f"{name}.pt"


STORE_SECTIONS = ("model", "optimizer", "scheduler")


def run_scenario(options: DemoOptions, on_progress: ProgressCallback) -> DemoResult:
    """Play the whole story; the store stays, everything else is removed."""
    options.store.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.store.parent, prefix=".demo-") as scratch:
        return Scenario(options, Path(scratch), on_progress).run()
