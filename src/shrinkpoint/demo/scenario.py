"""The demo's scenario: a run that is never killed, and the same run killed in the middle of a save and resumed.

Their last states are compared bit for bit, and the last checkpoint is measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store
from shrinkpoint.store.checkpoint_file import SaveReport, read_file, write_file
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.tensors.compare import SectionComparison, compare_sections
from shrinkpoint.tensors.flat_state import FlatState, flatten, snapshot

MAX_ATTEMPTS = 10
STORE_SECTIONS = ("model", "optimizer", "scheduler")
ProgressCallback = Callable[[str, int], None]
"""Called with the name of a run and its newest step."""
_KEY = "checkpoint"
EventListener = Callable[[dict[str, Any]], None]
POLL_SECONDS = 0.0005
"""Seconds between two scans of the store; a save takes tens of milliseconds at least."""


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

    Raises:
        PolicyError: the run is too short for two checkpoints: one to resume from, and one to be killed in.
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
            raise PolicyError("demo", found=found, expected="two checkpoints or more", do="train for more steps")

    @property
    def record_path(self) -> Path:
        """The file next to the store with the result; it also marks the store as a demo's, which may be replaced."""
        return self.store.with_name(self.store.name + ".json")

    @property
    def first_kill_step(self) -> int:
        return self.kill_at if self.kill_at is not None else self.steps * 6 // 10

    def train_arguments(self, store: Path, final: Path) -> list[str]:
        """Arguments of `shrinkpoint.demo.train`; the resumed process gets the same as the killed one."""
        numbers = ("steps", "every", "keyframe_every", "layers", "width", "context", "batch", "threads")
        options = [text for name in numbers for text in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        background = "--background" if self.background else "--no-background"
        return ["--store", str(store), "--final", str(final), background, *options]


@dataclass
class TrainingLog:
    """The events of one training process.

    Attributes:
        first_step: its first step; 0 before it has made one.
        last_step: its newest step.
        skip_reasons: checkpoints that its restore skipped, and why.
        losses: loss by step.
        stalls: seconds by which each save stalled the loop, by step.
    """

    first_step: int = 0
    last_step: int = 0
    skip_reasons: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)

    def first_divergence(self, other: TrainingLog) -> int | None:
        """The first step of both processes at which their losses differ; None: there is none."""
        common = sorted(self.losses.keys() & other.losses.keys())
        return next((step for step in common if self.losses[step] != other.losses[step]), None)

    def add_event(self, event: dict[str, Any]) -> None:
        kind, step = event["event"], event["step"]
        if kind == "start":
            self.first_step, self.skip_reasons = step, event["skipped"]
        elif kind == "step":
            self.last_step, self.losses[step] = step, event["loss"]
        elif kind == "save":
            self.stalls[step] = event["stall"]


@dataclass(frozen=True)
class KillResult:
    """A kill that interrupted a save.

    Attributes:
        step: the step that was being saved.
        left: files that the save left behind: path inside the store -> bytes.
        attempts: number of kills until one interrupted a save.
    """

    step: int
    left: dict[str, int]
    attempts: int


@dataclass(frozen=True)
class TimedRoundTrip:
    """A checkpoint that was encoded and decoded in memory, without the time of a disk.

    Attributes:
        report: the report of the save.
        encode: median seconds to encode.
        decode: median seconds to decode.
    """

    report: SaveReport
    encode: float
    decode: float


@dataclass(frozen=True)
class Measurements:
    """Measurements of one state.

    Attributes:
        keyframe: the state encoded as a keyframe.
        delta: the state encoded against the previous checkpoint.
        torch_save: median seconds of `torch.save` to a file, without fsync.
        copy: median seconds to clone every tensor.
    """

    keyframe: TimedRoundTrip
    delta: TimedRoundTrip
    torch_save: float
    copy: float


