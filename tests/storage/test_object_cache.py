"""A cache of objects: what this machine has read or written is not fetched again, and no damage of it is an error."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from contracts.storage import StorageSuite
from helpers.processes import run_forked
from helpers.strategies import difference

import shrinkpoint
from shrinkpoint import CheckpointManager, Store
from shrinkpoint.errors import NotFoundError, PolicyError, StorageError
from shrinkpoint.storage import LocalStorage, MemoryStorage, ObjectCache, Storage
from shrinkpoint.storage.object_storage import ObjectStorage

_numbers = itertools.count()
DATA = bytes(range(256)) * (1 << 13)  # 2 MiB
CHANGED = DATA[::-1]


@pytest.fixture
def url(s3) -> str:
    return f"s3://checkpoints/{os.getpid()}/cache-{next(_numbers)}"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def state(seed: int) -> dict:
    """A state of 1 MiB, which does not get smaller; half of it is another one in every step."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    generator.manual_seed(seed)
    noise[1 << 19 :] = torch.randint(0, 256, (1 << 19,), dtype=torch.uint8, generator=generator)
    return {"model": {"noise": noise}, "seed": seed}


def put(storage: Storage, key: str, data: bytes = DATA) -> None:
    with storage.create(key) as sink:
        sink.write(data)


def read(storage: Storage, key: str) -> bytes:
    with storage.open(key) as source:
        return bytes(source.read(0, source.size))


def fetched(s3, pattern: str = "") -> list[str]:
    """The objects, or parts of some, that were fetched since `clear`."""
    return [
        path for method, path, _ in s3.requests() if method == "GET" and "list-type" not in path and pattern in path
    ]


class TestCachedObjectStorage(StorageSuite):
    @pytest.fixture(autouse=True)
    def in_folder(self, s3, folder):
        self.folder = folder

    def make(self) -> Storage:
        return ObjectStorage(f"s3://checkpoints/{os.getpid()}/cached-{next(_numbers)}", cache=self.folder)

    def test_source_outlives_the_deletion_and_the_replacement_of_its_object(self, storage):
        """A copy that is open is read on; without one reading fails, and never gives other bytes."""
        put(storage, "a")
        with storage.open("a") as source:
            put(storage, "a", CHANGED)
            assert bytes(source.read(1 << 20, 100)) == DATA[1 << 20 :][:100]
        assert read(storage, "a") == CHANGED


def test_resume_on_this_machine_fetches_no_payload(url, s3, folder):
    manager = CheckpointManager(url, cache=folder)
    for step in (1, 2, 3):
        manager.save(step, extra=state(step), rng=False)
    manager.close()
    s3.clear()
    manager = CheckpointManager(url, cache=folder)
    assert difference(manager.restore().extra, state(3)) is None
    assert not manager.save(4, extra=state(4), rng=False).keyframe  # decodes its base again
    manager.close()
    assert fetched(s3, "rank-") == []
    assert difference(shrinkpoint.load(url, cache=folder)["extra"], state(4)) is None
    assert fetched(s3, "rank-") == []


def test_second_load_on_another_machine_fetches_no_payload(url, s3, folder, monkeypatch):
    with Store(url) as store:
        for step in (1, 2):
            store.save(step, state(step))
    shrinkpoint.save(state(7), f"{url}/file.safetensors")
    monkeypatch.setenv("SHRINKPOINT_CACHE", str(folder))
    for expected in (True, False):
        s3.clear()
        assert difference(shrinkpoint.load(url), state(2)) is None
        assert difference(Store(url).load(1), state(1)) is None
        assert difference(shrinkpoint.load(f"{url}/file.safetensors"), state(7)) is None
        assert any(path.endswith(".safetensors") for path in fetched(s3)) is expected


