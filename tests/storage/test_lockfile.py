"""Locks and temporaries between real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest

from shrinkpoint.errors import LockedError
from shrinkpoint.storage import LocalStorage

HOLD = """
    import sys, time
    from shrinkpoint.storage import LocalStorage
    with LocalStorage(sys.argv[1]).lock():
        print("held", flush=True)
        sys.stdin.read()
"""
HOLD_AND_FORK = """
    import os, sys, time
    from shrinkpoint.storage import LocalStorage
    with LocalStorage(sys.argv[1]).lock():
        if os.fork() == 0:  # the worker speaks: it has run what runs after a fork
            print(os.getpid(), flush=True)
        time.sleep(600)
"""
FORK_AND_LOCK = """
    import os, sys
    from shrinkpoint.storage import LocalStorage
    inherited, own = (LocalStorage(f"{sys.argv[1]}/{name}").lock() for name in "ab")
    with inherited:
        if os.fork() == 0:
            with own:  # its file has the number of the inherited one, which was closed after the fork
                inherited.__exit__(None, None, None)
                print("held", flush=True)
                sys.stdin.read()
            os._exit(0)
        os.wait()
"""
WRITE = """
    import sys
    from shrinkpoint.storage import LocalStorage
    with LocalStorage(sys.argv[1]).create("step/a") as sink:
        sink.write(b"half")
        print("written", flush=True)
        sys.stdin.read()
"""


@contextmanager
def child(code, path):
    """A Python process that has printed its first line, which is `.said`; killed in the end."""
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        process.said = process.stdout.readline().strip()
        try:
            yield process
        finally:
            process.kill()


def test_second_process_is_refused_and_told_who_holds_the_lock(tmp_path):
    with child(HOLD, tmp_path) as holder:
        assert holder.said == "held"
        with pytest.raises(LockedError, match=f"process {holder.pid} on host"), LocalStorage(tmp_path).lock():
            pass
        holder.communicate("")
        with LocalStorage(tmp_path).lock():
            pass


def test_lock_dies_with_its_process(tmp_path):
    with child(HOLD, tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with LocalStorage(tmp_path).lock():
            pass


def test_lock_dies_with_its_process_though_a_forked_worker_lives_on(tmp_path):
    with child(HOLD_AND_FORK, tmp_path) as holder:
        worker = int(holder.said)
        try:
            with pytest.raises(LockedError), LocalStorage(tmp_path).lock():
                pass
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            os.kill(worker, 0)
            with LocalStorage(tmp_path).lock():
                pass
        finally:
            os.kill(worker, signal.SIGKILL)


def test_forked_worker_keeps_its_own_lock_when_the_one_it_inherited_ends(tmp_path):
    with child(FORK_AND_LOCK, tmp_path) as parent:
        assert parent.said == "held"
        for name in ("a", "b"):
            with pytest.raises(LockedError, match=r"process \d+ on host"), LocalStorage(tmp_path / name).lock():
                pass


def test_holder_that_left_no_note_is_another_process(tmp_path):
    with child(HOLD, tmp_path):
        for note in ("", "{", "[]", '{"pid": "x"}'):
            (tmp_path / ".shrinkpoint-lock").write_text(note)
            with pytest.raises(LockedError, match="another process"), LocalStorage(tmp_path).lock():
                pass


def test_temporary_of_a_living_writer_stays_and_of_a_killed_one_goes(tmp_path):
    storage = LocalStorage(tmp_path)
    with child(WRITE, tmp_path) as writer:
        assert (storage.list(), storage.remove_stale()) == ([], [])
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert storage.list() == []
        assert [name.split("/")[0] for name in storage.remove_stale()] == ["step"]
    assert list(tmp_path.iterdir()) == []
