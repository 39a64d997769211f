"""`shrinkpoint convert`: in, back, and what it says of both."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.foreign_files import bytes_of, malice, run_of_files, same, training
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
    done = run("convert", tmp_path / "a.safetensors", tmp_path / "store")
    assert done.code == 0 and f" in {tmp_path / 'store'}: " in done.stdout
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
    lossy = json.loads(
        run("convert", source, tmp_path / "store", "--json", "--scheme", "fisher(relative_error=.3)").stdout
    )
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
    assert done.stderr.count("arguments.bin: kept as bytes") == 1
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
    back = run("convert", source, tmp_path / "x", "--to", "torch", "--dry-run")
    assert back.code == 2 and "Leave out --dry-run" in " ".join(back.stderr.split())


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
        {"form": "folder", "name": "x"},
        {"form": "folder", "name": "x", "parts": {"a": {}}},
        {"form": "orbax", "name": "x"},
        {"form": "sharded", "name": "x"},
        {"form": "folder", "name": "x", "parts": {"a": {"form": "bytes"}}},
        {"form": "safetensors", "name": "x", "metadata": 3},
    ],
)
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


def test_a_source_is_never_what_is_replaced(run, tmp_path):
    save_file({"w": torch.ones(9)}, tmp_path / "a.safetensors")
    before = bytes_of(tmp_path)
    assert run("convert", tmp_path / "a.safetensors", tmp_path / "a.safetensors", "--force").code == 2
    (tmp_path / "run").mkdir()
    torch.save({"w": torch.ones(9)}, tmp_path / "run" / "step-1.pt")
    assert run("convert", tmp_path / "run", tmp_path / "run" / "b.safetensors").code == 2
    assert bytes_of(tmp_path).keys() == before.keys() | {"run/step-1.pt"}
    assert (tmp_path / "a.safetensors").read_bytes() == before["a.safetensors"]


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_force_deletes_no_file_that_is_not_written_anew(run, source, tmp_path, form):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for out in (tmp_path / "mine", tmp_path / "link"):
        done = run("convert", source / "step-10.pt", out, "--to", form, "--force")
        assert (done.code, (tmp_path / "mine" / "notes.txt").read_text()) == (2, "x"), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mine", "run"]


@pytest.mark.filterwarnings("ignore")
def test_a_directory_is_replaced_when_forced_and_an_empty_one_taken(run, tmp_path):
    for value in (1.0, 2.0):
        torch.save({"w": torch.full((9,), value)}, tmp_path / f"{value}.pt")
    (tmp_path / "dcp").mkdir()
    assert run("convert", tmp_path / "1.0.pt", tmp_path / "dcp", "--to", "dcp").code == 0
    assert run("convert", tmp_path / "2.0.pt", tmp_path / "dcp", "--to", "dcp").code == 2
    assert run("convert", tmp_path / "2.0.pt", tmp_path / "dcp", "--to", "dcp", "--force").code == 0
    there = {"w": torch.zeros(9)}
    dcp.load(there, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert there["w"][0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.0.pt", "2.0.pt", "dcp"]


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
@pytest.mark.filterwarnings("ignore")
def test_names_with_dots_stay_apart(run, tmp_path, form):
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        torch.save({"w": torch.ones(3) * step}, tmp_path / "run" / f".v1.0-step-{step}.ckpt")
    assert run("convert", tmp_path / "run", tmp_path / "out", "--to", form).code == 0
    end = {"torch": ".pt", "safetensors": ".safetensors", "dcp": ""}[form]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f".v1.0-step-{step}{end}" for step in (1, 2)}


def test_two_checkpoints_of_one_name_are_both_written(run, tmp_path):
    with Store(tmp_path / "store") as store:
        for step, name in ((1, "last.pt"), (2, "Last.pt")):
            store.save(step, {"source": {"form": "torch", "name": name}, "state": {"step": step}})
    for _ in range(2):  # and nothing is written when it is there
        assert run("convert", tmp_path / "store", tmp_path / "back").code == 0
    assert torch.load(tmp_path / "back" / "last.pt") == {"step": 1}
    assert torch.load(tmp_path / "back" / "Last-step-2.pt") == {"step": 2}


def test_what_stands_in_the_way_is_refused_whatever_it_is(run, source, tmp_path):
    assert run("convert", source / "step-10.pt", tmp_path / "store").code == 0
    (tmp_path / "a.pt").write_bytes(b"mine")
    (tmp_path / "b").mkdir()
    for out, says in ((tmp_path / "a.pt", "--force"), (tmp_path / "b", "Name a file"), ("..", "a new name")):
        done = run("convert", tmp_path / "store", out)
        assert (done.code, says in done.stderr) == (2, True), done.stderr
    assert run("convert", tmp_path / "store", tmp_path / "new" / "er" / "a.pt").code == 0


@pytest.mark.parametrize("left", [[".shrinkpoint-lock"], [".shrinkpoint-lock", "step-000000010/.shrinkpoint-tmp-0a"]])
def test_a_conversion_that_was_killed_in_its_first_save_is_begun_again(run, source, tmp_path, left):
    for name in left:
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(b"")
    assert run("convert", source, tmp_path / "store").code == 0
    (tmp_path / "theirs" / "step-000000010").mkdir(parents=True)
    (tmp_path / "theirs" / "step-000000010" / "model.pt").write_bytes(b"mine")
    assert run("convert", source, tmp_path / "theirs").code == 2


def test_a_broken_step_of_a_store_is_not_passed_over_in_silence(run, source, tmp_path):
    assert run("convert", source, tmp_path / "store").code == 0
    (tmp_path / "store" / "step-000000020" / "manifest.json").write_text("{")
    done = run("convert", tmp_path / "store", tmp_path / "back")
    assert done.code == 4
    assert "step-000000020" in done.stderr
    assert run("convert", tmp_path / "store", tmp_path / "back", "--only", "*@10", "--only", "*@30").code == 0
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["step-10.pt", "step-30.pt"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_a_full_disk_is_an_error_of_the_storage_in_every_form(run, tmp_path, form):
    resource = pytest.importorskip("resource")
    torch.save({"w": torch.randn(200, 200)}, tmp_path / "a.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        done = run("convert", tmp_path / "a.pt", tmp_path / "out", "--to", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (done.code, done.stderr.count("File too large")) == (6, 1), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_names_that_dcp_cannot_tell_apart_are_refused(run, tmp_path):
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "out", "--to", "dcp")
    assert done.code == 2
    assert "duplicated flatten key a.b" in done.stderr
    assert not (tmp_path / "out").exists()
