"""A store in a file, as torch's stores are used, and after its writers were killed."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from datetime import timedelta
from zlib import crc32

import pytest
import torch.distributed as dist
from helpers.processes import ranks, run_forked
from helpers.timeouts import PATIENCE

from shrinkpoint.comm import SharedFileStore
from shrinkpoint.errors import CorruptError, PolicyError, StorageError


def calls(store) -> list:
    """What each method answers, in an order in which they depend on each other."""
    short = timedelta(milliseconds=20)
    answers = [store.set("a", "1"), store.get("a"), store.check(["a"]), store.check(["a", "b"]), store.check([])]
    answers += [store.add("sum", 2), store.add("sum", -5), store.get("sum"), store.num_keys()]
    answers += [store.compare_set("c", "", "first"), store.compare_set("c", "", "second"), store.get("c")]
    answers += [store.compare_set("c", "first", "third"), store.compare_set("none", "x", "y"), store.check(["none"])]
    answers += [
        store.wait(["a", "c"]),
        store.wait(["a"], short),
        store.set("ä ", "ö"),
        store.get("ä "),
        store.set("e", ""),
    ]
    answers += [store.get("e"), store.delete_key("a"), store.check(["a"]), store.num_keys()]
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
        store.wait(["a", "c"], short)
    store.set_timeout(short)
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
        store.get("a")
    return [bytes(answer) if isinstance(answer, bytes) else answer for answer in answers]


def test_its_methods_answer_as_those_of_torchs_own_store(tmp_path):
    expected = calls(dist.HashStore())
    store = SharedFileStore(tmp_path / "store")
    assert calls(store) == expected
    assert SharedFileStore(tmp_path / "store").get("c") == b"third"
    again = SharedFileStore(tmp_path / "other")
    again.set("unprefixed", b"\0\xff")
    for wrapped in (dist.PrefixStore("x", again), dist.PrefixStore("y", dist.PrefixStore("z", again)).clone()):
        kept = wrapped.timeout
        wrapped.set("a", b"\0\xff")
        assert wrapped.get("a") == b"\0\xff" == again.get("unprefixed") and wrapped.add("n", 3) == 3
        assert wrapped.check(["a"]) and not wrapped.check(["b"])
        assert wrapped.delete_key("a") and not wrapped.check(["a"])
        assert again.timeout == kept


def test_torch_holds_a_store_that_its_user_has_dropped(tmp_path):
    store = dist.PrefixStore("a", SharedFileStore(tmp_path / "store"))
    store.set("x", "1")
    assert store.get("x") == b"1"


def test_a_record_that_was_cut_anywhere_is_ignored_and_replaced(tmp_path):
    path = tmp_path / "store"
    first = SharedFileStore(path)
    first.set("key", "before")
    whole = path.stat().st_size
    first.set("key", "after")
    data = path.read_bytes()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        reader, writer = SharedFileStore(path), SharedFileStore(path)
        assert reader.get("key") == b"before"
        assert writer.add("count", 1) == 1
        assert reader.get("key") == b"before" and reader.get("count") == b"1"
        assert SharedFileStore(path).num_keys() == 2
    for size in range(20):  # a process was killed before the file had its first bytes
        path.write_bytes(data[:size])
        SharedFileStore(path).set("key", "new")
        assert SharedFileStore(path).get("key") == b"new"


KILLED = """
    import os, random, signal, sys, time
    from shrinkpoint.comm import SharedFileStore

    store, draws = SharedFileStore(sys.argv[1]), random.Random(5)

    def count(name):
        while True:
            number = store.add(name, 1)
            os.write(1, f"{name} {number}\\n".encode())

    def start(name):
        pid = os.fork()
        if pid == 0:
            count(name)
        return pid

    for kill in range(int(sys.argv[2])):
        names = f"{kill} a", f"{kill} b"
        pids = [start(name) for name in names]
        while not store.check(list(names)):
            time.sleep(0.001)
        time.sleep(draws.random() * 0.02)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        store.add("kills", 1)
