"""Checkpoints of a Trainer that are not whole: passed over, and said; or, where they are named, an error."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from helpers.huggingface import WEIGHTS, ended, lay, made, steps, whole
from helpers.strategies import same
from transformers import Trainer

from shrinkpoint.errors import ChainError, FormatError, MismatchError, NotFoundError
from shrinkpoint.store.directory import is_checkpoint
from shrinkpoint.train import CheckpointManager
from shrinkpoint.train.transformers import ShrinkTrainer, latest_valid


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return lay(tmp_path / "run", ShrinkTrainer)


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return lay(tmp_path / "stock", Trainer)


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "no manifest": lambda folder: (folder / "shrinkpoint.json").unlink(),
    "no payload": lambda folder: (folder / "rank-00000.safetensors").unlink(),
    "no base": lambda folder: next((folder / "bases").iterdir()).unlink(),
    "half a payload": lambda folder: (folder / "rank-00000.safetensors").write_bytes(
        (folder / "rank-00000.safetensors").read_bytes()[:1000]
    ),
    "a bit of a payload": lambda folder: flip(folder / "rank-00000.safetensors", 0.9),
    "a bit of the manifest": lambda folder: flip(folder / "shrinkpoint.json", 0.5),
    "a bit of trainer_state.json": lambda folder: flip(folder / "trainer_state.json", 0.3),
    "no trainer_state.json": lambda folder: (folder / "trainer_state.json").unlink(),
    "cut short by SIGTERM": lambda folder: (folder / "checkpoint-is-incomplete.txt").write_text("..."),
    "an empty directory": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


OF_THE_TRAINER = [name for name in DAMAGES if "trainer_state" in name or name.startswith(("cut", "an empty"))]
"""Damages that no other framework knows."""


@pytest.mark.parametrize("damage", OF_THE_TRAINER)
def test_the_older_whole_checkpoint_is_found_and_it_is_said_aloud(run, damage, caplog):
    DAMAGES[damage](run / "checkpoint-8")
    with caplog.at_level(logging.WARNING, "shrinkpoint"):
        assert latest_valid(run) == str(run / "checkpoint-6")
    assert "checkpoint-8 is passed over" in caplog.text


@pytest.mark.parametrize("damage", ["no base", "half a payload", "a bit of the manifest", *OF_THE_TRAINER])
def test_a_broken_checkpoint_that_is_named_is_an_error(run, damage):
    DAMAGES[damage](run / "checkpoint-8")
    with pytest.raises((FormatError, ChainError)):
        made(ShrinkTrainer, run).train(resume_from_checkpoint=str(run / "checkpoint-8"))


@pytest.mark.parametrize("damage", ["no manifest", "a bit of a payload"])
def test_a_run_goes_on_from_the_older_whole_checkpoint(run, damage):
    DAMAGES[damage](run / "checkpoint-8")
    assert same(ended(made(ShrinkTrainer, run), True), whole()) and latest_valid(run) == str(run / "checkpoint-8")


def test_resuming_from_the_directory_of_a_run_names_a_checkpoint_in_it(run):
    with pytest.raises(FormatError, match="no checkpoint, but checkpoint-8 in it"):
        made(ShrinkTrainer, run).train(resume_from_checkpoint=str(run))


def test_where_none_is_whole_nothing_is_resumed(run):
    for folder in run.glob("checkpoint-*"):
        DAMAGES["half a payload"](folder)
    with pytest.raises(NotFoundError, match="none of them valid"):
        made(ShrinkTrainer, run).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "model.safetensors"])
def test_a_stock_checkpoint_without_one_of_its_files_is_passed_over(stock, lost):
    assert latest_valid(stock) == str(stock / "checkpoint-4")
    (stock / "checkpoint-4" / lost).unlink()
    assert latest_valid(stock) == str(stock / "checkpoint-2")


@pytest.mark.parametrize("lost", ["optimizer.pt", "rng_state.pth", "model.safetensors"])
def test_half_a_stock_checkpoint_is_passed_over(stock, lost):
    path = stock / "checkpoint-4" / lost
    path.write_bytes(path.read_bytes()[:-200])
    assert latest_valid(stock) == str(stock / "checkpoint-2")


@pytest.mark.parametrize("has_crc", [True, False])
def test_checksums_of_stock_files_are_compared_where_torch_wrote_some(stock, has_crc, caplog):
    path = stock / "checkpoint-4" / "optimizer.pt"
    torch.serialization.set_crc32_options(has_crc)
    try:
        torch.save(torch.load(path, weights_only=True), path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert latest_valid(stock) == str(stock / "checkpoint-4")
    flip(path, 0.5)
    with caplog.at_level(logging.WARNING, "shrinkpoint"):
        assert latest_valid(stock) == str(stock / ("checkpoint-2" if has_crc else "checkpoint-4"))
    assert ("Bad CRC-32" in caplog.text) == has_crc


def test_stock_files_of_another_run_do_not_stay_beside_a_checkpoint(stock):
    made(ShrinkTrainer, stock, max_steps=4).train()
    assert is_checkpoint(stock / "checkpoint-4")
    assert not any((stock / "checkpoint-4" / name).exists() for name in WEIGHTS)


def test_a_stock_save_over_a_checkpoint_is_noticed(run):
    made(Trainer, run, max_steps=8, save_steps=8, logging_steps=1).train()
    assert latest_valid(run) == str(run / "checkpoint-6")  # the payload of the last is not what lies beside it


def test_a_run_that_was_killed_in_its_first_save_begins_anew(run):
    for step in (2, 4, 6):
        shutil.rmtree(run / f"checkpoint-{step}", ignore_errors=True)
    DAMAGES["no manifest"](run / "checkpoint-8")
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-8"]
    assert latest_valid(run) is None
    with pytest.raises(ValueError, match="none of them valid"):  # who says that there is one is told that there is not
        made(ShrinkTrainer, run).train(resume_from_checkpoint=True)


@pytest.mark.filterwarnings("ignore:.*was saved below")
@pytest.mark.parametrize("limit", [1, 2])
def test_a_run_that_goes_back_keeps_what_it_saves_whatever_the_clock_says(run, limit):
    later = time.time() + 3600
    for path in run.iterdir():
        os.utime(path, (later, later))
    trainer = made(ShrinkTrainer, run, max_steps=7, save_steps=1, save_total_limit=limit)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert steps(run) == [6, 7][-limit:] and latest_valid(run) == str(run / "checkpoint-7")


def test_the_store_of_a_checkpoint_manager_is_no_run_without_checkpoints(run, tmp_path):
    with CheckpointManager(tmp_path / "store") as manager:
        manager.save(1, model=torch.nn.Linear(2, 2))
    with pytest.raises(MismatchError, match=r"a checkpoint in a store.*by a CheckpointManager"):
        latest_valid(tmp_path / "store")
    with CheckpointManager(run) as manager:
        with pytest.raises(MismatchError, match="the run of a framework, with checkpoint-8"):
            manager.restore(model=torch.nn.Linear(2, 2))
        manager.save(1, model=torch.nn.Linear(2, 2))  # writes over nothing
    assert latest_valid(run) == str(run / "checkpoint-8")
