"""Measurements of one checkpoint: its bytes, seconds and loss, without loss and with a lossy scheme."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.fisher import Fisher
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.store import Store

LOSS_BUDGET = "1%"
"""By how much the lossy scheme may raise the loss."""
_PARENT, _STEP = 1, 2


@dataclass(frozen=True)
class SaveFigures:
    """What one checkpoint takes.

    Attributes:
        stored_bytes: of its file.
        save, load: median seconds, from and to live tensors, through a file system. A lossy save evaluates, too.
    """

    stored_bytes: int
    save: float
    load: float


@dataclass(frozen=True)
class Measurements:
    """Measurements of one state.

    Attributes:
        torch_save: of `torch.save`, made durable, and `torch.load`.
        lossless: of a delta to the previous checkpoint.
        lossy: of such a delta with `Fisher(budget=LOSS_BUDGET)`.
        loss: with the weights as they were.
        loss_after: with the weights that the lossy checkpoint gives back.
        evaluation: seconds of one evaluation of the loss.
    """

    torch_save: SaveFigures
    lossless: SaveFigures
    lossy: SaveFigures
    loss: float
    loss_after: float
    evaluation: float

    @property
    def rise(self) -> float:
        """The rise of the loss, relative to the loss."""
        return self.loss_after / self.loss - 1


def measure_checkpoint(
    parent_state: Any, state: Any, directory: Path, evaluate: Callable[[Any], float], *, repeat: int = 3
) -> Measurements:
    """Measures a state as a delta against `parent_state`, beside `torch.save`.

    Args:
        parent_state: the state of the previous checkpoint.
        state: the state to save.
        directory: where temporary files may be written.
        evaluate: the loss of a state.
        repeat: number of runs; medians are returned.
    """
    lossless, _ = _measure_delta(parent_state, state, directory, Lossless, repeat)
    lossy, restored = _measure_delta(
        parent_state, state, directory, lambda: Fisher(budget=LOSS_BUDGET, evaluate=evaluate), repeat
    )
    plain = _measure_torch_save(state, directory / "torch-save.pt", repeat)
    evaluation = median(_seconds(lambda: evaluate(state)) for _ in range(repeat))
    return Measurements(plain, lossless, lossy, evaluate(state), evaluate(restored), evaluation)


def _measure_torch_save(state: Any, path: Path, repeat: int) -> SaveFigures:
    def save() -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    seconds = median(_seconds(save) for _ in range(repeat))
    # this process has just written the file, and random generators have a state of NumPy's
    load = median(_seconds(lambda: torch.load(path, weights_only=False)) for _ in range(repeat))
    size = path.stat().st_size
    path.unlink()
    return SaveFigures(size, seconds, load)


def _measure_delta(
    parent_state: Any, state: Any, directory: Path, make_scheme: Callable[[], Scheme], repeat: int
) -> tuple[SaveFigures, Any]:
    """What a delta takes, and the state that it gives back."""
    saves, loads, size, restored = [], [], 0, None
    for number in range(repeat):
        scheme = make_scheme()
        with Store(directory / f"measured-{scheme.id}-{number}") as store:
            store.save(_PARENT, parent_state, scheme=scheme)
            began = time.perf_counter()
            size = store.save(_STEP, state, scheme=scheme).stored_bytes
            saves.append(time.perf_counter() - began)
            began = time.perf_counter()
            restored = store.load(_STEP)
            loads.append(time.perf_counter() - began)
    return SaveFigures(size, median(saves), median(loads)), restored


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
