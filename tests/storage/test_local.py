"""`LocalStorage` is a storage, keeps its order of steps, and keeps its hands off what is not its own."""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contracts.storage import StorageSuite
from helpers.timeouts import PATIENCE

from shrinkpoint._native import xxh3_128
from shrinkpoint.errors import NotFoundError, StorageError, TruncatedError
from shrinkpoint.storage import LocalStorage, Storage, local
from shrinkpoint.storage.local import LocalSource


class TestLocalStorage(StorageSuite):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path):
        self._directory = tmp_path / "not" / "yet"

    def make(self) -> Storage:
        return LocalStorage(self._directory)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


@pytest.fixture
def steps(monkeypatch):
    """The calls that decide about durability, in order, as (name, what), each really made."""
    made = []

    def watch(place, name, describe):
        real = getattr(place, name)

        def call(*args, **kwargs):
            made.append((name, describe(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(place, name, call)

    watch(os, "fsync", lambda fd: Path(f"/dev/fd/{fd}").resolve().name)
    watch(os, "rename", lambda old, new: Path(new).name)
    watch(os, "replace", lambda old, new: Path(new).name)
    watch(os, "link", lambda old, new: "link")
    watch(os, "unlink", lambda path: Path(path).name)
    watch(os, "mkdir", lambda path, *_: Path(path).name)
    return made


class TestDurability:
    def test_object_is_flushed_then_renamed_then_its_directory_is_flushed(self, storage, tmp_path, steps):
        with storage.create("a/b") as sink:
            assert steps == [("mkdir", "a"), ("fsync", tmp_path.name)]
            del steps[:]
            sink.write(b"x")
            assert steps == []
        (flush, temporary), *rest = steps[:3]
        assert (flush, rest) == ("fsync", [("replace", "b"), ("fsync", "a")])
        assert temporary.startswith(".shrinkpoint-tmp-")

    def test_every_new_directory_is_flushed_into_its_parent(self, storage, tmp_path, steps):
        storage.put("a/b/c", b"")
        assert steps[:4] == [("mkdir", "a"), ("fsync", tmp_path.name), ("mkdir", "b"), ("fsync", "a")]

    def test_links_are_flushed_with_their_directory(self, storage, steps):
        storage.put("a", b"")
        del steps[:]
        assert storage.link("a", "d/b") and storage.link("a", "d/c")
        del steps[:2]  # the directory
        moves = [step for step in steps if step[0] != "unlink"]
        assert moves == [("link", "link"), ("link", "link")]
        assert storage.link("a", "d/c")  # in place of a file of this name
        assert steps[-2:] == [("replace", "c"), ("unlink", steps[-1][1])]
        storage.flush_dir("d")
        assert steps[-1] == ("fsync", "d")

    def test_deletion_is_flushed(self, storage, tmp_path, steps):
        storage.put("a/b/c", b"")
        del steps[:]
        storage.delete("a/b/c")
        assert steps == [("unlink", "c"), ("fsync", tmp_path.name)]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_failing_flush_or_rename_leaves_the_old_object_and_nothing_else(self, storage, tmp_path, monkeypatch, call):
        storage.put("a", b"old")

        def fail(*args):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            storage.put("a", b"new")
        assert caught.value.errno == errno.EIO
        assert isinstance(caught.value.__cause__, OSError)
        assert storage.get("a") == b"old"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_file_system_that_cannot_flush_directories_will_do(self, storage, monkeypatch):
        real = os.fsync

        def fsync(fd):
            if Path(f"/dev/fd/{fd}").resolve().is_dir():
                raise OSError(errno.EINVAL, "Invalid argument")
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        storage.put("a/b", b"x")
        assert storage.get("a/b") == b"x"


class TestNeighbours:
    def test_sweep_removes_our_temporaries_and_only_these(self, storage, tmp_path):
        storage.put("step/a", b"")
        folders = {"": "0", "step/": "a", "gone/": "b"}
        ours = [f"{folder}.shrinkpoint-tmp-{letter * 16}" for folder, letter in folders.items()]
        others = ["a.tmp", ".shrinkpoint-tmp-xyz", ".shrinkpoint-tmp-" + "0" * 16 + ".bak", ".hidden", "x/.tmp"]
        for name in ours + others:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(b"x")
        with storage.lock():
            assert storage.remove_stale() == sorted(ours)
            assert storage.remove_stale() == []
        left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
        assert left == {*others, "step/a", ".shrinkpoint-lock"}
        assert not (tmp_path / "gone").exists()

    def test_sweep_spares_a_writer_that_is_at_work(self, storage):
        with storage.create("a") as sink:
            sink.write(b"x")
            assert LocalStorage(storage.path).remove_stale() == []
        assert storage.get("a") == b"x"

    def test_strangers_beside_an_object_are_listed_and_left_alone(self, tmp_path):
        (tmp_path / "mine.txt").write_text("mine")
        (tmp_path / "empty").mkdir()
        storage = LocalStorage(tmp_path)
        storage.put("a.safetensors", b"x")
        assert storage.list() == ["a.safetensors", "mine.txt"]
        storage.delete("a.safetensors")
        storage.remove_stale()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine.txt"]

    def test_directory_that_becomes_empty_goes_but_never_the_root(self, storage, tmp_path):
        storage.put("a/b/c", b"")
        storage.put("a/d", b"")
        storage.delete("a/b/c")
        assert not (tmp_path / "a/b").exists()
        storage.delete("a/d")
        assert tmp_path.exists()
        assert list(tmp_path.iterdir()) == []

    def test_failed_creation_leaves_no_directories(self, storage, tmp_path):
        with pytest.raises(ZeroDivisionError), storage.create("a/b/c"):
            1 / 0
        assert list(tmp_path.iterdir()) == []

    def test_directories_and_pipes_are_not_objects(self, storage, tmp_path):
        (tmp_path / "folder").mkdir()
        os.mkfifo(tmp_path / "pipe")
        for key in ("folder", "pipe"):
            with pytest.raises(NotFoundError):
                storage.open(key)

    def test_file_in_the_way_of_a_directory_is_a_storage_error(self, storage):
        storage.put("a", b"")
        with pytest.raises(StorageError):
            storage.put("a/b", b"")
        storage.put("d/e", b"")
        with pytest.raises(StorageError):
            storage.put("d", b"")
        assert storage.list() == ["a", "d/e"]

    def test_relative_path_keeps_its_meaning_when_the_process_moves(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        storage = LocalStorage("runs")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        storage.put("a", b"")
        assert (tmp_path / "runs/a").exists()
        assert (storage.describe("a"), storage.path) == ("runs/a", tmp_path / "runs")

    def test_new_files_have_the_rights_the_umask_leaves(self, storage, tmp_path):
        (tmp_path / "usual").touch()
        storage.put("a", b"")
        assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode


class TestReading:
    def test_pieces_make_a_whole(self, storage, monkeypatch):
        monkeypatch.setattr(local, "_MAX_READ_BYTES", 7)
        storage.put("a", bytes(range(100)))
        with storage.open("a") as source:
            assert bytes(source.read(1, 98)) == bytes(range(1, 99))

    @pytest.mark.parametrize("size", [100, 300_000])
    def test_file_that_shrinks_while_it_is_open_is_truncated(self, storage, tmp_path, size):
        storage.put("a", bytes(size))
        with storage.open("a") as source:
            os.truncate(tmp_path / "a", 40)
            assert len(source.read(0, 40)) == 40
            with pytest.raises(TruncatedError, match="only 40 bytes"):
                source.read(10, size - 10)

    @pytest.mark.parametrize("size", [100, 300_000])
    def test_partial_reads_are_continued(self, storage, monkeypatch, size):
        content, pread, preadv = os.urandom(size), os.pread, os.preadv
        storage.put("a", content)
        monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, length // 2, offset))
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][: size // 3]], offset))
        with storage.open("a") as source:
            assert bytes(source.read(1, size - 1)) == content[1:]

    def test_partial_writes_are_continued(self, storage, monkeypatch):
        class Slow(io.FileIO):
            def write(self, data):
                return super().write(data[:3])

        monkeypatch.setattr(local, "FileIO", Slow)
        storage.put("a", bytes(range(100)))
        assert storage.get("a") == bytes(range(100))

    @pytest.mark.parametrize("length", [0, 1, 70_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 12_345, 3 << 19])
    def test_bytes_read_with_their_digest_are_those_that_are_read_without(self, storage, length):
        data = os.urandom((3 << 19) + 7)
        storage.put("a", data)
        with storage.open("a") as source:
            found, digest = source.read_hashed(7, length)
            assert bytes(found) == data[7 : 7 + length] and digest == xxh3_128(data[7 : 7 + length])
            with pytest.raises(TruncatedError):
                source.read_hashed(8 + len(data) - length, length)

    @pytest.mark.parametrize("size", [3, 300_000])
    def test_disk_that_fails_to_read_is_a_storage_error(self, storage, monkeypatch, size):
        def fail(*args):
            raise OSError(errno.EIO, "Input/output error")

        storage.put("a", bytes(size))
        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, fail)
        with storage.open("a") as source, pytest.raises(StorageError, match="reading failed"):
            source.read(0, size)

    @pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
    def test_place_without_links_says_so_and_keeps_no_trace(self, storage, tmp_path, monkeypatch, number):
        def fail(*args):
            raise OSError(number, os.strerror(number))

        storage.put("a", b"")
        monkeypatch.setattr(os, "link", fail)
        assert storage.link("a", "deep/b") is False
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_linked_directories_are_listed_nowhere(tmp_path):
    storage = LocalStorage(tmp_path / "here")
    storage.put("a/b", b"")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "c").write_bytes(b"")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    assert storage.list() == storage.list("a/") == ["a/b"]
    assert storage.list("link/") == []
    assert storage.list_dirs() == ["a"]
    assert LocalStorage(tmp_path / "nothing").list_dirs() == []
    (tmp_path / "by_link").symlink_to(tmp_path / "here")
    assert LocalStorage(tmp_path / "by_link").list() == ["a/b"]
    assert LocalStorage(tmp_path / "by_link").list_dirs() == ["a"]


def test_no_one_is_told_to_remove_a_directory(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.put("run/a", b"")
    with pytest.raises(StorageError, match="a directory under this name") as caught:
        storage.put("run", b"")
    assert "remove" not in caught.value.do


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOLCK, "with locks"), (errno.EIO, "check the disk")])
def test_what_the_system_says_of_a_lock_decides_what_is_advised(tmp_path, monkeypatch, number, advice):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StorageError, match="locking failed") as caught, LocalStorage(tmp_path).lock():
        pass
    assert advice in caught.value.do and caught.value.errno == number


def test_what_is_deleted_while_it_is_opened_is_not_found(tmp_path):
    """Another process prunes: between the look for a file and its opening there is always a moment."""
    storage, stop = LocalStorage(tmp_path), threading.Event()

    def prune() -> None:
        while not stop.is_set():
            storage.delete("a")
            (tmp_path / "a").write_bytes(b"data")

    with ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(prune)
        found = missed = 0
        until = time.monotonic() + PATIENCE
        try:
            while (found < 200 or missed < 200) and time.monotonic() < until:
                try:
                    storage.get("a")
                    storage.link("a", "b")
                    found += 1
                except NotFoundError:
                    missed += 1
        finally:
            stop.set()
        pruning.result()
    assert found and missed


def test_a_file_that_is_gone_when_it_is_opened(tmp_path):
    with pytest.raises(NotFoundError, match=r"gone: no such file\. Check the path"):
        LocalSource(tmp_path / "gone", str(tmp_path / "gone"))
    with pytest.raises(NotFoundError, match=r"gone: no such file\. Check the path"):
        LocalStorage(tmp_path).link_file(tmp_path / "gone", "new")
