"""Series of checkpoints to measure on: those of files and stores, or a small training run; and their quality."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.errors import NotFoundError
from shrinkpoint.progress import track
from shrinkpoint.schemes.evaluate import call_evaluate, scale_of
from shrinkpoint.storage import is_object_url
from shrinkpoint.storage.paths import parse_object_url
from shrinkpoint.store import Store
from shrinkpoint.store.file_place import find_object
from shrinkpoint.store.load import load
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint_lab.demo.workload import GPT, Batches, GPTConfig, stdlib_text


@dataclass
class QualityFunction:
    """A user's quality function, and its values for the states of a series, each computed once.

    Attributes:
        evaluate: maps a state, as it was saved, to a loss or a score; it returns the same for the same state.
        higher_is_better: `evaluate` returns a score, not a loss.
    """

    evaluate: Callable[[Any], Any] = field(repr=False)
    higher_is_better: bool = False
    _values: dict[int, float] = field(default_factory=dict, repr=False)

    def value_of(self, state: Any) -> float:
        """Evaluates a state.

        Raises:
            PolicyError: `evaluate` raises, or returns no number.
        """
        with torch.no_grad():
            return call_evaluate(self.evaluate, state).value

    def value_at_step(self, step: int, state: Any) -> float:
        """The value of the state of a step; evaluated once."""
        if step not in self._values:
            self._values[step] = self.value_of(state)
        return self._values[step]

    def rise(self, original: float, decoded: float) -> float:
        """By how much the decoded state's value is worse, relative to the original's."""
        change = original - decoded if self.higher_is_better else decoded - original
        return change / scale_of(original)


@dataclass(frozen=True)
class SeriesEntry:
    """One checkpoint of a series.

    Attributes:
        step: its training step; steps rise along a series.
        state: any nest of tensors and plain values, as it was saved.
    """

    step: int
    state: Any = field(repr=False)


class Series(Protocol):
    """Checkpoints in order, of which one at a time is in memory."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[SeriesEntry]: ...


@dataclass(frozen=True)
class StoreSeries:
    """The checkpoints of a store, which should be lossless."""

    store: Store
    name: str = "store"

    def __len__(self) -> int:
        return len(self.store.steps())

    def __iter__(self) -> Iterator[SeriesEntry]:
        for step in self.store.steps():
            yield SeriesEntry(step, self.store.load(step, keep=False))


@dataclass(frozen=True)
class FileSeries:
    """Checkpoint files in the given order: those of this library, or any safetensors files."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        return self.paths[0].parent.name or str(self.paths[0])

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[SeriesEntry]:
        for step, path in enumerate(self.paths, 1):
            yield SeriesEntry(step, load(path))


def open_series(paths: Sequence[Path]) -> Series:
    """Opens one store, or several files, as a series; URLs of object storage are taken, too.

    Raises:
        NotFoundError: a path does not exist, or the store has no checkpoints.
    """
    if len(paths) == 1 and (paths[0].is_dir() or (is_object_url(paths[0]) and not _is_file(paths[0]))):
        series = StoreSeries(Store(paths[0]), paths[0].name)
        if not len(series):
            where = series.store.storage.describe()
            raise NotFoundError(where, found="no checkpoint", expected="a store with checkpoints", do="save one first")
        return series
    for path in paths:
        if not _is_file(path):
            found = "a directory" if path.is_dir() else "nothing"
            expected = "one store, or files of checkpoints in their order"
            raise NotFoundError(str(path), found=found, expected=expected, do="name one store, or files")
    return FileSeries(tuple(paths))


def _is_file(path: Path) -> bool:
    """True if there is a file; in a bucket, an object."""
    return find_object(parse_object_url(path)) is not None if is_object_url(path) else path.is_file()


MODEL_CONFIG = GPTConfig(layers=4, width=192, heads=6, context=64, dropout=0.0)


@dataclass(frozen=True)
class SampleRunOptions:
    """Options of the sample run, by default 1.8 M parameters trained with AdamW (betas 0.9 and 0.95).

    Attributes:
        steps: steps of the training.
        save_every: steps between two checkpoints.
        first_save: step of the first checkpoint.
        batch: sequences in a batch.
        held_out: sequences in the evaluation.
        config: sizes of the model.
        seed: seed of every random generator.
    """

    steps: int = 200
    save_every: int = 25
    first_save: int = 100
    batch: int = 8
    held_out: int = 64
    config: GPTConfig = MODEL_CONFIG
    seed: int = 1


def record_sample_run(
    directory: Path, options: SampleRunOptions, on_step: Callable[[int, float], None] | None = None
) -> tuple[StoreSeries, QualityFunction]:
    """Trains a model, saves its checkpoints losslessly, and returns them with the loss on held-out text.

    The state of the random generators is restored afterwards.

    Args:
        directory: the store of the checkpoints.
        options: how to train.
        on_step: called with each step and its loss.
    """
    rng_state = get_rng_state()
    try:
        return _train_and_save(directory, options, on_step)
    finally:
        set_rng_state(rng_state)


def _train_and_save(
    directory: Path, options: SampleRunOptions, on_step: Callable[[int, float], None] | None
) -> tuple[StoreSeries, QualityFunction]:
    torch.manual_seed(options.seed), random.seed(options.seed), np.random.seed(options.seed)
    text = stdlib_text()
    border = len(text) * 9 // 10
    model = GPT(options.config)
    optimizer = torch.optim.AdamW(model.param_groups(weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
    batches = Batches(text[:border], size=options.batch, context=options.config.context, seed=options.seed)
    store = Store(directory, keyframe_every=None)
    with store:
        for step in track(range(1, options.steps + 1), "training a small GPT"):
            loss = model(*batches.draw())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step >= options.first_save and (step - options.first_save) % options.save_every == 0:
                store.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if on_step is not None:
                on_step(step, loss.item())
    return StoreSeries(store, "a small GPT"), QualityFunction(_HeldOutLoss(options, text[border:]))


class _HeldOutLoss:
    """Computes the mean cross-entropy of a state on fixed sequences of held-out text."""

    def __init__(self, options: SampleRunOptions, text: bytes) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        length = options.config.context
        generator = torch.Generator().manual_seed(options.seed + 1)
        starts = torch.randint(len(data) - length - 1, (options.held_out,), generator=generator)
        windows = data[starts[:, None] + torch.arange(length + 1)]
        self._inputs, self._targets = windows[:, :-1], windows[:, 1:].contiguous()
        self._model = GPT(options.config).eval()

    def __call__(self, state: Any) -> Tensor:
        self._model.load_state_dict(state["model"])
        with torch.no_grad():
            loss: Tensor = self._model(self._inputs, self._targets)
        return loss
