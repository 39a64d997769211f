"""Measurements of one checkpoint: bytes and seconds without loss, and bytes and loss with a lossy scheme."""

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
from shrinkpoint.schemes.fisher import Fisher
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store
from shrinkpoint.store.checkpoint_file import read_file, write_file
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.tensors.flat_state import FlatState, flatten, snapshot

LOSS_BUDGET = "1%"
"""By how much the lossy scheme may raise the loss."""
_KEY = "checkpoint"


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
class LossyRoundTrip:
    """Two checkpoints saved with a lossy scheme, and the loss before and after the second came back.

    Attributes:
        keyframe, delta: reports of the saves.
        loss: with the weights as they were.
        loss_after: with the weights that came back.
    """

    keyframe: SaveReport
    delta: SaveReport
    loss: float
    loss_after: float

    @property
    def rise(self) -> float:
        """The rise of the loss, relative to the loss."""
        return self.loss_after / self.loss - 1


@dataclass(frozen=True)
class Measurements:
    """Measurements of one state.

    Attributes:
        keyframe: the state encoded as a keyframe.
        delta: the state encoded against the previous checkpoint.
        lossy: the same two checkpoints with `Fisher(budget=LOSS_BUDGET)`.
        torch_save: median seconds of `torch.save` to a file, without fsync.
        torch_save_bytes: the size of that file.
        copy: median seconds to clone every tensor.
    """

    keyframe: TimedRoundTrip
    delta: TimedRoundTrip
    lossy: LossyRoundTrip
    torch_save: float
    torch_save_bytes: int
    copy: float


def measure_checkpoint(
    parent_state: Any, state: Any, directory: Path, evaluate: Callable[[Any], float], *, repeat: int = 3
) -> Measurements:
    """Measures a state as a keyframe, and as a delta against `parent_state`.

    Args:
        parent_state: the state of the previous checkpoint.
        state: the state to encode.
        directory: where a temporary file may be written.
        evaluate: the loss of a state.
        repeat: number of runs; medians are returned.
    """
    flat_state, flat_parent = flatten(state), flatten(parent_state)
    path = directory / "torch-save.pt"
    torch_save = _median_seconds(lambda: torch.save(state, path), repeat)
    torch_save_bytes = path.stat().st_size
    path.unlink()
    return Measurements(
        keyframe=_time_round_trip(flat_state, None, repeat),
        delta=_time_round_trip(flat_state, flat_parent, repeat),
        lossy=_lossy_round_trip(parent_state, state, evaluate),
        torch_save=torch_save,
        torch_save_bytes=torch_save_bytes,
        copy=_median_seconds(lambda: snapshot(flat_state), repeat),
    )


def _lossy_round_trip(parent_state: Any, state: Any, evaluate: Callable[[Any], float]) -> LossyRoundTrip:
    with Store(MemoryStorage()) as store:
        scheme = Fisher(budget=LOSS_BUDGET, evaluate=evaluate)
        keyframe, delta = (store.save(step, saved, scheme=scheme) for step, saved in ((1, parent_state), (2, state)))
        return LossyRoundTrip(keyframe, delta, evaluate(state), evaluate(store.load(2)))


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
