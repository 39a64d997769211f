"""`shrinkpoint convert`: in, back, and what it says of both."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreigners import bytes_of, malice, run_of_files, same, training
from safetensors.torch import load_file, save_file

import shrinkpoint
from shrinkpoint.store import Store


@pytest.fixture
def source(tmp_path):
    return run_of_files(tmp_path / "run")


def test_a_run_becomes_a_store_and_the_store_the_run_again(run, source, tmp_path):
    done = run("convert", source, tmp_path / "store", columns=120)
    assert done.code == 0
    assert "3 checkpoints" in done.stdout
    assert "verified: 3 checkpoints" in done.stdout
    assert run("verify", tmp_path / "store", "--deep").code == 0
    assert run("convert", tmp_path / "store", tmp_path / "back").code == 0
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["step-10.pt", "step-20.pt", "step-30.pt"]
    for step in (10, 20, 30):
        assert same(torch.load(tmp_path / "back" / f"step-{step}.pt", weights_only=False), training(step))


def test_a_dry_run_writes_nothing_and_tells_what_a_conversion_takes(run, source, tmp_path):
    before = bytes_of(tmp_path)
    said = json.loads(run("convert", source, "--dry-run", "--json").stdout)
    shown = run("convert", source, tmp_path / "store", "--dry-run")
    assert "3 checkpoints of" in shown.stdout
    assert "would take" in shown.stdout
    assert bytes_of(tmp_path) == before
    real = json.loads(run("convert", source, tmp_path / "store", "--json").stdout)
    assert said["dry_run"] and not real["dry_run"]
    assert said["after_bytes"] == real["after_bytes"]
    assert said["before_bytes"] == sum(path.stat().st_size for path in source.iterdir())
    assert [row["name"] for row in said["checkpoints"]] == ["step-10.pt", "step-20.pt", "step-30.pt"]
    assert (said["verified"], real["verified"], real["exact"]) == (None, 3, 3)


def test_one_checkpoint_becomes_one_file_of_ours_and_back(run, source, tmp_path):
    assert run("convert", source / "step-20.pt", tmp_path / "a.safetensors").code == 0
    assert same(shrinkpoint.load(tmp_path / "a.safetensors")["state"], training(20))
    assert run("convert", tmp_path / "a.safetensors", tmp_path / "b.pt").code == 0
    assert same(torch.load(tmp_path / "b.pt", weights_only=False), training(20))
    assert run("convert", source, tmp_path / "b.safetensors").code == 2


def test_a_safetensors_file_goes_back_with_its_metadata(run, tmp_path):
    save_file({"w": torch.arange(9.0), "b": torch.ones(2).bfloat16()}, tmp_path / "a.safetensors", {"made": "here"})
    assert run("convert", tmp_path / "a.safetensors", tmp_path / "store").code == 0
    assert run("convert", tmp_path / "store", tmp_path / "b.safetensors").code == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_a_dcp_directory_goes_in_and_any_state_comes_out_as_one(run, source, tmp_path):
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert run("convert", tmp_path / "dcp", tmp_path / "store").code == 0
    assert run("convert", tmp_path / "store", tmp_path / "back").code == 0
    there = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
    dcp.load(there, checkpoint_id=tmp_path / "back", no_dist=True)
    assert same(there, state)
    assert run("convert", source / "step-10.pt", tmp_path / "other", "--to", "dcp").code == 0
    model = {"model": {key: torch.zeros_like(value) for key, value in training(10)["model"].items()}}
    dcp.load(model, checkpoint_id=tmp_path / "other", no_dist=True)
    assert same(model["model"], dict(training(10)["model"]))


def test_checkpoints_of_ours_that_were_never_converted_are_written_as_asked(run, store, tmp_path, state_at):
    done = run("convert", store, tmp_path / "out")
    assert done.code == 2
    assert "--to torch" in done.stderr
    assert run("convert", store, tmp_path / "out", "--to", "torch").code == 0
    found = torch.load(tmp_path / "out" / "step-30.pt", weights_only=False)
    assert same(found, state_at(30))
    assert run("convert", store, tmp_path / "one.safetensors", "--to", "safetensors", "--step", 30).code == 0
    rows = load_file(tmp_path / "one.safetensors")
    assert torch.equal(rows["model/weight"], state_at(30)["model"]["weight"])


def test_interrupted_conversions_go_on_and_finished_ones_do_nothing(run, source, tmp_path):
    assert run("convert", source, tmp_path / "store", "--step", 10).code == 0
    said = json.loads(run("convert", source, tmp_path / "store", "--json").stdout)
    assert [row["done"] for row in said["checkpoints"]] == [True, False, False]
    before = bytes_of(tmp_path / "store")
    assert run("convert", source, tmp_path / "store").code == 0
    assert bytes_of(tmp_path / "store") == before
    assert run("convert", tmp_path / "store", tmp_path / "back").code == 0
    (tmp_path / "back" / "step-20.pt").unlink()
    said = json.loads(run("convert", tmp_path / "store", tmp_path / "back", "--json").stdout)
    assert [row["done"] for row in said["written"]] == [True, False, True]


def test_a_scheme_is_taken_by_its_name_in_bench(run, source, tmp_path):
    exact = json.loads(run("convert", source, "--dry-run", "--json").stdout)
    lossy = json.loads(run("convert", source, tmp_path / "store", "--json", "--scheme", "fisher .3").stdout)
    assert lossy["after_bytes"] < 0.7 * exact["after_bytes"]
    assert (lossy["verified"], lossy["exact"]) == (3, 0)
    with Store(tmp_path / "store") as store:
        assert store.manifest().scheme == "fisher"
    assert run("convert", source, "--dry-run", "--scheme", "fish").code == 2
    assert run("convert", source, "--dry-run", "--scheme", "fisher").code == 2  # needs --evaluate


def test_a_malicious_file_is_refused_before_anything_is_written(run, source, tmp_path):
    malice(source / "step-20.pt", tmp_path / "mark")
    done = run("convert", source / "step-20.pt", tmp_path / "store")
    assert done.code == 7
    assert "posix.system" in done.stderr
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "store").exists()


def test_what_comes_along_unread_is_said_once(run, tmp_path):
    for step in (1, 2):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"w": torch.ones(3) * step}, tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")
        malice(tmp_path / "run" / f"checkpoint-{step}" / "arguments.bin", tmp_path / "mark")
    done = run("convert", tmp_path / "run", tmp_path / "store")
    assert done.code == 0
    assert done.stderr.count("arguments.bin: taken along") == 1
    assert run("convert", tmp_path / "store", tmp_path / "back").code == 0
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "back")
    assert not (tmp_path / "mark").exists()


def test_nothing_that_exists_is_replaced_unless_forced(run, source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    assert run("convert", source, tmp_path / "mine").code == 2
    (tmp_path / "a.safetensors").write_bytes(b"mine")
    assert run("convert", source / "step-10.pt", tmp_path / "a.safetensors").code == 2
    assert (tmp_path / "a.safetensors").read_bytes() == b"mine"
    assert run("convert", source / "step-10.pt", tmp_path / "a.safetensors", "--force").code == 0
    (tmp_path / "b.pt").write_bytes(b"mine")
    assert run("convert", tmp_path / "a.safetensors", tmp_path / "b.pt").code != 0
    assert (tmp_path / "b.pt").read_bytes() == b"mine"
    assert run("convert", tmp_path / "a.safetensors", tmp_path / "b.pt", "--force").code == 0


def test_a_place_inside_the_source_is_refused(run, source, tmp_path):
    for out in (source, source / "store", tmp_path):
        assert run("convert", source, out).code == 2
    assert run("convert", source).code == 2
    assert run("convert", source, tmp_path / "x", "--to", "torch", "--dry-run").code == 2


def test_bad_places_have_their_exit_codes(run, source, tmp_path):
    assert run("convert", tmp_path / "none", tmp_path / "store").code == 3
    (tmp_path / "empty").mkdir()
    assert run("convert", tmp_path / "empty", tmp_path / "store").code == 3
    data = (source / "step-10.pt").read_bytes()
    (source / "step-10.pt").write_bytes(data[: len(data) // 2])
    done = run("convert", source, tmp_path / "store")
    assert done.code == 4
    assert "step-10.pt" in done.stderr


def test_a_stored_name_that_leads_outside_is_refused(run, tmp_path):
    with Store(tmp_path / "store") as store:
        for step in (1, 2):
            store.save(step, {"source": {"form": "bytes", "name": f"../stolen-{step}"}, "state": b"x"})
    assert run("convert", tmp_path / "store", tmp_path / "back").code == 4
    assert not list(tmp_path.glob("stolen*"))


@pytest.mark.parametrize(
    "said",
    [
        {"form": "folder", "name": "x"}, {"form": "folder", "name": "x", "parts": {"a": {}}},
        {"form": "orbax", "name": "x"},
        {"form": "sharded", "name": "x"}, {"form": "folder", "name": "x", "parts": {"a": {"form": "bytes"}}},
        {"form": "safetensors", "name": "x", "metadata": 3},
    ],
)  # fmt: skip
def test_a_forged_source_is_an_error_of_ours_and_writes_nothing(run, tmp_path, said):
    with Store(tmp_path / "store") as store:
        store.save(1, {"source": said, "state": {"a": 3}})
    assert run("convert", tmp_path / "store", tmp_path / "back").code in (2, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_converted_checkpoint_can_be_converted_into_another_store(run, source, tmp_path):
    assert run("convert", source, tmp_path / "a", "--keyframe-every", 1).code == 0
    assert run("convert", tmp_path / "a", tmp_path / "b", "--to", "shrinkpoint").code == 0
    with Store(tmp_path / "b") as store:
        assert store.manifest(30).depth == 2
        assert same(store.load(30)["state"], training(30))


def test_a_failed_write_leaves_nothing(run, source, tmp_path):
    shutil.rmtree(tmp_path / "back", ignore_errors=True)
    (tmp_path / "back").write_text("a file")
    assert run("convert", source, tmp_path / "back" / "store").code != 0
    assert (tmp_path / "back").read_text() == "a file"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
