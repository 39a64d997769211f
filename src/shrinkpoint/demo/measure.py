"""Measure the demo's checkpoints: bytes by role, seconds to encode and decode, beside torch.save and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store.checkpoint_file import SaveReport, read_file, write_file
from shrinkpoint.tensors.flat_state import FlatState, snapshot
from shrinkpoint.tensors.flatten import flatten

KEY = "checkpoint"


@dataclass(frozen=True)
class TimedRoundTrip:
    """One checkpoint written and read in memory, so that the disk does not count.

    Attributes:
        report: what the save did.
        encode, decode: seconds, medians.
    """

    report: SaveReport
    encode: float
    decode: float


@dataclass(frozen=True)
class Measurements:
    """What the demo measured on one state.

    Attributes:
        keyframe, delta: the same state coded alone, and against the checkpoint before it.
        torch_save, copy: seconds of `torch.save` to a file (not fsynced) and of cloning every tensor, medians.
    """

    keyframe: TimedRoundTrip
    delta: TimedRoundTrip
    torch_save: float
    copy: float


def measure_checkpoint(parent_state: Any, state: Any, directory: Path, *, repeat: int = 3) -> Measurements:
    """Measure `state` and its delta against `parent_state`, the state of the checkpoint before it.

    Args:
        directory: where a scratch file may be written.
        repeat: runs of which the median counts.
    """
    flat, base = flatten(state), flatten(parent_state)
    scratch = directory / "torch-save.pt"
    figures = Measurements(
        keyframe=_time_round_trip(flat, None, repeat),
        delta=_time_round_trip(flat, base, repeat),
        torch_save=_median_seconds(lambda: torch.save(state, scratch), repeat),
        copy=_median_seconds(lambda: snapshot(flat), repeat),
    )
    scratch.unlink()
    return figures


def _time_round_trip(state: FlatState, parent_state: FlatState | None, repeat: int) -> TimedRoundTrip:
    reports: list[SaveReport] = []
    storage = MemoryStorage()
    reference = None if parent_state is None else Reference(snapshot(parent_state).tensors)
    parent = None if parent_state is None else {"name": "memory", "digest": "", "step": 0}

    def encode() -> None:
        written = write_file(storage, KEY, QuantizedState(state), scheme=Lossless(), reference=reference, parent=parent)
        reports.append(written.report)

    def decode() -> None:
        read_file(storage.open(KEY), KEY, reference)

    seconds = _median_seconds(encode, repeat)
    return TimedRoundTrip(reports[-1], seconds, _median_seconds(decode, repeat))


def _median_seconds(work: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
