"""Nothing is made to stand on a damaged file for long, however it was damaged: every chain, every file of it."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.parameters import each_value
from helpers.stores import flip, place, state
from torch.distributed.checkpoint.api import CheckpointException

import shrinkpoint as sp
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.storage.local import LocalSource
from shrinkpoint.store import delta_base
from shrinkpoint.store import directory as folders
from shrinkpoint.store.delta_base import MAX_SAVES_PER_PASS
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.dcp import Reader, Writer, reset_chains

LENGTH = 4
"""Checkpoints before the damage."""


class Stores:
    """A run in a store."""

    def __init__(self, path, kind="local"):
        self.storage = place(kind, path / "store")
        self.store = sp.Store(self.storage, keyframe_every=None)

    def save(self, step):
        return self.store.save(step, state(step)).keyframe

    def loads(self, step):
        with sp.Store(self.storage) as other:
            return other.load(step)["seed"] == step

    def resume(self, step):
        self.store.close()
        self.store = sp.Store(self.storage, keyframe_every=None)
        self.store.load(step)

    def files(self):
        """Keys of the files of the chain so far, the keyframe first."""
        return [self.storage.list(f"step-{step:09d}/rank-")[0] for step in self.store.steps()]


class Managers(Stores):
    """A run in a store that is written beside the loop."""

    def __init__(self, path):
        self.storage = LocalStorage(path / "store")
        self.manager = self._made()

    def _made(self):
        return sp.CheckpointManager(self.storage, keyframe_every=None, background=True)

    def save(self, step):
        self.manager.save(step, extra=state(step))
        return self.manager.wait().keyframe

    def loads(self, step):
        return sp.Store(self.storage).load(step)["extra"]["seed"] == step

    def resume(self, step):
        self.manager.close()
        self.manager = self._made()
        self.manager.restore(step)

    def files(self):
        *_, last = sp.Store(self.storage).steps()
        return self.storage.list(f"step-{last:09d}/bases/") + self.storage.list(f"step-{last:09d}/rank-")


class Trails:
    """A run in folders."""

    def __init__(self, path):
        self.storage = LocalStorage(path / "run")
        self.trail = Checkpointer(keyframe_every=None, background=True)

    def folder(self, step):
        return self.storage.path / f"checkpoint-{step}"

    def save(self, step):
        self.trail.save(self.folder(step), state(step), step=step)
        return self.trail.wait().keyframe

    def loads(self, step):
        return Checkpointer().load(self.folder(step)).state["seed"] == step

    def resume(self, step):
        self.trail.close()
        self.trail = Checkpointer(keyframe_every=None, background=True)
        self.trail.load(self.folder(step))

    def files(self):
        return [f"checkpoint-{step}/rank-00000.safetensors" for step in range(1, LENGTH + 1)]


class Shards(Trails):
    """A run in folders of torch.distributed.checkpoint."""

    def __init__(self, path):
        self.storage = LocalStorage(path / "run")
        reset_chains()

    def save(self, step):
        dcp.save(self._state(step), storage_writer=Writer(self.folder(step), keyframe_every=None))
        return not folders.read_directory_manifest(self.folder(step)).payloads[0].bases

    def loads(self, step):
        found = self._state(0)
        try:
            dcp.load(found, storage_reader=Reader(self.folder(step)))
        except CheckpointException as error:
            [(cause, _)] = error.failures.values()
            raise cause from error
        return torch.equal(found["w"], self._state(step)["w"])

    def resume(self, step):
        reset_chains()
        self.loads(step)

    def _state(self, step):
        return {"w": state(step)["model"]["w"]}


RUNS = {"store": Stores, "manager": Managers, "trail": Trails, "dcp": Shards}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*single process")


def spoil(storage, key, at, *, quietly):
    """Turn a bit; quietly, as a dying disk does it: no time of the file changes."""
    path = storage.path / key
    before = path.stat()
    flip(storage, key, at)
    if quietly:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def saves_in_vain(run, first):
    """How many saves report success and do not load, from a step on until a keyframe is written and loads."""
    in_vain = 0
    for step in range(first, first + 3 * MAX_SAVES_PER_PASS):
        try:
            if run.save(step):
                assert run.loads(step)
                return in_vain
        except ShrinkpointError:
            continue
        try:
            assert run.loads(step)
        except ShrinkpointError:
            in_vain += 1
    pytest.fail("nobody noticed")


@pytest.mark.parametrize(("kind", "resumed"), each_value(RUNS, [False, True]))
def test_touched_file_below_a_chain_costs_no_save(tmp_path, kind, resumed, caplog):
    for number in range(LENGTH):
        run = RUNS[kind](tmp_path / f"{number}")
        for step in range(1, LENGTH + 1):
            run.save(step)
        if resumed:
            run.resume(LENGTH)
        spoil(run.storage, run.files()[number], -1, quietly=False)
        with caplog.at_level(logging.WARNING, "shrinkpoint"):
            assert saves_in_vain(run, LENGTH + 1) == 0
        assert "keyframe" in caplog.text
        caplog.clear()
        assert not run.save(50), "the chain goes on"
        assert run.loads(50)


@pytest.mark.parametrize(("kind", "where"), each_value(RUNS, [0, 20, -1]))
def test_bad_sector_below_a_chain_costs_at_most_a_round_of_saves(tmp_path, kind, where, monkeypatch):
    monkeypatch.setattr(delta_base, "MIN_BYTES", 1)  # as if the files were large
    monkeypatch.setattr(delta_base, "WINDOW_BYTES", 512)
    for number in range(LENGTH):
        run = RUNS[kind](tmp_path / f"{number}")
        for step in range(1, LENGTH + 1):
            run.save(step)
        spoil(run.storage, run.files()[number], where, quietly=True)
        assert saves_in_vain(run, LENGTH + 1) <= MAX_SAVES_PER_PASS
        assert not run.save(50)
        assert run.loads(50)


@pytest.mark.parametrize("kind", RUNS)
def test_bad_sector_below_a_small_chain_costs_no_save(tmp_path, kind):
    run = RUNS[kind](tmp_path)
    for step in range(1, LENGTH + 1):
        run.save(step)
    spoil(run.storage, run.files()[0], -1, quietly=True)
    assert saves_in_vain(run, LENGTH + 1) == 0


@pytest.mark.parametrize("kind", ["memory", "linkless"])
def test_storage_that_tells_no_times_is_read_again_too(tmp_path, kind):
    for number in range(LENGTH):
        run = Stores(tmp_path, kind)
        for step in range(1, LENGTH + 1):
            run.save(step)
        for key in [key for key in run.storage.list() if run.storage.get(key) == run.storage.get(run.files()[number])]:
            flip(run.storage, key)
        assert saves_in_vain(run, LENGTH + 1) == 0


@pytest.mark.parametrize("kind", RUNS)
def test_whole_chain_is_gone_on_with_whoever_links_touches_or_copies_it(tmp_path, kind):
    run = RUNS[kind](tmp_path)
    assert [run.save(step) for step in range(1, LENGTH + 1)] == [True] + [False] * (LENGTH - 1)
    shutil.copytree(run.storage.path, tmp_path / "backup", copy_function=os.link)  # counts of links, times of inodes
    assert not run.save(LENGTH + 1)
    for key in run.files():
        os.utime(run.storage.path / key)
    assert not run.save(LENGTH + 2)
    for key in run.files():  # another inode
        path = run.storage.path / key
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    assert not run.save(LENGTH + 3)
    assert run.loads(LENGTH + 3)


def test_every_byte_is_read_once_in_a_round_and_little_more_than_a_share_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(delta_base, "MIN_BYTES", 1)
    monkeypatch.setattr(delta_base, "WINDOW_BYTES", 256)
    read = []
    with sp.Store(tmp_path, keyframe_every=None) as store:
        store.save(1, {f"w{n}": torch.randn(2000) for n in range(20)})
        manifest = store.manifest(1)
        key = manifest.key(manifest.payloads[0].name)
        links = [delta_base.StoredFile(manifest.digest, manifest.stored_bytes, store.storage, key)]
        seen = delta_base.BaseVerifier()
        seen.mark_verified({link.digest: link.stamp() for link in links})

        class Counting(LocalSource):
            def read(self, offset, length):
                read.append((offset, length))
                return super().read(offset, length)

        monkeypatch.setattr("shrinkpoint.storage.local.LocalSource", Counting)
        shares = []
        for _ in range(MAX_SAVES_PER_PASS):
            read.clear()
            assert seen.find_damage(links) is None
            with seen.read_share():
                pass
            shares.append(set().union(*(range(at, at + length) for at, length in read)))
    size = links[0].size
    assert set().union(*shares) == set(range(size))
    assert all(len(share) < size / MAX_SAVES_PER_PASS + 9000 for share in shares)  # a header, and a window


def test_base_that_is_replaced_is_found_after_the_process_has_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(delta_base, "MIN_BYTES", 0)  # so that an unchanged file is not read again at once
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with sp.Store("runs", keyframe_every=None) as store:
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.save(1, state(1))
        key = store.manifest(1).key(store.manifest(1).payloads[0].name)
        store.storage.put(key, bytes(len(store.storage.get(key))))
        assert store.save(2, state(2)).keyframe
