"""Promise: a run that goes back to an older step keeps what it saves from then on, and resumes from that."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from helpers.stores import Linkless
from torch import nn
from typer.testing import CliRunner

from shrinkpoint import CheckpointManager, Keep, Store
from shrinkpoint.cli.app import app
from shrinkpoint.storage import LocalStorage, Storage
from shrinkpoint.store.mirror import Mirror
from shrinkpoint.train import Checkpointer, FixedIntervalPolicy
from shrinkpoint.train.dcp import Manager, Writer
from shrinkpoint.train.dcp import latest_valid as latest_valid_of_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Run(Protocol):
    """A process that trains: it saves, goes back, and keeps the newest checkpoints."""

    def save(self, step: int) -> None: ...

    def restore(self, step: int | None = None) -> int: ...

    def steps(self) -> list[int]: ...


class StoreRun:
    """A process with a manager."""

    def __init__(self, place: Path | Storage, last: int, **options: Any) -> None:
        self.manager = CheckpointManager(place, keep=Keep(last=last), keyframe_every=1, **options)
        self._model = nn.Linear(3, 3)

    def save(self, step: int) -> None:
        self.manager.save(step, model=self._model)
        self.manager.wait()

    def restore(self, step: int | None = None) -> int:
        restored = self.manager.restore(step, model=self._model)
        assert restored is not None
        return restored.step

    def steps(self) -> list[int]:
        return [*self.manager.store.steps()]


class DcpRun:
    """A process with a manager of sharded states."""

    def __init__(self, place: Path, last: int) -> None:
        self._root, self._manager, self._model = place, Manager(place, keep=last), nn.Linear(3, 3)

    def save(self, step: int) -> None:
        self._manager.save(step, model=self._model)

    def restore(self, step: int | None = None) -> int:
        restored = self._manager.restore(step, model=self._model)
        assert restored is not None
        return restored.step

    def steps(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self._root.iterdir())


RUNS: dict[str, Callable[[Path, int], Run]] = {
    "directory": StoreRun,
    "background": lambda path, last: StoreRun(path, last, background=True),
    "dcp": DcpRun,
}


@contextmanager
def process(kind: str, path: Path, last: int) -> Iterator[Run]:
    run = RUNS[kind](path, last)
    yield run
    if isinstance(run, StoreRun):
        run.manager.close()


def set_clock_back(path: Path) -> None:
    """Let all that is there look as if it had been written in an hour."""
    later = time.time() + 3600
    for file in path.rglob("*"):
        os.utime(file, (later, later))


@pytest.mark.filterwarnings("ignore:.*was saved below")
@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("kind", RUNS)
class TestAfterGoingBack:
    def test_no_save_deletes_its_own_checkpoint(self, tmp_path: Path, kind: str, last: int) -> None:
        with process(kind, tmp_path, 3) as run:
            for step in (1000, 2000, 3000):
                run.save(step)
        set_clock_back(tmp_path)
        with process(kind, tmp_path, last) as run:
            assert run.restore(2000) == 2000
            for step in (2100, 2200, 2300):
                run.save(step)
                assert step in run.steps() and run.restore() == step
            assert run.steps() == [2100, 2200, 2300][-last:]

    def test_what_was_left_behind_goes_first(self, tmp_path: Path, kind: str, last: int) -> None:
        with process(kind, tmp_path, 3) as run:
            for step in (1000, 2000, 3000):
                run.save(step)
        with process(kind, tmp_path, last) as run:
            run.restore(2000)
            run.save(4000)  # beyond it
            assert run.steps() == ([4000] if last == 1 else [2000, 4000])

    def test_a_new_process_goes_on_with_the_line_that_was_saved_last(
        self, tmp_path: Path, kind: str, last: int
    ) -> None:
        with process(kind, tmp_path, 5) as run:
            for step in (1000, 2000, 3000):
                run.save(step)
            run.restore(1000)
            run.save(1100)
        with process(kind, tmp_path, last) as run:
            assert run.restore() == 1100
            run.save(1200)
            assert run.steps() == ([1200] if last == 1 else [1100, 1200])

    def test_a_new_run_in_an_old_directory_keeps_what_it_saves(self, tmp_path: Path, kind: str, last: int) -> None:
        with process(kind, tmp_path, 3) as run:
            for step in (1000, 2000, 3000):
                run.save(step)
        with process(kind, tmp_path, last) as run:
            for step in (10, 20):
                run.save(step)
                assert step in run.steps()
        with process(kind, tmp_path, last) as run:
            assert run.restore() == 20


def test_newer_checkpoints_are_named_in_one_warning(tmp_path: Path) -> None:
    with process("directory", tmp_path, 9) as run:
        for step in (1, 2, 3, 4):
            run.save(step)
        run.restore(2)
        with pytest.warns(UserWarning, match="step 3 was saved below step 4: a restore takes") as caught:
            run.save(3)
            run.save(5)
            run.restore(2)
            run.save(3)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_save_below_newer_steps_is_no_error_where_warnings_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with process("directory", tmp_path, 9) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save(2)
        run.restore(2)
        run.save(1)
        assert run.restore() == 1 and "was saved below step 2" in caplog.text


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_a_damaged_checkpoint_is_replaced_by_the_one_before_it_on_its_line(tmp_path: Path) -> None:
    with process("directory", tmp_path, 9) as run:
        for step in (1000, 2000, 3000):
            run.save(step)
        run.restore(2000)
        run.save(2100)
    (tmp_path / "step-000002100" / "rank-00000.safetensors").write_bytes(b"")
    with process("directory", tmp_path, 9) as run:
        assert run.restore() == 2000


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_a_mirror_follows_the_line_that_was_saved_last(tmp_path: Path) -> None:
    mirror = Linkless()
    first = StoreRun(tmp_path / "run", 2, mirror=mirror)
    for step in (1000, 2000, 3000):
        first.save(step)
    first.manager.flush()
    first.restore(2000)
    first.save(2100)
    first.manager.close()
    assert [*Store(mirror).steps()] == [2000, 2100] and Store(mirror).restore().step == 2100
    elsewhere = StoreRun(tmp_path / "elsewhere", 2, mirror=mirror)
    assert elsewhere.restore() == 2100
    elsewhere.manager.close()


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_rules_and_commands_go_by_the_order_of_saving(tmp_path: Path) -> None:
    model, metrics = nn.Linear(99, 99), {"val_loss": 1.0}
    optimizer = torch.optim.Adam(model.parameters())
    with CheckpointManager(tmp_path, keyframe_every=1) as manager:
        for step in (1, 2, 3, 2):
            if manager.store.line.step == 3:
                manager.restore(1, model=model)
            model(torch.randn(9, 99)).square().sum().backward()
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer, metrics=metrics)
    with Store(tmp_path) as store:
        assert store.manifest().step == 2
        assert store.prune(Keep(best=1)).keep == (2,)  # of equals the newer one
        assert store.prune(Keep(last=3, moments_last=1), compact=True).weights_only == (1, 3)
    shown = CliRunner().invoke(app, ["show", str(tmp_path)]).output
    assert "step 2" in shown
    pruned = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "2", "--apply"])
    assert pruned.exit_code == 0 and [*Store(tmp_path).steps()] == [1, 2]
    listed = CliRunner().invoke(app, ["list", str(tmp_path)]).output
    assert "left behind" not in listed


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_list_marks_what_a_run_left_behind(tmp_path: Path) -> None:
    with process("directory", tmp_path, 9) as run:
        for step in (1, 2, 3):
            run.save(step)
        run.restore(1)
        run.save(4)
    listed = CliRunner().invoke(app, ["list", str(tmp_path)], env={"COLUMNS": "200"}).output.splitlines()
    assert ["left behind" in line for line in listed if "keyframe" in line] == [False, True, True, False]


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_a_schedule_saves_again_what_is_trained_again(tmp_path: Path) -> None:
    model, policy = nn.Linear(3, 3), FixedIntervalPolicy(10)
    with CheckpointManager(tmp_path, save_decision_policy=policy) as manager:
        for step in (10, 20, 30):
            assert manager.should_save(step)
            manager.save(step, model=model)
        manager.restore(10, model=model)
        assert not manager.should_save(10) and manager.should_save(20)
    with CheckpointManager(tmp_path, save_decision_policy=policy) as manager:
        manager.restore(10, model=model)
        assert not manager.should_save(10) and manager.should_save(20) and manager.should_save(30)


def test_a_part_that_is_restored_is_no_rollback(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with CheckpointManager(tmp_path, keep=Keep(last=2)) as manager:
        for step in (1, 2):
            manager.save(step, model=model)
        manager.restore(1, model=model, only=["0.*"])
        manager.save(3, model=model)
        assert manager.store.manifest(3).abandoned == ()


def test_files_of_earlier_releases_are_ordered_by_their_steps(tmp_path: Path) -> None:
    with process("directory", tmp_path, 9) as run:
        for step in (5, 7):
            run.save(step)
    assert b"sequence" not in (tmp_path / "step-000000007" / "manifest.json").read_bytes()
    assert not (tmp_path / "rollback").exists() and Store(tmp_path).restore().step == 7


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_a_mirror_has_the_mark_of_a_rollback_before_the_manifest(tmp_path: Path) -> None:
    with process("directory", tmp_path / "run", 9) as run:
        run.save(2)
        run.restore(2)
        run.save(1)
    target = Linkless()
    mirror = Mirror(LocalStorage(tmp_path / "run"), target)
    mirror.begin()
    for manifest in mirror.missing():
        mirror.copy(manifest)
    assert Store(target).restore().step == 1


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_directories_with_names_of_a_framework_have_the_order_of_saving(tmp_path: Path) -> None:
    for steps in ((10, 20, 30), (12,)):
        with Checkpointer() as checkpointer:
            if steps == (12,):
                checkpointer.load(tmp_path / "step-10")
            for step in steps:
                checkpointer.save(tmp_path / f"step-{step}", {"step": step}, step=step)
    set_clock_back(tmp_path / "step-30")
    assert latest_valid_of_dcp(tmp_path) == tmp_path / "step-12"


@pytest.mark.filterwarnings("ignore:.*was saved below")
def test_dcp_save_orders_directories_that_the_caller_names(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    for step in (1, 2, 3, 1):
        torch.distributed.checkpoint.save(state, storage_writer=Writer(tmp_path / f"step-{step}", step=step))
    assert latest_valid_of_dcp(tmp_path) == tmp_path / "step-1"
