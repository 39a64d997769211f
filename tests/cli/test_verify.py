"""`verify` finds what was damaged, and its exit code says so."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_an_intact_store_has_no_findings(run, store, deep):
    done = run("verify", store, *deep)
    assert (done.code, done.stderr) == (0, "")
    assert "4 checkpoints" in done.stdout


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_flipped_byte_is_found_and_the_lost_checkpoint_named(run, store, payload, flip, deep):
    flip(payload(40))
    done = run("verify", store, *deep)
    assert done.code == 1
    assert "BROKEN" in done.stdout
    assert "step 40" in done.stdout
    assert "1 checkpoint lost" in done.stdout


def test_json_has_every_finding(run, store, payload, flip):
    flip(payload(40))
    document = json.loads(run("verify", store, "--json").stdout)
    assert document["checked"] == 4
    assert [(one["step"], one["loads"]) for one in document["findings"]] == [(40, False)]


def test_a_step_deleted_by_hand_is_told_and_what_stood_on_it_loads(run, store):
    shutil.rmtree(store / "step-000000010")
    done = run("verify", store)
    assert done.code == 1
    assert "warning" in done.stdout
    assert "BROKEN" not in done.stdout
    assert "everything loads" in done.stdout


def test_what_a_killed_save_left_is_told_and_is_no_finding(run, store, payload):
    (store / "step-000000050").mkdir()
    shutil.copy(payload(40), store / "step-000000050" / "rank-00000.safetensors")
    done = run("verify", store)
    assert done.code == 0
    assert "orphan" in done.stdout


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_file_alone_is_verified(run, payload, flip, deep):
    done = run("verify", payload(30), *deep)
    assert done.code == 0, done.stdout
    flip(payload(30))
    assert run("verify", payload(30), *deep).code == 1


def test_a_file_whose_base_is_gone_is_found_by_decoding(run, payload, tmp_path):
    alone = tmp_path / "alone.safetensors"
    shutil.copy(payload(30), alone)
    assert run("verify", alone).code == 0
    done = run("verify", alone, "--deep")
    assert done.code == 1
    assert "base" in done.stdout


def test_a_file_of_something_else_is_not_found_and_an_empty_one_is_a_finding(run, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello " * 100)
    for command in ("verify", "show"):
        done = run(command, text)
        assert done.code == 3 and "a text file; expected a checkpoint of shrinkpoint" in done.stderr
    text.write_text("")
    assert run("verify", text).code == 1  # what a full disk makes of a checkpoint


def test_a_place_that_is_not_there_is_not_found(run, tmp_path):
    assert run("verify", tmp_path / "nowhere").code == 3


def test_what_is_no_file_is_named(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for command in ("verify", "show"):
        done = run(command, tmp_path / "pipe")
        assert done.code == 3 and "a named pipe; expected the directory of a store. Choose another path" in done.stderr
    torch.save(torch.ones(1), tmp_path / "a.pt")
    (tmp_path / "link").symlink_to("nowhere")
    for name, found in (("pipe", "a named pipe"), ("link", "a symbolic link to nothing")):
        done = run("convert", tmp_path / "a.pt", tmp_path / name)
        assert done.code == 2 and f"{found}; expected the directory of a store" in done.stderr
