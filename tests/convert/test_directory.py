"""Directories of checkpoints: what holds tensors is read, everything else comes along, nothing leads outside."""

from __future__ import annotations

import os

import pytest
import torch
from helpers.foreign_files import bytes_of, malice, same, training
from safetensors.torch import save_file

import shrinkpoint
from shrinkpoint.convert import directory as directory_format
from shrinkpoint.errors import CorruptError, NotFoundError, StateError


@pytest.fixture
def directory(tmp_path):
    """As a trainer leaves it: weights, state, small files, a file that only its own code can read."""
    path = tmp_path / "checkpoint-5"
    (path / "deeper" / "empty").mkdir(parents=True)
    state = training(10)
    save_file(dict(state["model"]), path / "model.safetensors", {"format": "pt"})
    torch.save(state["optimizer"], path / "optimizer.pt")
    torch.save(state["rng"], path / "deeper" / "rng.pkl")
    (path / "config.json").write_text('{"width": 64}')
    (path / "tokens.bin").write_bytes(bytes(range(256)) * 3)
    malice(path / "arguments.bin", tmp_path / "mark")
    return path


def test_a_directory_goes_back_whole(directory, tmp_path):
    part = directory_format.read(directory)
    assert same(part.content["optimizer.pt"], training(10)["optimizer"])
    assert same(part.content["deeper/rng.pkl"], training(10)["rng"])
    (tmp_path / "back").mkdir()
    directory_format.write(tmp_path / "back", part.content, part.info)
    here, back = bytes_of(directory), bytes_of(tmp_path / "back")
    assert here.keys() == back.keys()
    for name in ("config.json", "tokens.bin", "arguments.bin", "model.safetensors"):
        assert here[name] == back[name]
    assert (tmp_path / "back" / "deeper" / "empty").is_dir()
    assert same(directory_format.read(tmp_path / "back").content, part.content)
    assert not (tmp_path / "mark").exists()


def test_a_large_file_that_only_its_code_can_read_is_refused_until_asked_for(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(directory_format, "MAX_OPAQUE_BYTES", 100)
    with pytest.raises(StateError, match=r"arguments\.bin: a pickle that needs posix\.system") as caught:
        directory_format.read(directory)
    assert "--opaque" in caught.value.do
    part = directory_format.read(directory, opaque=True)
    assert part.content["arguments.bin"] == (directory / "arguments.bin").read_bytes()
    assert part.info["parts"]["arguments.bin"] == {"form": "bytes", "opaque": True}


def test_what_torch_reads_and_a_state_cannot_hold_comes_along_as_bytes(directory):
    torch.save({"sparse": torch.eye(2).to_sparse()}, directory / "odd.pt")
    part = directory_format.read(directory)
    assert part.content["odd.pt"] == (directory / "odd.pt").read_bytes()


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "a/../../out.txt", "..", "", "a\0b", "\ud800"])
def test_a_stored_directory_writes_nothing_outside(tmp_path, name):
    (tmp_path / "in").mkdir()
    for facts in ({"parts": {name: {"form": "bytes"}}}, {"parts": {}, "folders": [name]}):
        with pytest.raises(CorruptError):
            directory_format.write(tmp_path / "in", {name: b"x"}, facts)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_form_of_tomorrow_is_refused(tmp_path):
    with pytest.raises(CorruptError, match="form"):
        directory_format.write(tmp_path, {"a": b""}, {"parts": {"a": {"form": "orbax"}}})


def test_nothing_and_nothing_known_are_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(NotFoundError, match="an empty directory"):
        directory_format.read(tmp_path / "empty")
    with pytest.raises(NotFoundError, match="no file that holds tensors"):
        directory_format.read(tmp_path / "other")


def test_files_behind_links_are_read_and_directories_behind_links_are_left_out(directory, tmp_path, caplog):
    (tmp_path / "blob").write_text("linked")
    (directory / "linked.json").symlink_to(tmp_path / "blob")
    (directory / "round").symlink_to(tmp_path)
    part = directory_format.read(directory)
    assert part.content["linked.json"] == b"linked"
    assert not any(name.startswith("round") for name in part.content)
    assert "round: left out" in caplog.text


def test_a_link_to_nothing_is_named(directory, caplog):
    (directory / "tokens.json").symlink_to(directory / "gone")
    assert "tokens.json" not in directory_format.read(directory).content
    assert "tokens.json: left out, a link to nothing" in caplog.text


def test_a_file_of_ours_among_others_stays_as_it_is(directory):
    shrinkpoint.save({"w": torch.ones(9)}, directory / "small.safetensors")
    part = directory_format.read(directory)
    assert part.content["small.safetensors"] == (directory / "small.safetensors").read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="names there have no such signs")
def test_odd_names_go_back_as_they_were(directory, tmp_path):
    odd = [b"a\\b.txt", b"\xff.txt", "\u00e9.txt".encode(), "e\u0301.txt".encode(), b"A.txt", b"a.txt", b" \n.txt"]
    for name in odd:
        (directory / os.fsdecode(name)).write_bytes(name)
    part = directory_format.read(directory)
    (tmp_path / "back").mkdir()
    directory_format.write(tmp_path / "back", part.content, part.info)
    assert bytes_of(tmp_path / "back").keys() == bytes_of(directory).keys()
    assert all((tmp_path / "back" / os.fsdecode(name)).read_bytes() == name for name in odd)
