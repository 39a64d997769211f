"""The commands on what frameworks keep: checkpoints in folders of their own, and runs of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shrinkpoint.errors import MismatchError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store, scan
from shrinkpoint.store import directory as folders
from shrinkpoint.store.directory import find_run
from shrinkpoint.store.directory_rewrite import RunRewriter
from shrinkpoint.store.identify import find_checkpoints
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.dcp import Writer


@pytest.fixture
def frameworks_run(tmp_path: Path, state_at) -> Path:
    root = tmp_path / "out"
    with Checkpointer() as trail:
        for step in (90, 100, 1000):
            trail.save(root / f"checkpoint-{step}", state_at(step // 3), step=step, metrics={"loss": 1.5})
    return root


def test_a_run_is_listed_in_the_order_of_its_numbers(run, frameworks_run):
    done = run("list", frameworks_run, columns=160)
    rows = done.stdout.splitlines()
    assert done.code == 0
    assert rows[0].startswith(f"{frameworks_run}: 3 checkpoints")
    assert [row.split()[:2] for row in rows[-3:]] == [[f"checkpoint-{n}", f"{n}"] for n in (90, 100, 1000)]
    assert "delta 2" in rows[-1]
    document = json.loads(run("list", frameworks_run, "--json").stdout)
    assert [one["depth"] for one in document["checkpoints"]] == [0, 1, 2]
    assert document["stored_bytes"] == sum(one["stored_bytes"] for one in document["checkpoints"])


def test_one_checkpoint_is_shown_and_of_a_run_the_newest(run, frameworks_run):
    one = run("show", frameworks_run / "checkpoint-100")
    assert (one.code, "delta; 1 file below, linked here" in one.stdout) == (0, True)
    assert "checkpoint-1000" in run("show", frameworks_run).stdout
    document = json.loads(run("show", frameworks_run / "checkpoint-100", "--json", "--tensors").stdout)
    assert (document["step"], document["files"][0]["scheme"]) == (100, "lossless")


def test_a_step_of_a_run_is_shown_reported_and_compared(run, frameworks_run, tmp_path):
    for arguments in ((frameworks_run, "--step", 100), (f"{frameworks_run}@100",)):
        assert run("show", *arguments).stdout.startswith(f"{frameworks_run / 'checkpoint-100'}\n")
    assert run("report", f"{frameworks_run}@90", "--out", tmp_path / "page.html").code == 0
    assert run("diff", f"{frameworks_run}@100", frameworks_run / "checkpoint-100").code == 0
    assert run("diff", f"{frameworks_run}@100", frameworks_run).code == 1
    missing = run("show", frameworks_run, "--step", 7)
    assert (missing.code, "no checkpoint of step 7; expected one of 90, 100, 1000" in missing.stderr) == (3, True)


def test_a_save_that_is_not_complete_does_not_make_a_run_a_store(run, state_at, tmp_path):
    root = tmp_path / "out"
    with Checkpointer() as trail:
        for step in (1, 2):
            trail.save(root / f"step-{step:09}", state_at(step), step=step)
    shutil.copytree(root / "step-000000002", root / "step-000000003")
    (root / "step-000000003" / "shrinkpoint.json").unlink()
    assert run("list", root).stdout.startswith(f"{root}: 2 checkpoints")
    assert run("show", root).stdout.startswith(f"{root / 'step-000000002'}\n")
    assert run("verify", root).stdout.startswith(f"{root}: 2 checkpoints read")
    assert run("diff", root, root).code == 0
    assert run("export", root, tmp_path / "state.safetensors").code == 0
    assert run("prune", root, "--keep-last", "1", "--apply").code == 0
    assert sorted(path.name for path in root.iterdir()) == ["step-000000002", "step-000000003"]
    assert any((root / "step-000000003").glob("rank-*"))


def test_a_directory_that_goes_meanwhile_is_no_part_of_a_plan(run, frameworks_run, monkeypatch):
    places = [frameworks_run / "checkpoint-5", *find_checkpoints(frameworks_run)]
    monkeypatch.setattr(find_run.__module__ + ".find_checkpoints", lambda root: places)
    done = run("prune", frameworks_run, "--keep-last", "2", "--json")
    assert json.loads(done.stdout)["delete"] == ["checkpoint-90"]


@pytest.mark.parametrize("gone", ["plan", "rewrite"])
def test_a_directory_that_goes_meanwhile_ends_no_compact(run, frameworks_run, monkeypatch, gone):
    """As beside a training with a limit of checkpoints."""
    shutil.rmtree(frameworks_run / "checkpoint-90")  # whose file the others hold
    rewrite = RunRewriter.rewrite

    def delete_first(self, chain, *arguments):
        shutil.rmtree(frameworks_run / "checkpoint-100")
        return rewrite(self, chain, *arguments)

    if gone == "plan":
        places = [frameworks_run / "checkpoint-5", *find_checkpoints(frameworks_run)]
        monkeypatch.setattr("shrinkpoint.cli.compact.find_run", lambda root: places)
    else:
        monkeypatch.setattr(RunRewriter, "rewrite", delete_first)
    assert run("compact", frameworks_run).code == 0
    assert run("verify", frameworks_run, "--deep").code == 0
    monkeypatch.undo()
    for base in frameworks_run.glob("checkpoint-1000/bases/*"):
        base.write_bytes(b"")
    assert run("compact", frameworks_run).code == (4 if gone == "rewrite" else 0)  # damage is said


def test_damage_is_found_where_it_is(run, frameworks_run, flip):
    assert run("verify", frameworks_run).code == 0
    assert run("verify", frameworks_run, "--deep").code == 0
    flip(frameworks_run / "checkpoint-100" / "rank-00000.safetensors")
    done = run("verify", frameworks_run)
    assert done.code == 1
    assert "1 checkpoint lost" in done.stdout
    assert "checkpoint-100" in done.stdout
    (frameworks_run / "checkpoint-90" / folders.MANIFEST).write_text("{}")
    assert run("verify", frameworks_run).code == 1
    listed = run("list", frameworks_run)
    assert (listed.code, "unreadable" in listed.stderr) == (0, True)


def test_looking_at_a_run_needs_no_torch(frameworks_run):
    code = f"""
