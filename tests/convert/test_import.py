"""Into a store: one chain, the same bits, and a conversion that was interrupted goes on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from helpers.faulty_storage import FaultyStorage
from helpers.foreign_files import run_of_files, same, training

from shrinkpoint import save as save_file
from shrinkpoint import schemes
from shrinkpoint.container import FileWriter
from shrinkpoint.convert.discover import discover
from shrinkpoint.convert.import_ import Importer, describe_difference, verify_import
from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError, StateError
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.storage.sizing import SizingStorage
from shrinkpoint.store import Store
from shrinkpoint.store.single_file import decode_file
from shrinkpoint.tensors.flat_state import flatten


def _converted(storage, checkpoints, **settings):
    with Importer(storage, **settings) as into:
        return [into.import_checkpoint(one) for one in checkpoints]


@pytest.fixture
def run(tmp_path: Path):
    return discover(run_of_files(tmp_path / "run", (10, 20, 30, 40))).checkpoints


def test_a_run_becomes_one_chain_of_the_same_bits(run, tmp_path):
    rows = _converted(LocalStorage(tmp_path / "store"), run)
    assert [row.keyframe for row in rows] == [True, False, False, False]
    assert rows[1].after < rows[0].after < rows[0].before
    with Store(tmp_path / "store") as store:
        for step in (10, 20, 30, 40):
            loaded = store.load(step)
            assert loaded["source"] == {"name": f"step-{step}.pt", "form": "torch"}
            assert same(loaded["state"], training(step))
        assert store.manifest(40).note == "converted from step-40.pt"
    assert list(verify_import(LocalStorage(tmp_path / "store"), run)) == [(step, True) for step in (10, 20, 30, 40)]


def test_wherever_the_disk_fails_the_next_try_ends_with_all_of_it(run, tmp_path):
    counted = FaultyStorage(LocalStorage(tmp_path / "whole"))
    _converted(counted, run[:2])
    for fail in range(1, counted.calls, 8):
        storage = LocalStorage(tmp_path / f"store-{fail}")
        with contextlib.suppress(ShrinkpointError):  # some calls may fail without harm
            _converted(FaultyStorage(storage, fail), run[:2])
        assert [row.step for row in _converted(storage, run[:2])] == [10, 20]
        assert list(verify_import(storage, run[:2])) == [(10, True), (20, True)]


def test_another_checkpoint_of_the_step_is_not_replaced_until_asked(run, tmp_path):
    storage = LocalStorage(tmp_path / "store")
    with Store(storage) as store:
        store.save(20, {"w": torch.ones(2)})
    with pytest.raises(PolicyError, match=r"step 20: a checkpoint that differs"):
        _converted(storage, run)
    rows = _converted(storage, run, force=True)
    assert not any(row.done for row in rows[1:])
    assert len(list(verify_import(storage, run))) == 4


def test_a_step_whose_values_changed_is_saved_again_when_asked(run, tmp_path):
    storage = LocalStorage(tmp_path / "store")
    _converted(storage, run)
    other = training(20)
    other["model"]["bias"][3] += 1
    torch.save(other, run[1].path)
    assert [row.done for row in _converted(storage, run)] == [True] * 4  # the structure is the same
    with pytest.raises(CorruptError, match="add --force to save it again"):
        list(verify_import(storage, run))
    assert [row.done for row in _converted(storage, run, force=True)] == [True, False, True, True]
    assert list(verify_import(storage, run)) == [(step, True) for step in (10, 20, 30, 40)]


def test_verification_finds_a_value_that_differs(run, tmp_path):
    storage = LocalStorage(tmp_path / "store")
    _converted(storage, run)
    other = training(30)
    other["model"]["bias"][3] += 1e-7
    torch.save(other, run[2].path)
    with pytest.raises(CorruptError, match=r"step 30: state/model/bias has other values"):
        list(verify_import(storage, run))


def test_a_lossy_scheme_keeps_everything_but_the_values(run, tmp_path):
    storage = LocalStorage(tmp_path / "store")
    scheme = schemes.Fisher(relative_error=0.3)
    rows = _converted(storage, run, scheme=scheme)
    exact = _converted(SizingStorage(), run)
    assert sum(row.after for row in rows) < 0.7 * sum(row.after for row in exact)
    assert list(verify_import(storage, run)) == [(step, False) for step in (10, 20, 30, 40)]


def test_what_cannot_be_stored_is_named_with_its_file(tmp_path):
    torch.save({"a": [torch.eye(2).to_sparse()]}, tmp_path / "a.pt")
    with pytest.raises(StateError, match=r"a\.pt: state\['state'\]\['a'\]\[0\]"):
        _converted(SizingStorage(), discover(tmp_path / "a.pt").checkpoints)


def _stored(storage) -> list[int]:
    with Store(storage, keyframe_every=2) as store:
        for step in range(4):
            values = torch.randn(3, 5000, generator=torch.Generator().manual_seed(step))
            store.save(step, {f"layer {i}": row for i, row in enumerate(values)})
        return [one.stored_bytes for one in store.list()]


@pytest.mark.parametrize("spool", [0, 1 << 24])
def test_it_weighs_what_a_storage_would_hold(monkeypatch, spool):
    """With and without room reserved for the header, which may have to be moved."""
    monkeypatch.setattr(FileWriter, "spool", spool)
    assert _stored(SizingStorage()) == _stored(MemoryStorage())


def test_a_payload_cannot_be_read_again():
    scale = SizingStorage()
    _stored(scale)
    with Store(scale) as store, pytest.raises(ShrinkpointError):
        store.load()


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"w": torch.ones(3), "n": 2}, "plain values"),
        ({"w": torch.ones(3), "n": 1, "m": torch.ones(1)}, "nest"),
        ({"w": torch.ones(4), "n": 1}, "shape"),
        ({"w": torch.ones(3).int(), "n": 1}, "int32"),
        ({"w": torch.zeros(3), "n": 1}, "other values"),
    ],
)
def test_the_first_difference_from_its_source_is_named(tmp_path, other, what):
    save_file(other, tmp_path / "a.safetensors")
    decoded, _ = decode_file(tmp_path / "a.safetensors")
    assert what in describe_difference(flatten({"w": torch.ones(3), "n": 1}), decoded)
    assert describe_difference(flatten(other), decoded) == ""
