"""What is no checkpoint of ours is named, with what reads it; and our own damaged files are never taken for others'."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shrinkpoint as sp
from shrinkpoint.errors import CorruptError, FormatError, NotFoundError, StorageError, TruncatedError
from shrinkpoint.store.identify import find_checkpoints, identify
from shrinkpoint.train import Checkpointer

STATE = {"a.weight": torch.arange(12.0).reshape(3, 4)}


class Bomb:
    """What must never be run."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def old_torch(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


def array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(9))
    return file.getvalue()


FILES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "torch": (lambda path: torch.save(STATE, path), "torch.save", "torch.load"),
    "old torch": (old_torch, "pickle", "torch.load"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": Bomb()})), "pickle", "convert"),
    "torch with code": (lambda path: torch.save({"a": Bomb()}, path), "torch.save", "convert"),
    "safetensors": (lambda path: save_file(STATE, path), "safetensors file of another", "safetensors.torch.load_file"),
    "safetensors as transformers writes it": (
        lambda path: save_file(STATE, path, metadata={"format": "pt"}),
        "safetensors file of another",
        "convert",
    ),
    "numpy": (lambda path: path.write_bytes(array()), "numpy", "numpy.load"),
    "text": (lambda path: path.write_text("step 10: loss 3.1\n" * 40), "text", "beside"),
    "short text": (lambda path: path.write_text("hello"), "text", "beside"),
    "json": (lambda path: path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 12})), "text", "beside"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_others_says_what_it_is_and_what_reads_it(name, tmp_path):
    write, what, reader = FILES[name]
    path = tmp_path / "model.bin"
    write(path)
    for read in (sp.load, sp.inspect, lambda path: sp.save(STATE, tmp_path / "delta", base=path)):
        with pytest.raises(FormatError, match=what) as caught:
            read(path)
        assert reader in caught.value.do and (type(caught.value) is FormatError or what == "text")
    assert not (tmp_path / "delta").exists()


def test_an_empty_file_is_told_from_a_damaged_one(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(TruncatedError, match="an empty file"):
        sp.load(tmp_path / "a")


def test_a_store_its_checkpoint_and_a_frameworks_say_how_they_are_loaded(tmp_path):
    with sp.Store(tmp_path / "store") as store:
        store.save(7, STATE)
    Checkpointer().save(tmp_path / "run" / "step-1", STATE)
    for path, what, do in (
        (tmp_path / "store", "a store", "shrinkpoint.load("),
        (tmp_path / "store" / "step-000000007", "a store's checkpoint", "step-000000007')"),
        (tmp_path / "run", "a framework's run", "step-1"),
        (tmp_path / "run" / "step-1", "a framework's checkpoint", "shrinkpoint.load("),
    ):
        with pytest.raises(NotFoundError, match=what) as caught:
            sp.inspect(path)
        assert do in caught.value.do


def test_a_directory_whose_name_no_store_writes_makes_no_store(tmp_path):
    for name in ("step-0000000001", "step-1000000000000000"):
        (tmp_path / name / name).mkdir(parents=True)
        assert identify(tmp_path / name).description == f"a run of another program ({name})"


def hugging_face(path: Path) -> None:
    path.mkdir(parents=True)
    save_file(STATE, path / "model.safetensors")
    (path / "config.json").write_text("{}")


def distributed(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(STATE), checkpoint_id=path)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "hugging face": (hugging_face, "Hugging Face"),
    "a run of hugging face": (lambda path: hugging_face(path / "checkpoint-500"), "a run of another program"),
    "dcp": (distributed, "torch.distributed.checkpoint"),
    "torch files": (lambda path: path.mkdir() or torch.save(STATE, path / "last.ckpt"), "last.ckpt"),
    "nothing": (lambda path: path.mkdir(), "an empty directory"),
    "notes": (lambda path: path.mkdir() or (path / "notes.txt").write_text("x"), "without a checkpoint"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_directory_of_others_says_what_it_is(name, tmp_path):
    write, what = FOLDERS[name]
    write(tmp_path / "out")
    with pytest.raises(NotFoundError, match=what) as caught:
        sp.load(tmp_path / "out")
    assert ("convert" in caught.value.do) is (name not in ("nothing", "notes"))


def test_our_own_file_is_never_taken_for_others_whatever_bytes_of_its_head_are_damaged(tmp_path):
    path = tmp_path / "a.safetensors"
    sp.save(STATE, path)
    whole = path.read_bytes()
    assert identify(path) is None
    for at in range(80):
        for value in (0, ord("{"), whole[at] ^ 1):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            assert identify(path) is None, at
    path.write_bytes(whole[:64])
    with pytest.raises((TruncatedError, CorruptError)):
        sp.load(path)


def test_what_cannot_be_told_stays_the_error_of_its_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(CorruptError, match="header"):
        sp.load(path)


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_directories_that_vanish_are_passed_over():
    with pytest.raises(NotFoundError):
        sp.load("/proc")


def test_a_run_that_cannot_be_listed_is_none_without_checkpoints(tmp_path, monkeypatch):
    def scandir(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(StorageError, match="listing failed"):
        find_checkpoints(tmp_path)


def test_checkpoints_that_replace_those_that_were_listed_are_found(tmp_path, monkeypatch):
    """Retention of a fast run on a busy machine may delete all that a reader has listed."""
    for step in (1, 2):
        Checkpointer(threads=1).save(tmp_path / f"run-{step}" / f"step-{step}", {"w": torch.ones(3)}, step=step)
    old, is_file = tmp_path / "run-1" / "step-1", os.path.isfile

    def replace_first(path):
        if Path(path).parent == old and old.exists():
            shutil.rmtree(old)
            (tmp_path / "run-2" / "step-2").rename(old.with_name("step-2"))
        return is_file(path)

    monkeypatch.setattr(os.path, "isfile", replace_first)
    assert find_checkpoints(tmp_path / "run-1") == [old.with_name("step-2")]
