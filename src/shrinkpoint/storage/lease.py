"""One writer at a time in an object storage: a lock object that its holder renews, and that expires with its holder.

The lock object is created if there is none, and afterwards only replaced on condition that its ETag has not changed: of
two that try at the same time one fails. Its holder renews it, so that its time of modification is at most a third of
the lease ago; one that has not been renewed for a whole lease may be taken by another. Time is the service's own:
clocks of writers are not compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shrinkpoint.errors import LockedError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.storage.base import RESERVED
from shrinkpoint.storage.local import is_process_alive
from shrinkpoint.storage.object_requests import ObjectConflictError, send_request

if TYPE_CHECKING:
    from obstore import PutMode, UpdateVersion
    from obstore.store import ObjectStore

_LOCK_OBJECT, _CLOCK_OBJECT = RESERVED + "lease", RESERVED + "clock-"
_MARGIN = 2.0  # seconds; services say times of modification in whole ones
_MAX_ATTEMPTS = 5  # to take a lease that others take and free at the same time


@dataclass(frozen=True)
class LockNote:
    """Contents of the lock object about its holder."""

    token: str = ""  # random text of one holder; "" where it is free
    count: int = 0  # how often the holder has written it: no two versions of the object are equal
    seconds: float = 0.0  # how long the lease lasts after it was written
    # `host`, `pid`: of the holder, for people.
    host: str = ""
    pid: int = 0
    # Identifies the machine since its start, and the set of process ids: whoever has the same can see whether the
    # holder lives. "" where the system does not say.
    machine: str = ""
    version: Any = None  # the object's ETag and version, for conditional writes
    modified: datetime | None = None  # when the service took it

    @property
    def holder(self) -> str:
        return f"process {self.pid} on host {self.host!r}" if self.pid else "another process"

    @property
    def is_dead(self) -> bool:
        """True if the holder was a process of this machine that has ended."""
        if not self.pid or not self.machine or self.machine != _machine():
            return False
        return not is_process_alive(self.pid)

    def to_bytes(self) -> bytes:
        fields = ("token", "count", "seconds", "host", "pid", "machine")
        return json.dumps({name: getattr(self, name) for name in fields}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, meta: Any) -> LockNote:
        """The note in a lock object; of a damaged one nothing is known but its version."""
        note = partial(cls, version=version_condition(meta), modified=meta["last_modified"])
        try:
            fields = json.loads(data)
            token, host, machine = (str(fields[name])[:200] for name in ("token", "host", "machine"))
            count, pid, seconds = int(fields["count"]), int(fields["pid"]), float(fields["seconds"])
            return note(token=token, count=count, seconds=seconds, host=host, pid=pid, machine=machine)
        except (ValueError, KeyError, TypeError, OverflowError):
            return note(token="unknown")


class Lease:
    """The writer's lock of an object storage, from `acquire` to `release`.

    Args:
        store: a client whose requests end well before the lease does.
        where: the storage, for messages.
        seconds: how long others wait for a holder that no longer renews it.
    """

    def __init__(self, store: ObjectStore, where: str, seconds: float) -> None:
        self._store, self._where, self._seconds = store, where, seconds
        self._token, self._pid = secrets.token_hex(8), os.getpid()
        self._count = 0
        self._version: Any = None
        self._deadline = 0.0  # of `_clock`: until then nobody else takes the lease
        self._mutex = threading.Lock()  # held while the lock object is written
        self._released = threading.Event()
        self._error: ShrinkpointError | None = None  # another has taken it

    @property
    def is_own(self) -> bool:
        """True if this process took it, and not one of which this is a fork."""
        return self._pid == os.getpid()

    def acquire(self) -> None:
        """Take the lease, and renew it from now on.

        Raises:
            LockedError: another writer holds it.
            StorageError: the service cannot be reached, or has no conditional writes.
        """
        for _ in range(_MAX_ATTEMPTS):
            note = self._read()
            if note is not None:
                self._check_takeable(note)
            if self._write(None if note is None else note.version):
                break
        else:
            raise self._locked_error(LockNote())
        try:
            self._check_conditions()
            threading.Thread(target=self._renew_always, name="shrinkpoint-lease", daemon=True).start()
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise unless nobody else may write now; asks the service only if this lease may have ended.

        Raises:
            LockedError: another writer has taken the lease.
            StorageError: the service cannot be reached.
        """
        if self._error is not None:
            raise self._error
        if _clock() > self._deadline - self._seconds / 2:
            self.renew()

    def renew(self) -> None:
        """Write the lock object again, on condition that nobody else has: then nobody else writes until it ends.

        Raises:
            LockedError: another writer has taken the lease.
            StorageError: the service cannot be reached.
        """
        with self._mutex:
            if self._error is None and not self._write(self._version):
                note = self._read()
                found = f"the lease was taken by {note.holder if note else 'another process'}, after this one stalled"
                do = "stop one of the writers, and save again; what is committed is untouched"
                self._error = LockedError(self._where, found=found, expected="one writer at a time", do=do)
            if self._error is not None:
                raise self._error

    def release(self) -> None:
        """Free the lock object; one that another has taken is left alone, and so is one of a forked parent."""
        if not self.is_own:
            return
        self._released.set()
        if sys.is_finalizing():
            return
        with self._mutex, suppress(ShrinkpointError):  # else it ends by itself
            if self._error is None:
                self._put(LockNote(count=self._count + 1), self._version)

    def _renew_always(self) -> None:
        while not self._released.wait(self._seconds / 3):
            with suppress(StorageError):  # try again; a commit will say so
                try:
                    self.renew()
                except LockedError:
                    return

    def _check_takeable(self, note: LockNote) -> None:
        """Raise a LockedError if a writer that may live holds the lease."""
        if not note.token or note.is_dead:
            return
        seconds = note.seconds or self._seconds
        remaining = seconds + _MARGIN - self._age(note)
        if remaining > 0:
            raise self._locked_error(note, remaining)

    def _age(self, note: LockNote) -> float:
        """Seconds since a note was written, by the service's clock: it says when a new object was."""
        import obstore

        path = _CLOCK_OBJECT + self._token

        def ask() -> datetime:
            obstore.put(self._store, path, b"", use_multipart=False)
            modified = obstore.head(self._store, path)["last_modified"]
            obstore.delete(self._store, path)
            return modified

        now = send_request(self._where, "asking for the time", ask)
        return 0.0 if note.modified is None else (now - note.modified).total_seconds()

    def _locked_error(self, note: LockNote, remaining: float = 0.0) -> LockedError:
        found = f"{note.holder} is saving here already"
        do = "wait until it has finished, or stop it"
        if remaining:
            do += f"; if it has died, its lease ends in {remaining:.0f} s"
        return LockedError(self._where, found=found, expected="one writer at a time", do=do)

    def _write(self, version: Any) -> bool:
        """Write that this process holds the lease, over that version of the lock object, or as a new one.

        Returns:
            False if there is another version; a lost answer counts as what it would have been.
        """
        began, count = _clock(), self._count + 1
        own = LockNote(self._token, count, self._seconds, socket.gethostname(), os.getpid(), _machine())
        try:
            version = self._put(own, version)
        except StorageError as error:
            note = self._read()
            if note is None or (note.token, note.count) != (own.token, own.count):
                if isinstance(error, ObjectConflictError):
                    return False
                raise
            version = note.version  # the answer was lost
        self._count, self._version, self._deadline = count, version, began + self._seconds
        return True

    def _put(self, note: LockNote, version: Any) -> Any:
        import obstore

        mode: PutMode = "create" if version is None else version

        def put() -> Any:
            return obstore.put(self._store, _LOCK_OBJECT, note.to_bytes(), mode=mode, use_multipart=False)

        return version_condition(send_request(self._where, "locking", put))

    def _read(self) -> LockNote | None:
        import obstore

        def get() -> LockNote:
            answer = obstore.get(self._store, _LOCK_OBJECT)
            return LockNote.from_bytes(bytes(answer.bytes()), answer.meta)

        try:
            return send_request(self._where, "reading the lock", get)
        except NotFoundError:
            return None

    def _check_conditions(self) -> None:
        """Raise a StorageError if the service ignores conditions of writes: it would let two writers in."""
        with suppress(ObjectConflictError):
            self._version = self._put(LockNote(self._token, self._count), None)
            found, do = "a service that ignores If-None-Match", "use one that has conditional writes, or a directory"
            raise StorageError(self._where, found=found, expected="conditional writes", do=do)


def version_condition(meta: Any) -> PutMode:
    """The condition that an object is still the one of which a service said this."""
    version: UpdateVersion = {}
    if meta["e_tag"] is not None:
        version["e_tag"] = meta["e_tag"]
    if meta["version"] is not None:
        version["version"] = meta["version"]
    return version


def _clock() -> float:
    """Seconds since some moment, those that this machine was suspended included where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _machine() -> str:
    """Identifies this machine since its start, and the process ids seen here; "" if the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
