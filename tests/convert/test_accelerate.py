"""Directories of Accelerate, written and read by Accelerate itself."""

from __future__ import annotations

import pytest
from helpers import accelerate_runs
from helpers.accelerate_runs import Loop
from helpers.foreign_files import bytes_of

from shrinkpoint.train.accelerate import save_state

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("no_accelerator"),
]


def test_a_project_of_accelerate_comes_back_and_is_loaded(convert, tmp_path):
    loop = Loop(tmp_path / "a").epoch()
    loop.accelerator.save_state()
    loop.epoch().accelerator.save_state()
    wanted = loop.steps(2).state()
    said = convert(tmp_path / "a", tmp_path / "store")
    assert [row["name"] for row in said["checkpoints"]] == ["checkpoint_0", "checkpoint_1"]
    convert(tmp_path / "store", tmp_path / "b")
    here, back = bytes_of(tmp_path / "a" / "checkpoints"), bytes_of(tmp_path / "b")
    assert here.keys() == back.keys()
    accelerate_runs.forget()
    other = Loop(seed=3)
    other.accelerator.load_state(str(tmp_path / "b" / "checkpoint_1"))
    other.loader.iteration = loop.loader.iteration
    assert other.steps(2).state() == wanted


def test_a_checkpoint_of_ours_is_loaded_by_the_stock_accelerator(convert, tmp_path):
    loop = Loop().epoch()
    save_state(loop.accelerator, tmp_path / "a")
    wanted = loop.steps(2).state()
    convert(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / "shrinkpoint.json").exists()
    accelerate_runs.forget()
    other = Loop(seed=3)
    other.accelerator.load_state(str(tmp_path / "b"))
    other.loader.iteration = loop.loader.iteration
    assert other.steps(2).state() == wanted
