"""The demo's scenario: a run that is never killed, and the same run killed in the middle of a save and resumed.

After every step each process logs digests of its whole state. Every checkpoint is decoded after the kill and at the
end, and compared with the state that its process had; the last states of both runs are compared bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.store import Store
from shrinkpoint.store.decode import iter_checkpoints
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.train.state_alignment import NAMES_KEY
from shrinkpoint_lab.demo.digests import (
    SectionComparison,
    StateDigests,
    compare_sections,
    differing_names,
    state_digests,
)
from shrinkpoint_lab.demo.measurements import Measurements, measure_checkpoint
from shrinkpoint_lab.demo.processes import POLL_SECONDS, TrainingProcess, kill_during_save
from shrinkpoint_lab.demo.training_log import TrainingLog
from shrinkpoint_lab.demo.verdict import CheckpointCheck, Verdict, judge
from shrinkpoint_lab.demo.workload import GPT, GPTConfig, stdlib_text

MAX_ATTEMPTS = 10
STORE_SECTIONS = ("model", "optimizer", "scheduler")
RUNS = ("never killed", "killed", "resumed")
EVALUATION_BATCHES = 8
ProgressCallback = Callable[[str, int, float], None]
"""Called with the name of a run, its newest step and the loss of it."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of a demo.

    Attributes:
        store: directory in which the killed run saves; it stays for the command line to look at.
        steps: length of the run.
        every: steps between two checkpoints.
        kill_at: kill in the first save of this step or a later one; None: a little past the middle.
        written: bytes of that save's payload that must be in its file before the kill.
        keyframe_every: checkpoints between two keyframes.
        background: save in a thread of the training process instead of the loop.
        layers, width, context, batch, threads: sizes of the model and its training, and threads of torch.
        disturb: change one bit of a weight of this run after this step, to see that the verdict says so.

    Raises:
        PolicyError: the run is too short for two checkpoints: one to resume from, and one to be killed in; or there is
            no run of this name to be disturbed.
    """

    store: Path = Path("runs/demo")
    steps: int = 100
    every: int = 10
    kill_at: int | None = None
    written: int = 1
    keyframe_every: int = 6
    background: bool = True
    layers: int = 3
    width: int = 256
    context: int = 96
    batch: int = 8
    threads: int = 2
    disturb: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if not 0 < 2 * self.every <= self.steps:
            found = f"{self.steps} steps with a checkpoint every {self.every}"
            raise PolicyError("demo", found=found, expected="two checkpoints or more", do="train for more steps")
        if self.disturb is not None and self.disturb[0] not in RUNS:
            do = "name one of them"
            raise PolicyError(
                "demo, disturb", found=repr(self.disturb[0]), expected=" or ".join(map(repr, RUNS)), do=do
            )

    @property
    def record_path(self) -> Path:
        """The file next to the store with the result; it also marks the store as a demo's, which may be replaced."""
        return self.store.with_name(self.store.name + ".json")

    @property
    def first_kill_step(self) -> int:
        return self.kill_at if self.kill_at is not None else self.steps * 6 // 10

    def train_arguments(self, run: str, store: Path, final: Path) -> list[str]:
        """Arguments of `shrinkpoint_lab.demo.train`; the resumed process gets the same as the killed one."""
        numbers = ("steps", "every", "keyframe_every", "layers", "width", "context", "batch", "threads")
        options = [text for name in numbers for text in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        background = "--background" if self.background else "--no-background"
        disturbance = ["--disturb-at", str(self.disturb[1])] if self.disturb and self.disturb[0] == run else []
        return ["--store", str(store), "--final", str(final), background, *options, *disturbance]


@dataclass(frozen=True)
class KillResult:
    """A kill that interrupted a save.

    Attributes:
        step: the step that was being saved.
        files: what the save left behind: path inside the store -> bytes.
        attempts: number of kills until one interrupted a save.
    """

    step: int
    files: dict[str, int]
    attempts: int


@dataclass(frozen=True)
class DemoResult:
    """The result of a demo.

    Attributes:
        options: the demo's options.
        kill: the kill that interrupted a save.
        reference_log: events of the run that was never killed.
        killed_logs: events of the processes that were killed, in their order; the last one in a save.
        resumed_log: events of the process that resumed the last one.
        final_sections: the last states of both runs, written with torch.save and compared bit for bit.
        store_sections: the last state compared with the one that the store returns for its step.
        checks: every checkpoint compared with the state that its process had.
        manifests: the checkpoints of the store at the end.
        measurements: bytes and seconds; None where the last checkpoints cannot be decoded.
        verdict: what came out, and what is at fault.
    """

    options: DemoOptions
    kill: KillResult
    reference_log: TrainingLog
    killed_logs: list[TrainingLog]
    resumed_log: TrainingLog
    final_sections: list[SectionComparison]
    store_sections: list[SectionComparison]
    checks: list[CheckpointCheck]
    manifests: list[Manifest]
    measurements: Measurements | None
    verdict: Verdict


class Scenario:
    """Runs a demo; every file except those of the store is written to a scratch directory.

    Args:
        options: the demo's options.
        scratch: an existing directory on the store's file system.
        on_progress: called with the name of a run, its newest step and its loss.
    """

    def __init__(self, options: DemoOptions, scratch: Path, on_progress: ProgressCallback) -> None:
        self.options, self.scratch, self.on_progress = options, scratch, on_progress
        self._saved_states: dict[int, StateDigests] = {}

    def run(self) -> DemoResult:
        """Trains without a kill, trains with a kill, resumes, and compares.

        Raises:
            ShrinkpointError: a training process failed, or no kill interrupted a save.
        """
        reference_log = self.train("never killed", self.scratch / "store")
        shutil.rmtree(self.scratch / "store")  # its last state has been written to a file
        kill, killed_logs = self.kill_during_save()
        for log in killed_logs:
            self._saved_states.update(log.states)
        after_kill = check_store(self.options.store, self._saved_states)
        resumed_log = self.train("resumed", self.options.store)
        self._saved_states.update(resumed_log.states)
        return self._compare(reference_log, kill, killed_logs, resumed_log, after_kill)

    def _start(self, name: str, store: Path) -> tuple[TrainingProcess, TrainingLog]:
        log = TrainingLog(name)

        def listen(event: dict[str, Any]) -> None:
            log.add_event(event)
            if log.losses:
                self.on_progress(name, log.last_step, log.losses[log.last_step])

        arguments = self.options.train_arguments(name, store, self.scratch / f"{name}.pt")
        return TrainingProcess(arguments, listen, self.scratch / f"{name}.log"), log

    def train(self, name: str, store: Path) -> TrainingLog:
        """Trains in a process of its own until its end."""
        child, log = self._start(name, store)
        with child:
            child.wait()
        return log

    def kill_during_save(self) -> tuple[KillResult, list[TrainingLog]]:
        """Kills until a kill interrupts a save; returns that kill and the logs of all killed processes.

        Each further attempt resumes and continues, or starts anew when no later save remains. On a busy machine several
        kills may come too late.
        """
        first_step, logs = self.options.first_kill_step, []
        for attempt in range(1, MAX_ATTEMPTS + 1):
            child, log = self._start("killed", self.options.store)
            logs.append(log)
            with child:
                files = kill_during_save(child, self.options.store, first_step, self.options.written)
            if files:
                step = next(iter(files)).partition("/")[0].removeprefix("step-")
                return KillResult(int(step), files, attempt), logs
            first_step = max(first_step, log.last_step) + 1
            if first_step > self.options.steps:
                shutil.rmtree(self.options.store)
                first_step = self.options.first_kill_step
        do = "try a longer run or a larger model"
        raise ShrinkpointError(
            str(self.options.store),
            found=f"{MAX_ATTEMPTS} kills, each after the save had ended",
            expected="one in the middle of a save",
            do=do,
        )

    def train_again(self, log: TrainingLog, last_step: int) -> TrainingLog | None:
        """Trains from the checkpoint that a process restored up to a step, in a copy of the store.

        Returns:
            the log; None if the checkpoint cannot be restored any more.
        """
        store = self.scratch / "again"
        shutil.copytree(self.options.store, store)
        for directory in store.glob("step-*"):
            if int(directory.name.removeprefix("step-")) >= log.first_step:
                shutil.rmtree(directory)
        child, again = self._start("trained again", store)
        with child:
            while child.is_alive and again.last_step < last_step:
                time.sleep(POLL_SECONDS)
        return again if again.restored_step == log.restored_step else None

    def _compare(
        self,
        reference_log: TrainingLog,
        kill: KillResult,
        killed_logs: list[TrainingLog],
        resumed_log: TrainingLog,
        after_kill: list[CheckpointCheck],
    ) -> DemoResult:
        final_states = [self.scratch / f"{name}.pt" for name in ("never killed", "resumed")]
        reference, resumed = (torch.load(path, weights_only=True) for path in final_states)
        at_end = check_store(self.options.store, self._saved_states)
        final_sections = compare_sections(reference, resumed)
        store_sections, measurements = self._measure(resumed, at_end)
        verdict = judge(
            reference_log,
            [*killed_logs, resumed_log],
            after_kill=after_kill,
            at_end=at_end,
            differences=[path for section in (*final_sections, *store_sections) for path in section.differences],
            replay=self.train_again,
        )
        with Store(self.options.store) as store:
            manifests = list(store.list())
        return DemoResult(
            options=self.options,
            kill=kill,
            reference_log=reference_log,
            killed_logs=killed_logs,
            resumed_log=resumed_log,
            final_sections=final_sections,
            store_sections=store_sections,
            checks=at_end,
            manifests=manifests,
            measurements=measurements,
            verdict=verdict,
        )

    def _measure(
        self, live: dict[str, Any], checks: list[CheckpointCheck]
    ) -> tuple[list[SectionComparison], Measurements | None]:
        """The last checkpoint compared with the live state, and measured."""
        if any(check.error for check in checks[-2:]):
            return [], None
        with Store(self.options.store) as store:
            parent, last = (store.load(check.step) for check in checks[-2:])
        sections = compare_sections(*({name: state[name] for name in STORE_SECTIONS} for state in (live, last)))
        return sections, measure_checkpoint(parent, last, self.scratch, make_evaluation(self.options))


def check_store(directory: Path, saved_states: dict[int, StateDigests]) -> list[CheckpointCheck]:
    """Decodes every checkpoint of a store and compares it with the state that its process had when it saved it."""
    with Store(directory) as store:
        manifests = store.list()
        checks: dict[int, CheckpointCheck] = {}
        try:
            for manifest, decoded in iter_checkpoints(store.storage, manifests):
                state = unflatten(decoded.tree, decoded.reference.tensors, where=f"step {manifest.step}")
                checks[manifest.step] = _check_state(manifest.step, state, saved_states)
        except ShrinkpointError:  # which ones it concerns is found by loading each
            for manifest in manifests:
                checks[manifest.step] = _check_checkpoint(store, manifest.step, saved_states)
    return [checks[step] for step in sorted(checks)]


def _check_checkpoint(store: Store, step: int, saved_states: dict[int, StateDigests]) -> CheckpointCheck:
    try:
        return _check_state(step, store.load(step), saved_states)
    except ShrinkpointError as error:
        return CheckpointCheck(step, error=f"{error.where}: {error.found}")


def _check_state(step: int, state: Any, saved_states: dict[int, StateDigests]) -> CheckpointCheck:
    state.pop(NAMES_KEY, None)  # of parameters: they are stored with a state, and no part of it
    return CheckpointCheck(step, differing_names(saved_states.get(step, {}), state_digests(state)))


def make_evaluation(options: DemoOptions) -> Callable[[Any], float]:
    """A function that computes the loss of a state, on batches that are the same at every call."""
    config = GPTConfig(layers=options.layers, width=options.width, context=options.context)
    model = GPT(config).eval()
    text = torch.frombuffer(bytearray(stdlib_text()), dtype=torch.uint8)
    sizes = EVALUATION_BATCHES, options.batch, 1
    starts = torch.randint(len(text) - options.context - 1, sizes, generator=torch.Generator().manual_seed(2))
    windows = text[starts + torch.arange(options.context + 1)].long()

    @torch.no_grad()
    def evaluate(state: Any) -> float:
        model.load_state_dict(state["model"])
        return sum(float(model(batch[:, :-1], batch[:, 1:])) for batch in windows) / EVALUATION_BATCHES

    return evaluate


def run_scenario(options: DemoOptions, on_progress: ProgressCallback) -> DemoResult:
    """Runs a demo in a temporary directory; the store stays, every other file is removed."""
    options.store.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.store.parent, prefix=".demo-") as scratch:
        return Scenario(options, Path(scratch), on_progress).run()
