"""Measure the demo's checkpoints: bytes by role, seconds to encode and decode, beside torch.save and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shrinkpoint.codec import Reference
from shrinkpoint.schemes import Kept, Lossless
from shrinkpoint.state import FlatState, flatten, snapshot
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store.file import SaveReport, read_file, write_file

KEY = "checkpoint"


@dataclass(frozen=True)
class Timed:
    """One checkpoint written and read in memory, so that the disk does not count.

    Attributes:
        report: what the save did.
        encode, decode: seconds, medians.
    """

    report: SaveReport
    encode: float
    decode: float


@dataclass(frozen=True)
class Figures:
    """What the demo measured on one state.

    Attributes:
        keyframe, delta: the same state coded alone, and against the checkpoint before it.
        torch_save, copy: seconds of `torch.save` to a file (not fsynced) and of cloning every tensor, medians.
    """

    keyframe: Timed
    delta: Timed
    torch_save: float
    copy: float


def measure(before: Any, state: Any, folder: Path, *, repeat: int = 3) -> Figures:
    """Measure `state` and its delta against `before`, the state of the checkpoint before it.

    Args:
        folder: where a scratch file may be written.
        repeat: runs of which the median counts.
    """
    flat, base = flatten(state), flatten(before)
    scratch = folder / "torch-save.pt"
    figures = Figures(
        keyframe=_timed(flat, None, repeat),
        delta=_timed(flat, base, repeat),
        torch_save=_median(lambda: torch.save(state, scratch), repeat),
        copy=_median(lambda: snapshot(flat), repeat),
    )
    scratch.unlink()
    return figures


def _timed(flat: FlatState, base: FlatState | None, repeat: int) -> Timed:
    reports: list[SaveReport] = []
    storage = MemoryStorage()
    reference = None if base is None else Reference(snapshot(base).tensors)
    parent = None if base is None else {"name": "memory", "digest": "", "step": 0}

    def encode() -> None:
        written = write_file(storage, KEY, Kept(flat), scheme=Lossless(), reference=reference, parent=parent)
        reports.append(written.report)

    def decode() -> None:
        read_file(storage.open(KEY), KEY, reference)

    seconds = _median(encode, repeat)
    return Timed(reports[-1], seconds, _median(decode, repeat))


def _median(work: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