def test_large_object_is_cached_whichever_way_it_is_written_and_read(url, s3, folder):
    data = DATA * 10  # in parts
    storage = ObjectStorage(url, cache=folder)
    put(storage, "a", data)
    s3.clear()
    assert read(storage, "a") == data
    assert fetched(s3) == []
    other = folder / "other"
    storage = ObjectStorage(url, cache=other)
    with storage.open("a") as source, ThreadPoolExecutor(4) as pool:
        ranges = [(begin, 300_000) for begin in range(len(data) // 4, len(data) - 300_000, 299_000)]
        parts = pool.map(lambda place: bytes(source.read(*place)), ranges)
        assert all(part == data[begin : begin + size] for part, (begin, size) in zip(parts, ranges, strict=True))
    s3.clear()
    with storage.open("a") as source:
        for begin, size in ((0, 1), (1 << 20, 1), ((1 << 20) - 1, 2), (5, 3 << 20), (len(data) - 9, 9), (len(data), 0)):
            assert bytes(source.read(begin, size)) == data[begin : begin + size]
    assert fetched(s3) == []


def test_part_of_an_object_is_read_without_the_rest(url, s3, folder):
    put(ObjectStorage(url), "a", DATA * 10)
    s3.clear()
    for _ in range(2):
        with ObjectStorage(url, cache=folder).open("a") as source:
            source.read(0, 1000)
            source.read(9 << 20, 1000)
    assert len(fetched(s3)) == 4
    assert [*folder.iterdir()] == []


def test_replaced_object_is_fetched(url, folder):
    cached = ObjectStorage(url, cache=folder)
    put(cached, "a")
    put(ObjectStorage(url), "a", CHANGED)
    for _ in range(2):
        assert read(cached, "a") == CHANGED
    ObjectStorage(url).delete("a")
    with pytest.raises(NotFoundError):
        cached.open("a")


def test_deleting_an_object_deletes_its_copy(url, folder):
    storage = ObjectStorage(url, cache=folder)
    put(storage, "a")
    assert len([*folder.iterdir()]) == 1
    storage.delete("a")
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("at", [0, 1 << 20, (1 << 21) - 1, (1 << 21) + 30, -41, -8, -1])
def test_damaged_copy_is_fetched_again(url, s3, folder, at):
    storage = ObjectStorage(url, cache=folder)
    put(storage, "a")
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert read(storage, "a") == DATA
    s3.clear()
    assert read(storage, "a") == DATA
    assert fetched(s3) == []


@pytest.mark.parametrize("length", [0, 1, 39, 40, 1 << 20, -1])
def test_copy_cut_short_is_fetched_again(url, folder, length):
    storage = ObjectStorage(url, cache=folder)
    put(storage, "a")
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:length])
    assert read(storage, "a") == DATA


def test_copy_that_is_cut_while_it_is_open_is_read_on_from_the_bucket(url, folder, caplog):
    storage = ObjectStorage(url, cache=folder)
    put(storage, "a")
    (path,) = folder.iterdir()
    with storage.open("a") as source:
        assert bytes(source.read(0, 10)) == DATA[:10]
        os.truncate(path, 1 << 20)
        assert bytes(source.read(1 << 20, 1 << 20)) == DATA[1 << 20 :]
    assert "read again" in caplog.text
    with storage.open("a") as source:
        os.truncate(next(folder.iterdir()), 1 << 20)
        put(ObjectStorage(url), "a", CHANGED)
        with pytest.raises(StorageError, match="another object than the one that was opened"):
            source.read(1 << 20, 1 << 20)


def test_least_recently_used_copies_go_first(url, folder):
    storage = ObjectStorage(url, cache=ObjectCache(folder, max_bytes=7 << 20))
    for name in ("a", "b", "c"):
        put(storage, name)
        time.sleep(0.01)
    assert read(storage, "a") == DATA
    put(storage, "d")
    names = {path.name for path in folder.iterdir()}
    storage.delete("b")
    assert {path.name for path in folder.iterdir()} == names  # it was gone already
    storage.delete("a")
    assert {path.name for path in folder.iterdir()} < names
    put(storage, "larger than all", DATA * 4)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 7 << 20


