"""No command says that all is well where nothing of ours is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.parameters import each_value
from safetensors.torch import save_file

COMMANDS = (
    ["verify"],
    ["verify", "--deep"],
    ["show"],
    ["list"],
    ["prune"],
    ["compact"],
    ["forget"],
    ["export"],
)


def arguments(command: list[str], path: Path, tmp_path: Path) -> list[object]:
    last: dict[str, list[object]] = {"export": [tmp_path / "new.pt"], "diff": [path], "forget": [1]}
    return [*command, path, *last.get(command[0], [])]


def hugging_face(tmp_path: Path) -> Path:
    """As the stock Trainer leaves it."""
    inner = tmp_path / "out" / "checkpoint-500"
    inner.mkdir(parents=True)
    save_file({"a": torch.ones(3)}, inner / "model.safetensors")
    torch.save({}, inner / "optimizer.pt")
    for name in ("config.json", "trainer_state.json"):
        (inner / name).write_text("{}")
    return tmp_path / "out"


def lightning(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "ckpt" / "epoch=0-step=10.ckpt")
    return tmp_path / "ckpt"


def torch_file(tmp_path: Path) -> Path:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def plain_safetensors(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("make", "command"),
    each_value(
        [hugging_face, lambda path: hugging_face(path) / "checkpoint-500", lightning, torch_file, plain_safetensors],
        COMMANDS,
    ),
)
def test_what_others_wrote_is_not_found_and_convert_is_named(run, tmp_path, make, command):
    path = make(tmp_path)
    done = run(*arguments(command, path, tmp_path))
    assert (done.code, done.stdout) == (3, "")
    if path.is_dir() or command[0] in ("verify", "show", "export"):
        assert "shrinkpoint convert" in done.stderr
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.parametrize(
    "command", [["verify"], ["verify", "--deep"], ["show"], ["export"], ["diff"], ["forget"]], ids=" ".join
)
def test_an_empty_directory_is_nothing_that_could_be_well(run, tmp_path, command):
    (tmp_path / "empty").mkdir()
    done = run(*arguments(command, tmp_path / "empty", tmp_path))
    assert (done.code, done.stdout) == (3, "")


def test_verify_of_a_store_whose_checkpoints_are_gone_is_not_found(run, store):
    for folder in store.glob("step-*"):
        for file in sorted(folder.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        folder.rmdir()
    assert run("verify", store).code == 3


def test_a_checkpoint_of_a_frameworks_run_cannot_be_forgotten(run, tmp_path):
    from shrinkpoint.train import Checkpointer

    Checkpointer().save(tmp_path / "run" / "step-1", {"a": torch.ones(3)})
    done = run(*arguments(["forget"], tmp_path / "run", tmp_path))
    assert (done.code, done.stdout) == (3, "") and "framework's run" in done.stderr
    assert run("list", tmp_path / "run").code == 0 and run("verify", tmp_path / "run").code == 0


def test_the_best_of_a_metric_that_nobody_recorded_is_an_error_and_nothing_goes(run, store):
    before = sorted(store.rglob("*"))
    for apply in ([], ["--apply"]):
        done = run("prune", store, "--keep-best", 1, "--metric", "valloss", *apply)
        assert (done.code, done.stdout) == (2, "")
        assert "'valloss', which no checkpoint has" in done.stderr and "one of 'val_loss'" in done.stderr
    assert sorted(store.rglob("*")) == before
