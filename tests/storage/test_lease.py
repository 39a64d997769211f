"""One writer at a time in a bucket, whatever becomes of the writers, and of their requests."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from helpers.parameters import each_value

from shrinkpoint.errors import LockedError, StorageError
from shrinkpoint.storage.lease import Lease, LockNote, _machine
from shrinkpoint.storage.object_storage import ObjectStorage

pytestmark = pytest.mark.usefixtures("s3")
LOCK = ".shrinkpoint-lease"
_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    return f"s3://checkpoints/lease-{next(_numbers)}"


def read_note(storage: ObjectStorage) -> dict:
    import obstore

    return json.loads(bytes(obstore.get(storage._store, LOCK).bytes()))


def write_note(storage: ObjectStorage, **changes) -> None:
    """Take the lock as another writer would, without asking."""
    import obstore

    obstore.put(storage._store, LOCK, LockNote(**{"token": "other", "count": 1, "seconds": 60.0, **changes}).to_bytes())


def test_second_writer_is_told_who_the_first_is_and_how_long_it_would_have_to_wait(url):
    refused = pytest.raises(LockedError, match=r"process \d+ on host .* is saving here already.*lease ends in 6\d s")
    with ObjectStorage(url).lock(), refused:
        ObjectStorage(url).lock().__enter__()
    with ObjectStorage(url).lock():
        pass


def test_of_many_that_begin_at_once_one_becomes_the_writer(url):
    storages, barrier = [ObjectStorage(url) for _ in range(8)], threading.Barrier(8)

    def lock(storage: ObjectStorage, stack: ExitStack) -> bool:
        barrier.wait()
        try:
            stack.enter_context(storage.lock())
        except LockedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            with ExitStack() as stack:
                assert sum(pool.map(lambda storage: lock(storage, stack), storages)) == 1


def test_writer_that_died_on_this_machine_has_a_successor_at_once(url):
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    storage = ObjectStorage(url)
    with storage.lock():
        machine = read_note(storage)["machine"]
    if not machine:
        pytest.skip("this system does not say which machine it is")
    write_note(storage, machine=machine, pid=int(process.stdout), host="here")
    with storage.lock():
        pass
    write_note(storage, machine=machine, pid=1, host="here")
    with pytest.raises(LockedError), storage.lock():
        pass


@pytest.mark.parametrize("note", [{"machine": "another", "pid": 1}, {}])
def test_writer_that_died_elsewhere_has_a_successor_when_its_lease_has_ended(url, note):
    storage = ObjectStorage(url)
    write_note(storage, seconds=1.5, **note)
    with pytest.raises(LockedError, match="lease ends in"), storage.lock():
        pass
    deadline = time.monotonic() + 60
    while True:
        try:
            with storage.lock():
                return
        except LockedError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_damaged_lock_object_is_a_lease_of_an_unknown_writer(url):
    import obstore

    storage = ObjectStorage(url)
    obstore.put(storage._store, LOCK, b"{]")
    with pytest.raises(LockedError, match="another process is saving here already"), storage.lock():
        pass


def test_lease_is_renewed_until_it_is_released(url):
    storage = ObjectStorage(url, lease_seconds=1.5)
    with storage.lock():
        deadline = time.monotonic() + 60
        while read_note(storage)["count"] < 8:  # longer than a lease and its margin
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with pytest.raises(LockedError), ObjectStorage(url).lock():
            pass
    assert read_note(storage)["token"] == ""


def test_writer_whose_lease_was_taken_commits_nothing_more(url):
    storage = ObjectStorage(url)
    with storage.lock():
        storage.put("before", b"")
        write_note(storage, pid=7, host="elsewhere")
        for _ in range(2):
            with pytest.raises(LockedError, match="taken by process 7 on host 'elsewhere'"):
                storage.put("after", b"")
            with pytest.raises(LockedError), storage.create("after"):
                pass
            with pytest.raises(LockedError):
                storage.delete("before")
    assert storage.list() == ["before"]
    assert read_note(storage)["token"] == "other"  # it is not released for another


@pytest.mark.parametrize(("kind", "skip"), each_value(["lost", "error", "cut_answer"], range(4)))
def test_lost_answer_to_a_conditional_write_is_looked_up(s3, url, skip, kind):
    storage = ObjectStorage(url)
    s3.fail(f"PUT .*{LOCK}", kind, skip=skip)
    for _ in range(2):
        with storage.lock():
            storage.put("a", b"1")
            with pytest.raises(LockedError), ObjectStorage(url).lock():
                pass


def test_service_without_conditional_writes_is_refused(s3, url):
    s3.fail(f"PUT .*{LOCK}", "unconditional", count=1000)
    with pytest.raises(StorageError, match="ignores If-None-Match"), ObjectStorage(url).lock():
        pass


def test_forked_process_neither_has_nor_frees_the_lease(url, monkeypatch):
    storage = ObjectStorage(url)
    with storage.lock():
        monkeypatch.setattr(Lease, "is_own", False)
        storage._lease.release()
        monkeypatch.undo()
        assert read_note(storage)["token"] != ""


def test_note_with_an_impossible_process_id_is_of_a_writer_that_may_live(url):
    storage = ObjectStorage(url)
    write_note(storage, pid=1 << 80, machine=_machine())
    with pytest.raises(LockedError, match="lease ends in"), storage.lock():
        pass
