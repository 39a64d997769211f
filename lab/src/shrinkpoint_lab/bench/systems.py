"""Systems that turn checkpoints into bytes and back, among them every scheme of this library, and their meters."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from shrinkpoint.errors import UnmeasuredLossWarning
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import Evaluate
from shrinkpoint.schemes.registry import make_scheme, needs_evaluation
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store
from shrinkpoint.store.decode import iter_checkpoints
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.tensors.info import JSON
from shrinkpoint_lab.bench.series import Series, SeriesEntry

_STATUS_FILE, _CLEAR_REFS_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures the rise of resident memory since this object was made; reused memory is not counted."""

    def __init__(self) -> None:
        gc.collect()
        try:
            _CLEAR_REFS_FILE.write_text("5")
            self._baseline: int | None = resident_bytes("VmRSS")
        except OSError:  # another system, or a container that does not allow it
            self._baseline = None

    @property
    def rise(self) -> int | None:
        """The largest rise so far in bytes; None if it cannot be measured."""
        return None if self._baseline is None else max(0, resident_bytes("VmHWM") - self._baseline)


def resident_bytes(field: str) -> int:
    """Bytes of a field (VmRSS, VmHWM) of the status of this process; raises `OSError` if there is none."""
    for line in _STATUS_FILE.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS_FILE} has no {field}")


