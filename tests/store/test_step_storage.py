"""A step's directory that was copied, moved or renamed loads wherever a store does, as a store with that step alone."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ChainError, FormatError, NotFoundError, PolicyError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store.step_storage import find_store


def copied(step: Path, target: Path) -> None:
    shutil.copytree(step, target)


def moved(step: Path, target: Path) -> None:
    step.rename(target)


def in_a_tar(step: Path, target: Path) -> None:
    with tarfile.open(target.with_suffix(".tar"), "w") as archive:
        archive.add(step, "x")
    with tarfile.open(target.with_suffix(".tar")) as archive:
        archive.extractall(target.parent / "unpacked", filter="data")
    (target.parent / "unpacked" / "x").rename(target)


def linked_to_blobs(step: Path, target: Path) -> None:
    """As huggingface_hub lays out what it has downloaded."""
    for file in [path for path in step.rglob("*") if path.is_file()]:
        link = target / file.relative_to(step)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(shutil.copy(file, target.parent / file.name), link.parent))


def in_place(step: Path, target: Path) -> None:
    target.symlink_to(step)


COPIES = [copied, moved, in_a_tar, linked_to_blobs, in_place]


@pytest.fixture(params=COPIES, ids=lambda copy: copy.__name__)
def best(request, tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory `best` of a delta's step, and the weights in it; the store is gone but for what was not moved."""
    step, weights = two_steps(tmp_path / "run")
    copy: Callable[[Path, Path], None] = request.param
    copy(step, tmp_path / "best")
    if copy is not in_place:
        shutil.rmtree(tmp_path / "run")
    return tmp_path / "best", weights


def two_steps(run: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model = nn.Linear(64, 64)
    with sp.CheckpointManager(run) as manager:
        manager.save(1, model=model)
        with torch.no_grad():
            model.bias.add_(1)
        assert not manager.save(2, model=model, extra={"epoch": 3}).keyframe
    return run / "step-000000002", model.state_dict()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"SHRINKPOINT_TRACEBACK": ""})


def assert_same(state, weights) -> None:
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())


def test_it_loads_as_a_store_with_one_step(best):
    directory, weights = best
    assert_same(sp.load(directory)["model"], weights)
    assert_same(sp.load(directory, step=2, only="model.*")["model"], weights)
    assert_same(sp.Store(str(directory)).load()["model"], weights)
    model = nn.Linear(64, 64)
    with sp.CheckpointManager(directory) as manager:
        restored = manager.restore(model=model)
    assert restored.step == 2 and restored.extra == {"epoch": 3} and not restored.skipped
    assert_same(model.state_dict(), weights)
    with pytest.raises(NotFoundError, match="step 1"):
        sp.load(directory, step=1)


def test_every_command_that_reads_a_store_reads_it(best, tmp_path):
    directory, weights = best
    for command in ("list", "show", "verify --deep", "report --out page.html"):
        result = run(*command.replace("page.html", str(tmp_path / "page.html")).split(), str(directory))
        assert result.exit_code == 0, result.output
    assert "chain" in run("show", str(directory)).output
    assert "step 1 is gone" not in run("verify", str(directory)).output
    assert run("export", str(directory), str(tmp_path / "a.pt")).exit_code == 0
    assert_same(torch.load(tmp_path / "a.pt", weights_only=False)["model"], weights)
    assert run("diff", str(directory), str(tmp_path / "a.pt")).exit_code == 0
    assert run("convert", str(directory), str(tmp_path / "out"), "--to", "torch").exit_code == 0
    (file,) = [path for path in (tmp_path / "out", *(tmp_path / "out").glob("*")) if path.is_file()]
    assert_same(torch.load(file, weights_only=False)["model"], weights)


def test_nothing_is_written_into_it(best):
    directory, _ = best
    before = sorted(directory.rglob("*"))
    with sp.CheckpointManager(directory) as manager, pytest.raises(PolicyError, match="the directory of one step"):
        manager.save(3, model=nn.Linear(2, 2))
    for command in (("prune", "--apply", "--keep-last", "1"), ("compact", "--step", "2"), ("forget",)):
        result = run(command[0], str(directory), *command[1:], *(["2"] if command == ("forget",) else []))
        assert result.exit_code != 0 and "the directory of one step" in result.output, result.output
    assert sorted(directory.rglob("*")) == before


def test_what_a_copy_lacks_is_named(tmp_path):
    step, _ = two_steps(tmp_path / "run")
    shutil.copytree(step, tmp_path / "flat", ignore=shutil.ignore_patterns("bases"))
    with pytest.raises(ChainError, match="bases") as caught:
        sp.load(tmp_path / "flat")
    assert "the base of step 2" in str(caught.value)
    shutil.copytree(step, tmp_path / "early", ignore=shutil.ignore_patterns("manifest.json"))
    with pytest.raises(NotFoundError, match=r"without manifest\.json"):
        sp.load(tmp_path / "early")
    shutil.copytree(step, tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_bytes(b'{"digest":"')
    with pytest.raises(FormatError, match="damaged"):
        sp.load(tmp_path / "damaged")


def test_a_step_without_links_loads_in_its_store(tmp_path):
    step, weights = two_steps(tmp_path / "run")
    shutil.rmtree(step / "bases")
    assert_same(sp.load(step)["model"], weights)


def test_a_keyframe_that_was_copied_within_a_bucket_loads():
    storage = MemoryStorage()
    with sp.Store(storage) as store:
        store.save(7, {"w": torch.ones(3)})
    copy = MemoryStorage()
    for key in storage.list():
        copy.put(key.partition("/")[2], storage.get(key))
    assert sp.load(copy)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("text", ["{}", "", '{"name": "a web page"}', "\0"])
def test_a_manifest_of_another_program_makes_no_step(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with sp.Store(tmp_path) as store:
        assert find_store(store.storage) is None
        store.save(1, {"a": 1})
        assert find_store(store.storage) is store.storage
    assert sp.load(tmp_path) == {"a": 1}
