"""Locks on files that die with the process that holds them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shrinkpoint.errors import LockedError, StorageError
from shrinkpoint.storage.base import storage_error
from shrinkpoint.storage.paths import is_regular, open_regular, what_is_at

_locked_fds: set[int] = set()


def try_lock(fd: int) -> bool:
    """Lock an open file until it is closed; False when it is open and locked elsewhere.

    Raises:
        OSError: this file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path, where: str) -> Iterator[None]:
    """Hold the lock file at `path`; it stays there, empty, when it is released.

    Raises:
        LockedError: another process, or another part of this one, holds it.
        StorageError: the file cannot be opened or locked.
    """
    fd = -1
    try:  # an interrupt may come at any line, and a descriptor that is never closed keeps the lock
        fd = _acquire(path, where)
        yield
    finally:
        if fd in _locked_fds:  # not so in a forked child
            with suppress(OSError):
                os.ftruncate(fd, 0)
            _locked_fds.remove(fd)
            os.close(fd)


def _acquire(path: Path, where: str) -> int:
    if os.path.lexists(path) and not is_regular(path):
        do = f"remove {path.name!r} if no process needs it"
        raise StorageError(where, found=f"{what_is_at(path)} named {path.name!r}", expected="a lock file", do=do)
    fd = -1
    try:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        _locked_fds.add(fd)
        if not try_lock(fd):
            raise LockedError(
                where,
                found=f"{_lock_owner(fd)} is saving here already",
                expected="one writer at a time",
                do="wait until it has finished, or stop it: a lock dies with its process",
            )
        with suppress(OSError):  # on a full disk the lock is needed to free space, the note is not
            os.ftruncate(fd, 0)
            os.write(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        return fd
    except OSError as error:
        _close(fd)
        raise storage_error(where, "locking", error) from error
    except BaseException:
        _close(fd)
        raise


def _close(fd: int) -> None:
    if fd >= 0:
        _locked_fds.discard(fd)
        os.close(fd)


def _lock_owner(fd: int) -> str:
    try:
        note = json.loads(os.pread(fd, 1024, 0))
        return f"process {note['pid']:d} on host {note['host']!r}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun to write the note
        return "another process"


def _close_after_fork() -> None:
    """In a forked child: drop the locks, or a data loader's worker that outlives its killed parent would keep them."""
    for fd in _locked_fds:
        os.close(fd)
    _locked_fds.clear()


os.register_at_fork(after_in_child=_close_after_fork)
