"""Opening regular files and nothing else: the reader of a pipe, a socket or a device would wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link to nothing",
    stat.S_IFREG: "a file",
}


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """A descriptor of a regular file; serves as an `opener`. It never waits for whoever else has the file.

    Raises:
        OSError: there is no such file, or it is something else.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def is_regular(path: Path) -> bool:
    """Whether a regular file has this very name; a symbolic link to one is none."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def what_is_at(path: Path) -> str:
    """What a path names, for a message; of a symbolic link, what it leads to."""
    for status in (path.stat, path.lstat):
        try:
            return _KINDS.get(stat.S_IFMT(status().st_mode), "no regular file")
        except OSError:
            continue
    return "no such file"
