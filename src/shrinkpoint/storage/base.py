"""What a place for bytes must be able to do.

A key is a relative path of non-empty parts joined by "/". An object exists under its key from one instant on, whole
and durable, or it does not exist: no reader ever sees half of one. Every method raises only errors of our tree.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, TypeAlias

from shrinkpoint.errors import NoSpaceError, PolicyError, StorageError

Buffer: TypeAlias = bytes | bytearray | memoryview
Keys: TypeAlias = list[str]

RESERVED = ".shrinkpoint-"
"""How the names begin that a storage keeps for itself (temporaries, its lock); no part of a key may."""


class Source(Protocol):
    """An object open for reading; usable in a `with` statement, and by several threads at once."""

    @property
    def size(self) -> int:
        """Bytes of the whole object, as they were when it was opened."""

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Exactly `length` bytes from `offset`.

        Raises:
            TruncatedError: the object ends before.
            StorageError: reading failed.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sink(Protocol):
    """An object being written; a file in all but name, and nobody's to read before it is committed."""

    def write(self, data: Buffer) -> None: ...

    def seek(self, offset: int) -> None: ...

    def tell(self) -> int: ...

    def read(self, length: int) -> bytes:
        """Up to `length` of the bytes already written, from the current offset."""


class Storage(Protocol):
    """A place with objects. Several threads may call it at once; only the holder of its lock should write."""

    def put(self, key: str, data: Buffer) -> None:
        """Make a small object, or replace it, atomically and durably.

        Raises:
            StorageError: writing failed (`NoSpaceError`: the place is full); what was there before is still there.
        """

    def create(self, key: str) -> AbstractContextManager[Sink]:
        """Write an object piece by piece; leaving the block commits it atomically and durably, an exception drops it.

        Raises:
            StorageError: writing or committing failed.
        """

    def open(self, key: str) -> Source:
        """Open an object for reading.

        Raises:
            NotFoundError: there is none of this key.
        """

    def get(self, key: str) -> bytes:
        """The whole of a small object.

        Raises:
            NotFoundError: there is none of this key.
        """

    def list(self, prefix: str = "") -> Keys:
        """Keys of all committed objects that begin with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none."""

    def link(self, source: str, target: str) -> bool:
        """Give the bytes of `source` a second key without copying them; each then outlives the other's deletion.

        Returns:
            False where this place cannot do it; nothing has happened then.

        Raises:
            NotFoundError: there is no `source`.
        """

    def lock(self) -> AbstractContextManager[None]:
        """Keep every other writer out; released at the end of the block, or by the death of this process.

        Raises:
            LockedError: another holds it, at once and naming it when it is known.
        """

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> Keys:
        """Remove what interrupted writers left behind, and nothing else; returns the names removed, sorted.

        Args:
            is_own_dir: says of an empty directory, by its name, whether it is the caller's and can go. (A process may
                die
                between emptying a directory and removing it.)
        """

    def describe(self, key: str = "") -> str:
        """How a message names an object, or the whole place: a path or a URL."""


def check_key(key: str) -> str:
    """Return `key` when it is one.

    Raises:
        PolicyError: it is empty or absolute, or a part of it is empty, ".", ".." or begins with `RESERVED`.
    """
    parts = key.split("/")
    if "\0" in key or any(part in ("", ".", "..") or part.startswith(RESERVED) for part in parts):
        raise PolicyError(
            "storage",
            found=f"the key {key!r}",
            expected=f'a relative path without empty, "." or ".." parts, and no part that begins with "{RESERVED}"',
            do="choose another name",
        )
    return key


def storage_error(where: str, operation: str, error: OSError) -> StorageError:
    """What to raise (`from error`) when the operating system refused; keeps its `errno`."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raised: StorageError = NoSpaceError(
            where,
            found=f"no space left while {operation} ({reason})",
            do="free some space and save again; earlier checkpoints are untouched",
        )
    else:
        raised = StorageError(
            where, found=f"{operation} failed ({reason})", do="look at the disk and at the permissions"
        )
    raised.errno = error.errno
    return raised