class CallTimer:
    """Wraps a quality function and measures its calls since the last `lap`.

    Attributes:
        calls: number of calls.
        seconds: time spent in them.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self.calls, self.seconds = 0, 0.0

    def __call__(self, argument: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._evaluate(argument)
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        """Returns calls and seconds, and sets both to 0."""
        out = {"calls": self.calls, "seconds": self.seconds}
        self.calls, self.seconds = 0, 0.0
        return out


@dataclass(frozen=True)
class RoundTrip:
    """One checkpoint of a series after it was encoded and decoded.

    Attributes:
        step: the step of the series entry.
        keyframe: it needs no other checkpoint.
        stored: bytes of its files.
        roles: stored bytes by role; empty where the system does not tell them apart.
        tensors: decoded tensors, by the names that `flatten` gives them.
        state: the decoded state, nested as it was saved.
        encode_seconds: without the time spent in the user's evaluation.
        decode_seconds: time to decode it from its parent.
        evaluate_seconds: time spent in the user's evaluation.
        peak: bytes by which resident memory rose at most while it was encoded; None where that is unknown.
        retention: share of the weights' progress since the parent that was written; None if not measured.
        choice: the settings that a search chose, as JSON.
    """

    step: int
    keyframe: bool
    stored: int
    roles: Mapping[str, int]
    tensors: Mapping[str, Tensor] = field(repr=False)
    state: Any = field(repr=False)
    encode_seconds: float
    decode_seconds: float
    evaluate_seconds: float = 0.0
    peak: int | None = None
    retention: float | None = None
    choice: JSON = None


class System(Protocol):
    """Turns the checkpoints of a series into bytes and back: a scheme of this library, or one to compare it with."""

    @property
    def name(self) -> str: ...

    def run(self, series: Series) -> Iterator[RoundTrip]:
        """Yields every checkpoint of a series in order, each encoded with the previous one as its parent."""
        ...


@dataclass(frozen=True)
class StoreSystem:
    """A scheme of this library, run through a store in memory.

    Attributes:
        name: the scheme's text, as `scheme_factory` reads it.
        make: makes the scheme for one run; called with the quality function, which counts its calls, or with None where
            the scheme needs none.
        evaluate: the quality function of a state; None for a scheme that needs none.
        keyframe_every: checkpoints between two keyframes; None: only the first is one.
        threads: threads of the native coders; with one, speeds are those of a core.
    """

    name: str
    make: Callable[[Evaluate | None], Scheme] = field(repr=False)
    evaluate: Evaluate | None = field(default=None, repr=False)
    keyframe_every: int | None = None
    threads: int = 1

    def run(self, series: Series) -> Iterator[RoundTrip]:
        """Yields every checkpoint of a series as it comes back.

        All checkpoints are written first, since a store keeps the last one in memory to write the next delta against.
        """
        timer = None if self.evaluate is None else CallTimer(self.evaluate)
        scheme = self.make(timer)
        storage = MemoryStorage()
        with Store(storage, keyframe_every=self.keyframe_every, threads=self.threads) as store:
            written = {entry.step: _save(store, scheme, timer, entry) for entry in series}
            began = time.perf_counter()
            for manifest, decoded in iter_checkpoints(storage, store.list(), threads=self.threads):
                seconds = time.perf_counter() - began
                report, encode_seconds, evaluate_seconds, peak = written[manifest.step]
                tensors = decoded.reference.tensors
                yield RoundTrip(
                    step=manifest.step,
                    keyframe=report.keyframe,
                    stored=report.stored_bytes,
                    roles={name: role.stored for name, role in report.roles.items()},
                    tensors=tensors,
                    state=unflatten(decoded.tree, tensors, where=f"step {manifest.step}"),
                    encode_seconds=encode_seconds,
                    decode_seconds=seconds,
                    evaluate_seconds=evaluate_seconds,
                    peak=peak,
                    retention=report.retention,
                    choice=report.loss_report.get("chosen") if isinstance(report.loss_report, dict) else None,
                )
                began = time.perf_counter()


def _save(
    store: Store, scheme: Scheme, timer: CallTimer | None, entry: SeriesEntry
) -> tuple[SaveReport, float, float, int | None]:
    """Saves one checkpoint; returns the report, seconds to encode, seconds of evaluation, and the rise of memory."""
    peak, began = PeakMemory(), time.perf_counter()
    with warnings.catch_warnings():  # the bench measures the loss itself
        warnings.simplefilter("ignore", UnmeasuredLossWarning)
        report = store.save(entry.step, entry.state, scheme=scheme)
    seconds = time.perf_counter() - began
    evaluate_seconds = 0.0 if timer is None else timer.lap()["seconds"]
    return report, seconds - evaluate_seconds, evaluate_seconds, peak.rise


SYSTEMS = (
    "lossless",
    "inshrinkerator",
    "inshrinkerator(paper=True)",
    'inshrinkerator(optimizer="lossy")',
    "qd",
    "cnr",
    "gobo",
    "fisher",
    "fisher(relative_error=.15)",
    "fisher(relative_error=.3)",
    "fisher(relative_error=.6)",
    "fisher(relative_error=1)",
    'fisher(relative_error=.3, moments="exact")',
    "lc-checkpoint(bits=2)",
    "lc-checkpoint(bits=3)",
    "lc-checkpoint(bits=2, paper=True)",
    "lc-checkpoint(bits=3, paper=True)",
    'lc-checkpoint(bits=3, optimizer="lossy")',
    "scar",
    "topn",
    "excp",
    "excp(paper=True)",
    "excp(paper=True, paper_fp16=True)",
    'excp(paper=True, rule="released", paper_fp16=True)',
)
"""The schemes that `shrinkpoint-lab bench` compares where none is named, by their texts."""


def make_system(
    name: str,
    *,
    evaluate: Evaluate | None = None,
    threshold: float = 0.01,
    higher_is_better: bool = False,
    keyframe_every: int | None = None,
    threads: int = 1,
) -> StoreSystem:
    """Makes the system that runs the scheme of a text.

    Args:
        name: the scheme's text.
        evaluate: the quality function of a state; used where the scheme needs one.
        threshold: how much worse a checkpoint may be, for a scheme that measures and whose text does not say it.
        higher_is_better: `evaluate` returns a score, not a loss.
        keyframe_every: checkpoints between two keyframes; None: only the first is one.
        threads: threads of the native coders.

    Raises:
        PolicyError: there is no such scheme, or it needs a quality function and there is none.
    """

    def make(quality: Evaluate | None) -> Scheme:
        return make_scheme(name, evaluate=quality, threshold=threshold, higher_is_better=higher_is_better)

    if not needs_evaluation(name):
        return StoreSystem(name, make, None, keyframe_every, threads)
    make(evaluate)  # a wrong setting is refused now
    return StoreSystem(name, make, evaluate, keyframe_every, threads)