@dataclass(frozen=True)
class DemoResult:
    """The result of a demo.

    Attributes:
        options: the demo's options.
        kill: the kill that interrupted a save.
        reference_log: events of the run that was never killed.
        resumed_log: events of the process that resumed the killed one.
        killed_log: events of the first process that was killed; it had restored nothing.
        final_sections: the last states of both runs, written with torch.save and compared bit for bit.
        store_sections: the last state compared with the one that the store returns for its step.
        manifests: the checkpoints of the store at the end.
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
        """The process and the step at which losses first differ from the reference run; None: nowhere."""
        step = self.killed_log.first_divergence(self.reference_log)
        if step is not None:
            return f"at step {step} of the killed process, which had restored nothing: training itself differs here"
        step = self.resumed_log.first_divergence(self.reference_log)
        if step is None:
            return None
        return f"at step {step} of the resumed process, which began at {self.resumed_log.first_step}"


class TrainingProcess:
    """A process of `shrinkpoint.demo.train`; used in a `with` statement, it is killed at the end of the block.

    Args:
        arguments: command-line arguments of the training.
        on_event: called with every event that the process prints, in a thread of this process.
        log: file for its standard error.
    """

    def __init__(self, arguments: Sequence[str], on_event: EventListener, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "shrinkpoint.demo.train", *arguments]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._reader = threading.Thread(target=self._read_events, args=(on_event,), daemon=True)
        self._reader.start()

    def _read_events(self, on_event: EventListener) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last line of a killed process may be cut
                    on_event(json.loads(line))

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> None:
        """Waits until the process has ended.

        Raises:
            ShrinkpointError: its exit code is not 0; the message has the end of its log.
        """
        code = self.process.wait()
        self._reader.join()
        if code:
            raise ShrinkpointError(
                f"training process {self.process.pid}",
                found=f"exit code {code}",
                expected="0",
                do=f"read {self.log}, which ends with: {self.log.read_text()[-2000:]}",
            )

    def kill(self) -> None:
        """Sends SIGKILL, so that no handler runs and no buffer is written; does nothing if the process has ended."""
        self.process.kill()
        self.process.wait()
        self._reader.join()


def unfinished_files(store: Path, first_step: int = 0) -> dict[str, int]:
    """Files of saves that have begun and have no manifest yet: path inside the store -> bytes so far.

    Args:
        store: directory of the store.
        first_step: ignore earlier steps.
    """
    sizes: dict[str, int] = {}
    for directory in store.glob("step-*"):
        if int(directory.name.removeprefix("step-")) < first_step or (directory / "manifest.json").exists():
            continue
        for path in directory.glob("*"):  # links to files of the chain are in a subdirectory, and not being written
            with suppress(FileNotFoundError):  # renamed since it was listed
                if path.is_file():
                    sizes[path.relative_to(store).as_posix()] = path.stat().st_size
    return sizes


def kill_during_save(child: TrainingProcess, store: Path, first_step: int, min_bytes: int = 0) -> dict[str, int]:
    """Kills `child` in the middle of its first save of `first_step` or a later step.

    Args:
        child: the training process.
        store: directory of its store.
        first_step: ignore saves of earlier steps.
        min_bytes: bytes of the payload that must be in the file before the kill.

    Returns:
        files that the interrupted save left behind: path inside the store -> bytes; empty if the save had ended before
        the kill, or the child ended.
    """
    while child.is_alive:
        if any(size >= min_bytes for size in unfinished_files(store, first_step).values()):
            child.kill()
            return unfinished_files(store, first_step)
        time.sleep(POLL_SECONDS)
    child.wait()
    return {}


class Scenario:
    """Runs a demo; every file except those of the store is written to a scratch directory.

    Args:
        options: the demo's options.
        scratch: an existing directory on the store's file system.
        on_progress: called with the name of a run and its newest step.
    """

    def __init__(self, options: DemoOptions, scratch: Path, on_progress: ProgressCallback) -> None:
        self.options, self.scratch, self.on_progress = options, scratch, on_progress

    def run(self) -> DemoResult:
        """Trains without a kill, trains with a kill, resumes, and compares.

        Raises:
            ShrinkpointError: a training process failed, or no kill interrupted a save.
        """
        reference_log = self._train("never killed", self.scratch / "store")
        shutil.rmtree(self.scratch / "store")  # its last state has been written to a file
        kill, killed_log = self._kill_during_save()
        resumed_log = self._train("resumed", self.options.store)
        return self._compare(reference_log, kill, resumed_log, killed_log)

    def _start(self, name: str, store: Path) -> tuple[TrainingProcess, TrainingLog]:
        log = TrainingLog()

        def listen(event: dict[str, Any]) -> None:
            log.add_event(event)
            self.on_progress(name, log.last_step)

        arguments = self.options.train_arguments(store, self.scratch / f"{name}.pt")
        return TrainingProcess(arguments, listen, self.scratch / f"{name}.log"), log

    def _train(self, name: str, store: Path) -> TrainingLog:
        child, log = self._start(name, store)
        with child:
            child.wait()
        return log

    def _kill_during_save(self) -> tuple[KillResult, TrainingLog]:
        """Kills until a kill interrupts a save; returns that kill and the log of the first attempt.

        Each further attempt resumes and continues, or starts anew when no later save is left. On a busy machine several
        kills may come too late.
        """
        first_step, first_log = self.options.first_kill_step, None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            child, log = self._start("killed", self.options.store)
            with child:
                files = kill_during_save(child, self.options.store, first_step, self.options.written)
            first_log = first_log or log
            if files:
                step = next(iter(files)).partition("/")[0].removeprefix("step-")
                return KillResult(int(step), files, attempt), first_log
            first_step = max(first_step, log.last_step) + 1
            if first_step > self.options.steps:
                shutil.rmtree(self.options.store)
                first_step = self.options.first_kill_step
        raise ShrinkpointError(
            str(self.options.store),
            found=f"{MAX_ATTEMPTS} kills, each after the save had ended",
            expected="one in the middle of a save",
            do="try a longer run or a larger model",
        )

    def _compare(
        self, reference_log: TrainingLog, kill: KillResult, resumed_log: TrainingLog, killed_log: TrainingLog
    ) -> DemoResult:
        final_states = [self.scratch / f"{name}.pt" for name in ("never killed", "resumed")]
        reference, resumed = (torch.load(path, weights_only=True) for path in final_states)
        with Store(self.options.store) as store:
            manifests = list(store.list())
            parent, last = (store.load(manifest.step) for manifest in manifests[-2:])
        store_sections = compare_sections(
            {name: resumed[name] for name in STORE_SECTIONS}, {name: last[name] for name in STORE_SECTIONS}
        )
        return DemoResult(
            options=self.options,
            kill=kill,
            reference_log=reference_log,
            resumed_log=resumed_log,
            killed_log=killed_log,
            final_sections=compare_sections(reference, resumed),
            store_sections=store_sections,
            manifests=manifests,
            measurements=measure_checkpoint(parent, last, self.scratch),
        )


def run_scenario(options: DemoOptions, on_progress: ProgressCallback) -> DemoResult:
    """Runs a demo in a temporary directory; the store stays, every other file is removed."""
    options.store.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.store.parent, prefix=".demo-") as scratch:
        return Scenario(options, Path(scratch), on_progress).run()


def measure_checkpoint(parent_state: Any, state: Any, directory: Path, *, repeat: int = 3) -> Measurements:
    """Measures a state as a keyframe, and as a delta against `parent_state`.

    Args:
        parent_state: the state of the previous checkpoint.
        state: the state to encode.
        directory: where a temporary file may be written.
        repeat: number of runs; medians are returned.
    """
    flat_state, flat_parent = flatten(state), flatten(parent_state)
    path = directory / "torch-save.pt"
    measurements = Measurements(
        keyframe=_time_round_trip(flat_state, None, repeat),
        delta=_time_round_trip(flat_state, flat_parent, repeat),
        torch_save=_median_seconds(lambda: torch.save(state, path), repeat),
        copy=_median_seconds(lambda: snapshot(flat_state), repeat),
    )
    path.unlink()
    return measurements


def _time_round_trip(state: FlatState, parent_state: FlatState | None, repeat: int) -> TimedRoundTrip:
    reports: list[SaveReport] = []
    storage = MemoryStorage()
    reference = None if parent_state is None else Reference(snapshot(parent_state).tensors)
    parent = None if parent_state is None else {"name": "memory", "digest": "", "step": 0}

    def encode() -> None:
        quantized = QuantizedState(state)
        written = write_file(storage, _KEY, quantized, scheme=Lossless(), reference=reference, parent=parent)
        reports.append(written.report)

    seconds = _median_seconds(encode, repeat)
    decode_seconds = _median_seconds(lambda: read_file(storage.open(_KEY), _KEY, reference), repeat)
    return TimedRoundTrip(reports[-1], seconds, decode_seconds)


def _median_seconds(work: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