import sys
from shrinkpoint.cli.app import app
for command in ("list", "show", "verify"):
    app([command, {str(frameworks_run)!r}], standalone_mode=False)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_frameworks_checkpoint_is_exported_and_compared_like_any_other(run, frameworks_run, tmp_path, state_at):
    out = tmp_path / "state.pt"
    assert run("export", frameworks_run / "checkpoint-1000", out).code == 0
    assert torch.equal(torch.load(out)["model"]["weight"], state_at(333)["model"]["weight"])
    assert run("diff", frameworks_run / "checkpoint-1000", frameworks_run).code == 0
    assert run("diff", frameworks_run / "checkpoint-1000", frameworks_run / "checkpoint-90").code == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_many_ranks_write_is_whole_again(run, tmp_path):
    weight = torch.arange(6000.0)
    dcp.save({"model": {"w": weight}, "step": 3}, storage_writer=Writer(tmp_path / "c"), no_dist=True)
    assert run("show", tmp_path / "c").code == 0
    assert run("verify", tmp_path / "c", "--deep").code == 0
    assert run("export", tmp_path / "c", tmp_path / "c.pt").code == 0
    state = torch.load(tmp_path / "c.pt")
    assert (torch.equal(state["model"]["w"], weight), state["step"]) == (True, 3)


def test_a_store_and_a_run_in_one_directory_are_both_verified_and_what_is_not_listed_is_said(
    run, frameworks_run, flip, tmp_path
):
    with Store(frameworks_run) as store:
        store.save(1, {"w": torch.ones(3)})
    assert json.loads(run("verify", frameworks_run, "--json").stdout)["checked"] == 4
    assert "3 checkpoints of a framework" in run("list", frameworks_run).stderr
    done = run("convert", frameworks_run, tmp_path / "back", "--to", "torch")
    assert "checkpoint-1000: left out" in done.stderr
    flip(frameworks_run / "checkpoint-100" / "rank-00000.safetensors")
    done = run("verify", frameworks_run)
    assert done.code == 1
    assert "checkpoint-100/" in done.stdout


def test_directories_that_are_named_as_steps_are_a_run_and_no_files_of_an_interrupted_save(run, tmp_path, state_at):
    with Checkpointer() as trail:
        for step in (1, 2):
            trail.save(tmp_path / f"step-{step:09d}", state_at(10 * step), step=step)
    before = {*tmp_path.rglob("*.safetensors")}
    assert run("list", tmp_path).stdout.startswith(f"{tmp_path}: 2 checkpoints")
    assert (run("verify", tmp_path).code, run("verify", tmp_path).stdout.count("orphan")) == (0, 0)
    assert "deleted 0 checkpoints" in run("prune", tmp_path, "--keep-last", 9, "--apply").stdout
    with Store(tmp_path) as store, pytest.raises(MismatchError, match="the run of a framework"):
        store.save(7, {"w": torch.ones(3)})
    assert before == {*tmp_path.rglob("*.safetensors")}
    bucket = MemoryStorage()
    for path in tmp_path.rglob("step-*/**/*"):
        if path.is_file():
            bucket.put(path.relative_to(tmp_path).as_posix(), path.read_bytes())
    assert ([*scan(bucket).manifests], scan(bucket).orphans()) == ([], [])
