"""A save never ends a run that could go on: where memory or `evaluate` fails, the checkpoint is exact, and says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.parameters import each_value
from helpers.small_training import Run
from helpers.strategies import difference

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHORTAGES: dict[str, Callable[[], Exception]] = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB"),
    "host": MemoryError,
    "torch on the host": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
}


def state_of(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


class ManagerPlace:
    """Saves by `CheckpointManager`."""

    def __init__(self, folder: Path, scheme: Any, background: bool) -> None:
        self.saver = sp.CheckpointManager(folder, scheme=scheme, background=background)

    def save(self, step: int, run: Run) -> dict[str, Any]:
        self.saver.save(step, **run.parts, rng=False)
        return self.saver.wait().loss_report

    def load(self, step: int) -> Any:
        return self.saver.store.load(step)


class DirectoryPlace:
    """Saves by what Hugging Face, Lightning and Accelerate save with."""

    def __init__(self, folder: Path, scheme: Any, background: bool) -> None:
        self.folder, self.saver = folder, Checkpointer(scheme=scheme, background=background)

    def save(self, step: int, run: Run) -> dict[str, Any]:
        self.saver.save(self.folder / str(step), state_of(run), objects={"model": run.model}, step=step)
        return self.saver.wait().loss_report

    def load(self, step: int) -> Any:
        return sp.load(self.folder / str(step))


class DcpPlace:
    """Saves by torch.distributed.checkpoint, as a single process."""

    def __init__(self, folder: Path, scheme: Any, background: bool) -> None:
        self.folder, self.scheme = folder, scheme

    def save(self, step: int, run: Run) -> dict[str, Any]:
        reports = []
        writer = Writer(self.folder / str(step), scheme=self.scheme, model=run.model, on_save=reports.append)
        dcp.save({"model": run.model.state_dict()}, storage_writer=writer, no_dist=True)
        return reports[0].loss_report

    def load(self, step: int) -> Any:
        model = Run().model.state_dict()
        dcp.load({"model": model}, storage_reader=Reader(self.folder / str(step)), no_dist=True)
        return {"model": model}


PLACES: dict[str, Callable[[Path, Any], Any]] = {
    "manager": lambda folder, scheme: ManagerPlace(folder, scheme, False),
    "manager in the background": lambda folder, scheme: ManagerPlace(folder, scheme, True),
    "directories": lambda folder, scheme: DirectoryPlace(folder, scheme, False),
    "directories in the background": lambda folder, scheme: DirectoryPlace(folder, scheme, True),
    "dcp": lambda folder, scheme: DcpPlace(folder, scheme, False),
}


def assert_exact(place: Any, step: int, state: Any) -> None:
    loaded = place.load(step)
    names = state.keys() & loaded.keys()
    assert difference({name: state[name] for name in names}, {name: loaded[name] for name in names}) is None


@pytest.mark.filterwarnings("ignore:the loss is not measured")
@pytest.mark.parametrize(("place", "shortage"), each_value(PLACES, SHORTAGES))
def test_planning_without_memory_makes_one_checkpoint_exact(tmp_path, monkeypatch, place, shortage):
    run, scheme = Run(steps=5), sp.Fisher(nats=0.01, terms=128)
    saves = PLACES[place](tmp_path, scheme)
    saves.save(1, run)
    state = copy.deepcopy(state_of(run.steps(1)))

    def fail(*_: Any, **__: Any) -> Any:
        raise SHORTAGES[shortage]()

    monkeypatch.setattr(sp.Fisher, "_quantize_weights", fail)
    with pytest.warns(LossWarning, match="out of memory while planning .* so this checkpoint is exact"):
        assert "out of memory while planning" in saves.save(2, run)["exact"]
    monkeypatch.undo()
    assert saves.save(3, run.steps(1))["chosen"] is not None
    assert_exact(saves, 2, state)


@pytest.mark.parametrize(
    ("place", "scheme"),
    each_value([name for name in PLACES if name != "dcp"], ["lossless", "excp", "fisher(relative_error=.3)"]),
)
@pytest.mark.filterwarnings("ignore:the loss is not measured")
def test_encoding_without_memory_is_tried_once_more(tmp_path, monkeypatch, place, scheme):
    run = Run(steps=5)
    saves, encode, failures = PLACES[place](tmp_path, scheme), RecordEncodingMixin.encode, [MemoryError()]
    saves.save(1, run)
    state = copy.deepcopy(state_of(run.steps(1)))

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        while failures:
            raise failures.pop()
        return encode(*args, **kwargs)

    monkeypatch.setattr(RecordEncodingMixin, "encode", fail_once)
    with pytest.warns(UserWarning, match="out of memory while writing"):
        saves.save(2, run)
    saves.save(3, run.steps(1))
    assert not failures and saves.load(3) is not None
    if scheme == "lossless":
        assert_exact(saves, 2, state)
    assert saves.load(2) is not None


FAILURES: dict[str, Callable[[], Any]] = {
    "broken file": lambda: (_ for _ in ()).throw(OSError("no such batch")),
    "device without memory": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    "host without memory": lambda: (_ for _ in ()).throw(MemoryError()),
    "none": lambda: None,
    "two elements": lambda: torch.ones(2, 1),
}


@pytest.mark.parametrize(
    ("place", "fault"), each_value(PLACES, [*((name, 0) for name in FAILURES), ("broken file", 1), ("none", 4)])
)
def test_evaluate_that_fails_makes_one_checkpoint_exact(tmp_path, place, fault):
    run, is_broken, calls = Run(steps=20), [True], []
    failure, call = fault

    def evaluate(model: Any) -> Any:
        calls.append(1)
        return FAILURES[failure]() if is_broken and len(calls) > call else run.evaluate(model)

    saves = PLACES[place](tmp_path, sp.Inshrinkerator(threshold=0.02, evaluate=evaluate))
    state = copy.deepcopy(state_of(run))
    with pytest.warns(LossWarning, match="could not be measured: .*Error"):
        assert "could not be measured" in saves.save(1, run)["exact"]
    is_broken.clear()
    assert "exact" not in saves.save(2, run)
    assert_exact(saves, 1, state)


@pytest.mark.parametrize(("failure", "call"), each_value(FAILURES, [0, 1, 2]))
def test_fisher_learns_nothing_of_an_evaluate_that_fails(failure, call):
    run, is_broken, calls = Run(steps=20), [True], []

    def evaluate(model: Any) -> Any:
        calls.append(1)
        return FAILURES[failure]() if is_broken and len(calls) > call else run.evaluate(model)

    scheme = sp.Fisher(budget="1%", evaluate=evaluate)
    state = copy.deepcopy(state_of(run))
    with sp.CheckpointManager(sp.storage.MemoryStorage(), scheme=scheme) as manager:
        with pytest.warns(LossWarning, match="could not be measured"):
            report = manager.save(1, **run.parts)
        assert report.loss_report["terms"] is None and report.loss_report["rise"] is None
        loaded = manager.store.load(1)
        is_broken.clear()
        assert manager.save(2, **run.parts).loss_report["chosen"] is not None
    assert difference(state, {name: loaded[name] for name in state}) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_within_evaluate_ends_the_save(error):
    def evaluate(model: Any) -> Any:
        raise error

    run = Run(steps=1)
    with (
        pytest.raises(error),
        sp.CheckpointManager(sp.storage.MemoryStorage(), scheme=sp.Fisher(evaluate=evaluate)) as manager,
    ):
        manager.save(1, **run.parts)