"""


def test_no_kill_of_a_process_that_writes_stops_the_others_or_takes_back_what_was_written(tmp_path):
    kills = 10
    said = run_forked(KILLED, str(tmp_path / "store"), str(kills)).splitlines()
    store = SharedFileStore(tmp_path / "store")
    assert store.get("kills") == str(kills).encode()
    counts: dict[str, int] = {}
    for line in said:
        name, _, number = line.rpartition(" ")
        counts[name] = int(number)
    assert len(counts) == 2 * kills and sum(counts.values()) > 10 * kills
    for name, number in counts.items():
        assert int(store.get(name)) - number in (0, 1)  # it may have been killed before it could say so


STOPPED = """
    import fcntl, os, signal, sys, time
    from datetime import timedelta
    from shrinkpoint.comm import SharedFileStore
    from shrinkpoint.errors import StorageError

    store = SharedFileStore(sys.argv[1])
    store.set_timeout(timedelta(seconds=0.2))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)  # as in the middle of a write
        os.write(writing, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.read(reading, 1)
    for call in (lambda: store.check(["a"]), lambda: store.set("a", "b")):
        try:
            call()
        except StorageError as error:
            print(error)
    os.kill(pid, signal.SIGKILL)
    store.set("a", "b")
    print(store.get("a"))
"""


def test_a_stopped_process_that_holds_the_lock_is_an_error_and_a_killed_one_is_not(tmp_path):
    *errors, value = run_forked(STOPPED, str(tmp_path / "store")).splitlines()
    assert value == "b'b'" and len(errors) == 2
    assert all(
        "locked by another process until the timeout. Look for a process that is stopped" in error for error in errors
    )


def test_threads_share_a_store(tmp_path):
    store = SharedFileStore(tmp_path / "store")
    threads = [threading.Thread(target=lambda: [store.add("sum", 1) for _ in range(200)]) for _ in range(4)]
    waiting = threading.Thread(target=lambda: store.get("end"))
    for thread in [waiting, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("sum", 0) == 800 and waiting.is_alive()
    store.set("end", "")
    waiting.join()


def test_a_file_of_something_else_and_one_that_was_changed_are_named(tmp_path):
    path = tmp_path / "store"
    path.write_text("a long text that somebody has written for another purpose")
    with pytest.raises(CorruptError, match=r"a file of something else; expected one that SharedFileStore has made"):
        SharedFileStore(path)
    path.unlink()
    store = SharedFileStore(path)
    store.set("key", "value"), store.set("other", "value")
    whole = path.read_bytes()
    for place in range(20, len(whole)):  # a length that is another one is no record without an end
        data = bytearray(whole)
        data[place] ^= 0x80
        path.write_bytes(data)
        with pytest.raises(
            CorruptError, match=r"another record in byte \d\d; expected .* Give each training a new file"
        ):
            SharedFileStore(path)
    path.write_bytes(whole[:30])
    with pytest.raises(CorruptError, match=r"30 bytes; expected .* or more"):
        store.check(["key"])
    path.unlink()
    with pytest.raises(StorageError, match="No such file or directory"):
        store.check(["key"])


def test_lengths_of_a_hostile_record_allocate_nothing(tmp_path):
    path = tmp_path / "store"
    store = SharedFileStore(path)
    rest = struct.pack("<III", 1, 0xFFFF_FFF0, 0)
    with path.open("ab") as file:
        file.write(crc32(rest).to_bytes(4, "little") + rest)
        file.truncate(file.tell() + (1 << 31))
    assert not store.check(["a"])  # a record without an end
    store.set("a", "1")
    assert SharedFileStore(path).num_keys() == 1


def test_arguments_are_checked(tmp_path):
    for path in ("s3://bucket/store", "", 5, None):
        with pytest.raises(PolicyError):
            SharedFileStore(path)
    for path in (tmp_path, tmp_path / "none" / "store", "/dev/full"):
        with pytest.raises((StorageError, CorruptError)):
            SharedFileStore(path)
    store = SharedFileStore(tmp_path / "store")
    store.set("text", "seven")
    with pytest.raises(PolicyError, match=r"add\('text'\): b'seven'; expected a number"):
        store.add("text", 1)
    wrong = [lambda: store.set("text", None), lambda: store.set("text", 5), lambda: store.set(5, "a")]
    wrong += [lambda: store.add("n", 1.5), lambda: store.add("n", 1 << 63), lambda: store.check("text")]
    wrong += [lambda: store.check([3]), lambda: store.wait("text"), lambda: store.compare_set("text", "seven", None)]
    for call in wrong:
        with pytest.raises(PolicyError):
            call()
    assert store.get(b"text") == b"seven" and store.num_keys() == 1
    with pytest.raises(dist.DistStoreError):
        store.wait((key for key in ["missing"]), 0.05)


def test_a_file_that_takes_the_place_of_another_is_an_error_and_another_directory_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SharedFileStore("store")
    store.set("a", "1")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert store.get("a") == b"1"
    (tmp_path / "store").rename(tmp_path / "kept")
    SharedFileStore(tmp_path / "store").set("b", "2")
    with pytest.raises(StorageError, match="another file than before"):
        store.check(["b"])


FORKED = """
    import fcntl, os, signal, sys, threading, time
    from datetime import timedelta
    from shrinkpoint.comm import SharedFileStore
    from shrinkpoint.errors import StorageError

    store = SharedFileStore(sys.argv[1])
    other = os.open(sys.argv[1], os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    waiting = threading.Thread(target=lambda: store.add("sum", 1))
    waiting.start()  # until another process is done, while this one forks
    while store._fd is None:
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        os.close(other)
        store.set_timeout(timedelta(seconds=60))
        store.add("sum", 1)
        time.sleep(3600)
    fcntl.flock(other, fcntl.LOCK_UN)
    waiting.join()
    store.set_timeout(timedelta(seconds=60))
    while store.get("sum") != b"2":
        time.sleep(0.01)
    print("parent and child", flush=True)
    os.kill(pid, signal.SIGKILL)

    def handle(*_):
        try:
            store.set("x", "y")
        except StorageError as error:
            print(error, flush=True)
            os._exit(0)

    signal.signal(signal.SIGALRM, handle)
    fcntl.flock(other, fcntl.LOCK_EX)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    store.check(["a"])
"""


def test_forks_and_signals_in_the_middle_of_a_call_hang_nobody(tmp_path):
    first, second = run_forked(FORKED, str(tmp_path / "store")).splitlines()
    assert first == "parent and child"
    assert "in the middle of another one of this thread, as of a signal handler. Let the handler set a flag" in second


EXIT = """
import fcntl, os, sys, time
from shrinkpoint.comm import Membership, SharedFileStore

membership = Membership(SharedFileStore(sys.argv[1]), 2, patience=0.05)
fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)
time.sleep(0.2)  # its signs of life wait for the lock
"""


def test_a_process_may_end_while_its_signs_of_life_wait_for_the_lock(tmp_path):
    ran = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "store")], capture_output=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr


GROUP = """
    import json
    import torch
    import torch.distributed as dist
    from pathlib import Path
    from shrinkpoint.comm import SharedFileStore

    def of_rank(rank, width, folder):
        dist.init_process_group("gloo", store=SharedFileStore(f"{folder}/store"), rank=rank, world_size=width)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        pair = dist.new_group([0, 1])
        gathered = [None] * width
        dist.all_gather_object(gathered, f"rank {rank}")
        dist.barrier()
        Path(f"{folder}/{rank}.json").write_text(json.dumps([total.item(), gathered]))
"""


def test_torch_forms_groups_with_it(tmp_path):
    assert ranks(GROUP, 2, tmp_path) == [[3.0, ["rank 0", "rank 1"]]] * 2