def test_full_disk_is_no_error(url, s3, folder, caplog):
    storage = ObjectStorage(url, cache=folder)
    put(ObjectStorage(url), "read")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # no file here grows beyond 1 MiB
    try:
        put(storage, "written")
        for name in ("written", "read"):
            assert read(storage, name) == DATA
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [*folder.iterdir()] == []
    assert caplog.text.count("caches nothing now") == 1


def test_place_that_cannot_be_written_is_no_error(url, tmp_path):
    (tmp_path / "file").touch()
    storage = ObjectStorage(url, cache=tmp_path / "file" / "below")
    put(storage, "a")
    assert read(storage, "a") == DATA


def test_place_that_cannot_be_named_is_no_error(url, tmp_path):
    storage = ObjectStorage(url, cache=tmp_path / ("x" * 300))
    put(storage, "a")
    assert read(storage, "a") == DATA


def test_copies_that_vanish_meanwhile_are_no_error(url, folder):
    storage = ObjectStorage(url, cache=folder)
    put(storage, "a")
    with storage.open("a") as source:
        for path in folder.iterdir():
            path.unlink()
        assert bytes(source.read(0, len(DATA))) == DATA
    assert read(storage, "a") == DATA


def test_wrong_settings_are_errors_that_say_which(url, folder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for cache in ("s3://bucket/x", tmp_path / "file", "", 7):
        with pytest.raises(PolicyError, match="cache"):
            ObjectStorage(url, cache=cache)
    with pytest.raises(PolicyError, match="max_bytes"):
        ObjectCache(folder, max_bytes=0)
    with pytest.raises(PolicyError, match="ObjectStorage"):
        Store(MemoryStorage(), cache=folder)
    Store(tmp_path / "run", cache=folder)  # without effect
    monkeypatch.setenv("SHRINKPOINT_CACHE", str(folder))
    monkeypatch.setenv("SHRINKPOINT_CACHE_BYTES", "10G")
    with pytest.raises(PolicyError, match="SHRINKPOINT_CACHE_BYTES"):
        ObjectStorage(url)
    LocalStorage(tmp_path / "run")


_KILLS = """
import os, random, signal, sys, time
url, folder, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])

def use():
    from shrinkpoint.storage import ObjectCache
    from shrinkpoint.storage.object_storage import ObjectStorage
    storage = ObjectStorage(url, cache=ObjectCache(folder, max_bytes=9 << 20))
    while True:
        name = f"object-{random.randrange(6)}"
        data = bytes([ord(name[-1])]) * (2 << 20)
        if random.random() < .3:
            with storage.create(name) as sink:
                sink.write(data)
        else:
            with storage.open(name) as source:
                assert bytes(source.read(0, source.size)) == data

for name in "012345":
    pid = os.fork()
    if pid == 0:
        def put():
            from shrinkpoint.storage.object_storage import ObjectStorage
            with ObjectStorage(url).create(f"object-{name}") as sink:
                sink.write(bytes([ord(name)]) * (2 << 20))
        finish(put)
    assert os.waitpid(pid, 0)[1] == 0
for number in range(kills):
    children = []
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            random.seed(10 * number + rank)
            finish(use)
        children.append(pid)
    random.seed(number)
    time.sleep(random.uniform(.3, 1.5))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "an error"
"""


@pytest.mark.nightly
def test_killed_processes_leave_a_cache_that_others_use(url, s3, folder):
    run_forked(_KILLS, url, str(folder), "8", timeout=200)
    storage = ObjectStorage(url, cache=ObjectCache(folder, max_bytes=9 << 20))
    for number in range(6):
        assert read(storage, f"object-{number}") == bytes([ord(str(number))]) * (2 << 20)
    assert not [path for path in folder.iterdir() if path.name.startswith("tmp-")]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 9 << 20
