"""Saves on threads: `AsyncCheckpointIO` around the plugin, `background=True`, and who reads what is not written yet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_runs import QUIET, Gate, Small, every, names, points, small, trainer
from helpers.strategies import same
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError, StorageError
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.train.lightning import ShrinkIO, latest_valid, load_from_checkpoint

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def state(value: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((64,), float(value))}, "global_step": value}


# AsyncCheckpointIO around ours


@pytest.mark.parametrize(("background", "top"), [(False, 2), (True, 1)])
def test_asynccheckpointio_trains_to_the_end_and_leaves_what_was_asked_for(tmp_path, background, top):
    keep = ModelCheckpoint(
        tmp_path / "all", filename="{step}", save_top_k=top, every_n_train_steps=1, monitor="step", mode="max"
    )
    plugin = AsyncCheckpointIO(ShrinkIO(background=background))
    run = trainer(tmp_path, plugin, epochs=4, callbacks=[keep])
    run.fit(small(width=128), points())
    assert names(tmp_path / "all") == [f"step={step}.ckpt" for step in range(17 - top, 17)]
    assert latest_valid(tmp_path / "all") == tmp_path / "all/step=16.ckpt"
    module = load_from_checkpoint(Small, tmp_path / "all/step=16.ckpt")
    assert same(module.state_dict(), run.lightning_module.state_dict())
    resumed = trainer(tmp_path, AsyncCheckpointIO(ShrinkIO()), epochs=5, callbacks=[every(tmp_path / "all")])
    resumed.fit(small(width=128), points(), ckpt_path=tmp_path / "all/step=16.ckpt")
    assert resumed.global_step == 20


def test_nothing_is_removed_by_another_thread_before_its_successor_is_whole(tmp_path):
    gate = Gate()
    gate.open.set()
    ours = ShrinkIO(gate)
    with ThreadPoolExecutor(1) as queue:
        queue.submit(ours.save_checkpoint, state(1), tmp_path / "1.ckpt").result()
        gate.open.clear()
        gate.entered.clear()
        saves = [queue.submit(ours.save_checkpoint, state(i), tmp_path / f"{i}.ckpt") for i in (2, 3, 4)]
        assert gate.entered.wait(60)
        for i in (1, 2, 3):  # one that is whole, one that is being written, one that is queued
            ours.remove_checkpoint(tmp_path / f"{i}.ckpt")
        verify_directory(tmp_path / "1.ckpt")
        gate.open.set()
        for save in saves:
            save.result()
    assert names(tmp_path) == ["4.ckpt"]
    assert same(ShrinkIO().load_checkpoint(tmp_path / "4.ckpt"), state(4))


def test_what_was_to_be_removed_stays_where_its_successor_failed(tmp_path, caplog):
    gate = Gate()
    gate.open.set()
    ours = ShrinkIO(gate)
    with ThreadPoolExecutor(1) as queue:
        queue.submit(ours.save_checkpoint, state(1), tmp_path / "1.ckpt").result()
        gate.open.clear()
        gate.entered.clear()
        gate.fails = True
        save = queue.submit(ours.save_checkpoint, state(2), tmp_path / "2.ckpt")
        assert gate.entered.wait(60)
        ours.remove_checkpoint(tmp_path / "1.ckpt")
        gate.open.set()
        with pytest.raises(StorageError, match="smoke"):
            save.result()
    assert names(tmp_path) == ["1.ckpt"] == [latest_valid(tmp_path).name] and "1.ckpt is not removed" in caplog.text


def test_a_checkpoint_that_is_saved_again_after_its_removal_stays(tmp_path):
    ours = ShrinkIO()
    with ThreadPoolExecutor(1) as queue:
        for i in (1, 2, 1, 3):
            queue.submit(ours.save_checkpoint, state(i), tmp_path / f"{i}.ckpt").result()
            if i == 2:
                ours.remove_checkpoint(tmp_path / "1.ckpt")
    assert names(tmp_path) == ["1.ckpt", "2.ckpt", "3.ckpt"]


def test_a_checkpoint_whose_removal_was_asked_for_twice_stays_once_it_is_saved_again(tmp_path):
    ours = ShrinkIO()
    with ThreadPoolExecutor(1) as queue:
        queue.submit(ours.save_checkpoint, state(1), tmp_path / "1.ckpt").result()
        for _ in range(2):
            ours.remove_checkpoint(tmp_path / "1.ckpt")
        for i in (1, 2):
            queue.submit(ours.save_checkpoint, state(i), tmp_path / f"{i}.ckpt").result()
    assert names(tmp_path) == ["1.ckpt", "2.ckpt"]


def test_a_scheme_that_evaluates_is_refused_beside_the_loop(tmp_path):
    plugin = AsyncCheckpointIO(ShrinkIO(sp.Fisher(budget="1%", evaluate=lambda module: 1.0)))
    run = trainer(tmp_path, plugin, epochs=1, callbacks=[every(tmp_path / "all")])
    with pytest.raises(PolicyError, match="Leave AsyncCheckpointIO out"):
        run.fit(small(), points())


# nobody comes to wait


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_save_that_no_training_follows_is_waited_for(tmp_path, weights_only):
    model = small()
    run = trainer(tmp_path, ShrinkIO(background=True))
    run.strategy.connect(model)
    for name in ("1.ckpt", "2.ckpt"):
        run.save_checkpoint(tmp_path / name, weights_only=weights_only)
        verify_directory(tmp_path / name)
        assert same(load_from_checkpoint(Small, tmp_path / name).state_dict(), model.state_dict())


def test_a_save_within_a_training_is_not_waited_for(tmp_path):
    gate = Gate()
    plugin = ShrinkIO(gate, background=True)

    class Once(ModelCheckpoint):
        def on_train_batch_end(self, run: Any, *args: Any, **options: Any) -> None:
            if run.global_step == 2:
                run.save_checkpoint(tmp_path / "2.ckpt")
                assert gate.entered.wait(60) and not (tmp_path / "2.ckpt/shrinkpoint.json").exists()
                gate.open.set()

    trainer(tmp_path, plugin, epochs=1, callbacks=[Once(tmp_path / "all", save_top_k=0)]).fit(small(), points())
    verify_directory(tmp_path / "2.ckpt")


@pytest.mark.parametrize(
    ("reads", "link"), [(ShrinkIO().load_checkpoint, False), (lambda path: load_from_checkpoint(Small, path), True)]
)
def test_who_reads_what_another_plugin_is_writing_waits_for_it(tmp_path, reads, link):
    gate, model, reports = Gate(), small(), []
    ours = ShrinkIO(gate, background=True)
    run = trainer(tmp_path)
    run.strategy.connect(model)
    checkpoint = run._checkpoint_connector.dump_checkpoint()
    del checkpoint["loops"]  # nobody knows that it is not training
    ours.save_checkpoint(checkpoint, tmp_path / "1.ckpt")
    path: Path = tmp_path / "1.ckpt"
    if link:
        path = tmp_path / "last.ckpt"
        path.symlink_to("1.ckpt")
    reader = threading.Thread(target=lambda: reports.append(reads(path)))
    assert gate.entered.wait(60)
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    gate.open.set()
    reader.join()
    assert len(reports) == 1
    ours.teardown()
