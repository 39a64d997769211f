"""What there is at a path: one checkpoint or a run, in the order of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.foreign_files import run_of_files
from safetensors.torch import save_file

from shrinkpoint import save
from shrinkpoint.convert.discover import discover, is_new_store, is_store
from shrinkpoint.errors import CorruptError, NotFoundError, PolicyError
from shrinkpoint.store import Store


def _steps(run):
    return [(one.step, one.name) for one in run.checkpoints]


def test_files_are_a_run_in_the_order_of_their_numbers(tmp_path):
    run = discover(run_of_files(tmp_path / "run", (100, 20, 3)))
    assert _steps(run) == [(3, "step-3.pt"), (20, "step-20.pt"), (100, "step-100.pt")]


def test_directories_are_a_run_and_what_is_none_is_named(tmp_path):
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "logs").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    run = discover(tmp_path)
    assert _steps(run) == [(500, "checkpoint-500"), (1000, "checkpoint-1000")]
    assert [path.name for path in run.ignored_paths] == ["checkpoint-7", "logs", "model.safetensors"]


def test_another_name_of_a_checkpoint_is_not_named(tmp_path):
    run_of_files(tmp_path / "run")
    (tmp_path / "run" / "last.pt").symlink_to("step-30.pt")
    (tmp_path / "run" / "best.pt").hardlink_to(tmp_path / "run" / "step-20.pt")
    assert not discover(tmp_path / "run").ignored_paths


def test_shards_and_ranks_are_no_run(tmp_path):
    for rank in range(2):
        save_file({f"w{rank}": torch.ones(2)}, tmp_path / f"model-0000{rank}-of-00002.safetensors")
        torch.save({}, tmp_path / f"rng_state_{rank}.pth")
    assert _steps(discover(tmp_path)) == [(0, tmp_path.name)]


def test_files_named_by_their_step_are_a_run_and_a_link_to_nothing_is_named(tmp_path):
    for step in (1, 20):
        torch.save({}, tmp_path / f"{step}.pt")
    (tmp_path / "step-3.pt").symlink_to(tmp_path / "nowhere.pt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "20.pt")
    series = discover(tmp_path)
    assert _steps(series) == [(1, "1.pt"), (20, "20.pt")]
    assert [path.name for path in series.ignored_paths] == ["step-3.pt"]


def test_the_checkpoints_of_a_project_are_found(tmp_path):
    run_of_files(tmp_path / "version_0" / "checkpoints", (1, 2))
    assert len(discover(tmp_path / "version_0").checkpoints) == 2


def test_two_checkpoints_of_one_step_are_refused_until_one_is_chosen(tmp_path):
    run_of_files(tmp_path / "run", (10,))
    torch.save({}, tmp_path / "run" / "epoch=3-step=10.ckpt")
    with pytest.raises(PolicyError, match=r"epoch=3-step=10.ckpt and step-10.pt"):
        discover(tmp_path / "run")
    assert _steps(discover(tmp_path / "run", only=["*.ckpt"])) == [(10, "epoch=3-step=10.ckpt")]


def test_what_does_not_exist_or_match_is_said(tmp_path):
    run_of_files(tmp_path / "run", (10,))
    with pytest.raises(NotFoundError, match="no such file"):
        discover(tmp_path / "walk")
    with pytest.raises(NotFoundError, match="no checkpoint of step 11"):
        discover(tmp_path / "run", step=11)
    with pytest.raises(NotFoundError, match=r"like \*\.ckpt"):
        discover(tmp_path / "run", only=["*.ckpt"])


def test_a_file_of_another_kind_is_refused_when_it_is_read(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(PolicyError, match="another kind"):
        discover(tmp_path / "notes.txt").checkpoints[0].read()


def test_our_own_are_known_as_ours(tmp_path):
    with Store(tmp_path / "store") as store:
        store.save(4, {"w": torch.ones(2)})
        store.save(9, {"w": torch.ones(2)})
    save({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    assert _steps(discover(tmp_path / "store")) == [(4, "store@4"), (9, "store@9")]
    for path in ("store", "one.safetensors"):
        assert all(one.is_ours for one in discover(tmp_path / path).checkpoints)
        assert torch.equal(discover(tmp_path / path).checkpoints[0].read()["w"], torch.ones(2))


def test_an_engine_s_directory_in_a_checkpoint_makes_it_no_run(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint-500"
    (path / "global_step500").mkdir(parents=True)
    torch.save({"w": torch.ones(3)}, path / "global_step500" / "states.pt")
    torch.save({"w": torch.ones(3)}, path / "model.pt")
    assert [one.path for one in discover(path).checkpoints] == [path]
    monkeypatch.chdir(path)
    (here,) = discover(Path()).checkpoints
    assert (here.step, here.name) == (500, "checkpoint-500")


def test_a_damaged_checkpoint_is_no_reason_not_to_choose_others(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        torch.save({"w": torch.ones(3)}, tmp_path / f"step-{step}" / "model.pt")
    (tmp_path / "step-2" / "model.safetensors.index.json").write_text("{")
    first, second = discover(tmp_path).checkpoints
    assert first.read()["state"].keys() == {"model.pt"}
    with pytest.raises(CorruptError, match="an index that cannot be read"):
        second.read()
    assert [one.step for one in discover(tmp_path, only=["step-1"]).checkpoints] == [1]


def test_a_name_that_no_store_writes_makes_no_store(tmp_path):
    for name in ("step-0000000001", "step-00000001", "step-1000000000000000"):
        (tmp_path / name / name).mkdir(parents=True)
        (tmp_path / name / name / "manifest.json").write_text("{}")
        assert not is_store(tmp_path / name) and not is_new_store(tmp_path / name)
    for name, file, is_ours in (("a", "rank-00000.2.safetensors", True), ("b", "rank-00000.02.safetensors", False)):
        (tmp_path / name / "step-000000001").mkdir(parents=True)
        (tmp_path / name / "step-000000001" / file).touch()
        assert is_new_store(tmp_path / name) == is_ours
