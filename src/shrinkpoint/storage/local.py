"""A storage in a directory.

An object is written under a temporary name beside its own, flushed to the disk, renamed, and its directory flushed: it
exists from the rename on, and survives a power cut from the last flush on.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

from shrinkpoint._native import Hasher, empty, xxh3_128
from shrinkpoint.errors import LockedError, NotFoundError, PolicyError, ShrinkpointError, StorageError
from shrinkpoint.storage.base import RESERVED, Buffer, Keys, Sink, Source, check_key, check_range, storage_error
from shrinkpoint.storage.paths import is_regular, keep_mode, local_path, open_regular, through_link, what_is_at

E = TypeVar("E", bound=ShrinkpointError)
LOCK = RESERVED + "lock"
_TEMPORARY = re.compile(re.escape(RESERVED) + "tmp-[0-9a-f]{16}")
_MIN_POOLED_BYTES = 1 << 16  # from which the native pool has memory to reuse
_WRITEBACK_BYTES = 1 << 23  # that the disk begins to write at once
_HASHED_BYTES = 1 << 19  # that are read and hashed at a time
_MAX_READ_BYTES = 1 << 30  # of one read call; systems move less than 2 GiB at once
_LINK_ERRNOS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def os_errors(where: str, operation: str) -> Iterator[None]:
    """Raise the errors of the system in a block as those of this library, see `storage_error`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ShrinkpointError):
            raise
        raise storage_error(where, operation, error) from error


def _not_found(where: str, found: str = "no such file") -> NotFoundError:
    return NotFoundError(where, found=found, do="check the path")


class LocalSource(Source):
    """A file open for reading."""

    def __init__(self, path: Path, where: str) -> None:
        self._where = where
        with os_errors(where, "opening"):
            try:
                self._file = FileIO(path, opener=open_regular)
            except FileNotFoundError:  # deleted since it was looked for
                raise _not_found(where) from None
            self._size = os.fstat(self._file.fileno()).st_size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        check_range(self._where, self._size, offset, length)  # before memory is allocated for a damaged length
        if length < _MIN_POOLED_BYTES:
            with os_errors(self._where, "reading"):
                part = os.pread(self._file.fileno(), length, offset)
            if len(part) == length:
                return part
        data = empty(length).data  # new memory would take a page fault for every 4 KiB
        for _ in self._fill(data, offset, _MAX_READ_BYTES):
            pass
        return data.toreadonly()

    def read_hashed(self, offset: int, length: int) -> tuple[bytes | memoryview, str]:
        """Read bytes with their digest, which is taken piece by piece while these are in the processor's cache."""
        if length < 2 * _HASHED_BYTES or offset + length > self._size:
            data = self.read(offset, length)
            return data, xxh3_128(data)
        data, hasher = empty(length).data, Hasher()
        for piece in self._fill(data, offset, _HASHED_BYTES):
            hasher.update(piece)
        return data.toreadonly(), hasher.hexdigest()

    def _fill(self, data: memoryview, offset: int, most: int) -> Iterator[memoryview]:
        """Read into `data` from `offset` on, at most so many bytes at a time; yields what has been read."""
        done, length = 0, data.nbytes
        while done < length:
            with os_errors(self._where, "reading"):
                count = os.preadv(self._file.fileno(), [data[done : done + most]], offset + done)
            if count == 0:  # the file was truncated after it was opened
                check_range(self._where, offset + done, offset, length)
            yield data[done : done + count]
            done += count

    def forget_pages(self) -> None:
        """Ask the kernel to drop cached pages, which hide a bad sector: the next read goes to the disk."""
        with suppress(OSError, AttributeError):  # not every system has it
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()


class LocalSink(Sink):
    """A temporary file that may become an object. Unbuffered, so that a forked child has nothing to flush.

    The disk begins to write while more is being coded: `sync` then has little left to wait for.
    """

    def __init__(self, path: Path, where: str) -> None:
        self._where = where
        self._flushed = 0  # the offset up to which the disk has begun to write
        with os_errors(where, "creating a temporary file"):
            self._file = FileIO(path, "x+")
        with suppress(OSError):  # for `is_being_written`; some file systems have no locks
            try_lock(self._file.fileno())

    def write(self, data: Buffer) -> None:
        rest = memoryview(data)
        rest = rest.cast("B") if rest.nbytes else memoryview(b"")  # an empty shape cannot be cast
        is_large = rest.nbytes >= _MIN_POOLED_BYTES
        while rest:
            with os_errors(self._where, "writing"):
                rest = rest[self._file.write(rest) :]
        if is_large:
            # Make the kernel begin to write what has been written here, once that is much
            with suppress(OSError, AttributeError):  # not every system has it; `sync` reports any error
                length = self._file.tell() - self._flushed
                if length >= _WRITEBACK_BYTES:
                    # Dirty pages are not dropped by this: Linux only begins to write them.
                    os.posix_fadvise(self._file.fileno(), self._flushed, length, os.POSIX_FADV_DONTNEED)
                    self._flushed += length

    def seek(self, offset: int) -> None:
        with os_errors(self._where, "seeking"):
            self._flushed = self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, length: int) -> bytes:
        with os_errors(self._where, "reading back"):
            return self._file.read(length)

    def sync(self) -> None:
        """Return when every byte is on the disk."""
        with os_errors(self._where, "flushing to the disk"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # `sync` has reported any error
            self._file.close()


class LocalStorage:
    """The files below a directory, which need not exist yet.

    Other files in it are listed and otherwise left alone.

    Attributes:
        path: of the directory, absolute: the process may change its directory later. Messages say it as it was given.

    Raises:
        PolicyError: a URL, or not a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given_path = local_path(path)
        self.path = self._root = self._given_path.absolute()
        self._root_text = str(self._root)
        self._lock_fd = -1

    def put(self, key: str, data: Buffer) -> None:
        with self.create(key) as sink:
            sink.write(data)

    @contextmanager
    def create(self, key: str) -> Iterator[LocalSink]:
        path, where = self._path_to_write(key), self.describe(key)
        _check_free(path, where)
        with self._temporary_path(path.parent, where) as temporary:
            sink = LocalSink(temporary, where)
            try:
                yield sink
                sink.sync()
                with os_errors(where, "renaming into place"):
                    keep_mode(path, temporary)
                    temporary.replace(path)
                    _fsync_dir(path.parent)
            finally:
                sink.close()

    def open(self, key: str) -> LocalSource:
        return LocalSource(self._existing_path(key), self.describe(key))

    def get(self, key: str) -> bytes:
        with self.open(key) as source:
            return bytes(source.read(0, source.size))

    def list(self, prefix: str = "") -> Keys:
        directory = prefix.rpartition("/")[0]  # no key outside it can match
        if directory:
            check_key(directory)
        walk = self._walk(directory)
        keys = (head + name for _, head, names in walk for name in names if not name.startswith(RESERVED))
        return sorted(key for key in keys if key.startswith(prefix))

    def list_dirs(self) -> Keys:
        """The names of the directories at the top, sorted; links to directories are left out, as `list` does."""
        with os_errors(self.describe(), "listing"), suppress(FileNotFoundError), os.scandir(self._root) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return []

    def stamp(self, key: str) -> tuple[int, ...] | None:
        """Inode, times of the last change of content and of the inode, and size of a file or directory; None if there
        is none.

        Of a directory it changes when something in it is created, replaced or removed, unless that happens within one
        tick of the file system's clock.
        """
        try:
            status = os.lstat(f"{self._root_text}/{key}")
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size

    def delete(self, key: str) -> None:
        path = self._path_to_write(key, replaces_link=True)
        with os_errors(self.describe(key), "deleting"):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # no object, then
                return
            # A power cut must not bring the file back once its base is deleted.
            _fsync_dir(self._remove_empty_dirs(path.parent))

    def link(self, source: str, target: str) -> bool:
        return self.link_file(self._existing_path(source), target)

    def link_file(self, old: Path, target: str) -> bool:
        """Hard-link a file, also one outside of this directory, as `target`; a symbolic link is resolved.

        The link survives a power cut once `flush_dir` of its directory has returned.

        Returns:
            False if the file system has no hard links between these places.
        """
        new, where = self._path_to_write(target), self.describe(target)
        source = old.resolve()  # a link to a symbolic link would not keep the file
        with suppress(OSError):  # the common case: there is nothing of this name
            _make_dirs(new.parent)
            os.link(source, new)
            return True
        _check_free(new, where)
        with self._temporary_path(new.parent, where) as temporary, os_errors(where, "linking"):
            try:
                os.link(source, temporary)
            except OSError as error:
                if error.errno in _LINK_ERRNOS:
                    return False
                if isinstance(error, FileNotFoundError) and temporary.parent.is_dir():  # `old` was deleted meanwhile
                    raise _not_found(str(old)) from None
                raise
            temporary.replace(new)
        return True

    def flush_dir(self, key: str) -> None:
        """Make the names in a directory, which exists, survive a power cut."""
        with os_errors(self.describe(key), "flushing to the disk"):
            _fsync_dir(self._root / check_key(key))

    def flush_tree(self) -> None:
        """Make all that others have written below the directory, and the directory's own name, survive a power cut.

        The names of its parents up to the mount point are flushed as well: a framework may have made them.
        """
        with os_errors(self.describe(), "flushing to the disk"):
            for directory, _, names in self._walk():
                for name in names:
                    if is_regular(directory / name):
                        with suppress(FileNotFoundError):  # deleted meanwhile
                            _fsync(directory / name)
                _fsync_dir(directory)
        for parent in self._root.parents:
            with suppress(OSError):  # another user's
                _fsync_dir(parent)
            if parent.is_mount():
                break

    @contextmanager
    def lock(self) -> Iterator[None]:
        with os_errors(self.describe(), "creating the directory"):
            _make_dirs(self._root)
        with hold_lock(self._root / LOCK, self.describe()) as self._lock_fd:
            yield

    def holds_lock(self) -> bool:
        """True if the lock that was taken last is held; not if somebody has deleted its file since."""
        try:
            return os.path.samestat(os.fstat(self._lock_fd), (self._root / LOCK).stat())
        except OSError:
            return False

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> Keys:
        swept = []
        for directory, head, names in self._walk():
            for path in (directory / name for name in names if _TEMPORARY.fullmatch(name)):
                if is_regular(path) and not is_being_written(path):
                    with os_errors(str(path), "sweeping"):
                        path.unlink(missing_ok=True)
                        self._remove_empty_dirs(directory)
                    swept.append(head + path.name)
            if is_own_dir(head[:-1]):
                with suppress(OSError):  # not empty
                    directory.rmdir()
                    swept.append(head[:-1])
        return sorted(swept)

    def describe(self, key: str = "") -> str:
        return str(self._given_path / key)

    def _path_to_write(self, key: str, *, replaces_link: bool = False) -> Path:
        """The path of a key, after a check that nothing is written through a symbolic link below the root.

        No link to a directory is listed, and what it leads to may be another run's.

        Args:
            replaces_link: the name itself may be a link, which is removed; so may one at the top, which is replaced.

        Raises:
            StorageError: a part of the path is a link.
        """
        path, parts = self._root / check_key(key), key.split("/")
        checked = parts[:-1] if replaces_link or len(parts) == 1 else parts
        link = self._root
        for part in checked:
            link /= part
            if link.is_symlink():
                raise link_error(str(self._given_path / link.relative_to(self._root)))
        return path

    def linked_dirs(self) -> Keys:
        """The names at the top that are links to directories or to nothing, sorted: `list_dirs` leaves them out."""
        with suppress(OSError), os.scandir(self._root) as entries:
            return sorted(entry.name for entry in entries if entry.is_symlink() and not entry.is_file())
        return []

    def _existing_path(self, key: str) -> Path:
        path = self._root / check_key(key)
        with os_errors(self.describe(key), "opening"):
            if path.is_file():  # not a directory, and not a pipe, where reading would wait
                return path
        raise _not_found(self.describe(key), what_is_at(path))

    @contextmanager
    def _temporary_path(self, directory: Path, where: str) -> Iterator[Path]:
        """Yields a free name in `directory`, which is created; a file of this name is removed at the end."""
        with os_errors(where, "creating the directory"):
            _make_dirs(directory)
        path = directory / f"{RESERVED}tmp-{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            with suppress(OSError):  # the error of the block is the one to raise; `remove_stale` removes the file later
                path.unlink(missing_ok=True)
                self._remove_empty_dirs(directory)

    def _walk(self, directory: str = "") -> Iterator[tuple[Path, str, Keys]]:
        """The directories below one, inner ones first: the path, how keys in it begin, and the names of its files."""
        root = self._root
        for part in directory.split("/") if directory else ():
            root = root / part
            if root.is_symlink():  # as everywhere below the root
                return

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):  # it may be deleted meanwhile
                raise storage_error(str(error.filename or root), "listing", error) from error

        for parent, _, names in os.walk(root, topdown=False, onerror=refuse):
            head = parent[len(self._root_text) :].lstrip("/")
            yield Path(parent), f"{head}/" if head else "", names

    def _remove_empty_dirs(self, directory: Path) -> Path:
        """Remove `directory` and its parents as far as they are empty; returns the first that is not, or the root."""
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError:  # not empty, or not ours to remove
                break
            directory = directory.parent
        return directory


@contextmanager
def atomic_replace(target: Path) -> Iterator[Path]:
    """Yields a free name beside `target`; the file or directory written there replaces `target` if the block ends well.

    It is flushed to the disk first; if anything fails, `target` is what it was. Links are followed, directories made.

    Raises:
        StorageError: the system refused something, in the block too; it names `target`.
    """
    target = target if target.is_dir() else through_link(target)
    temporary, old = (target.with_name(f".{target.name}.{secrets.token_hex(4)}.{suffix}") for suffix in ("tmp", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):  # a file has nothing below it
            _fsync(path)
        keep_mode(target, temporary)
        if target.is_dir() and temporary.is_dir():
            target.rename(old)
        temporary.replace(target)
        _fsync_dir(target.parent)
    except OSError as error:
        if isinstance(error, StorageError) and error.where == str(temporary):
            renamed = type(error)(str(target), found=error.found, expected=error.expected, do=error.do)
            renamed.errno = error.errno
            raise renamed from error
        if isinstance(error, ShrinkpointError):
            raise
        raise storage_error(str(target), "writing", error) from error
    finally:
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True) if target.exists() else old.rename(target)
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            temporary.unlink()


def check_no_loss(out: Path, replacement: Path, stale: re.Pattern[str] | None = None) -> None:
    """Raises `PolicyError` where files would go that nothing replaces: a directory is easily named by mistake.

    Args:
        out: what `atomic_replace` is about to replace.
        replacement: by what.
        stale: names of files that may go, as of an earlier replacement in other parts; None: no files may go.
    """
    if not out.is_dir():
        return
    if not replacement.is_dir():
        do = f"name a file, such as {out / 'checkpoint'}"
        raise PolicyError(str(out), found="a directory", expected="the name of a file", do=do)
    if out.is_symlink():
        raise PolicyError(str(out), found="a symbolic link", expected="a new name", do="choose another name")
    for path in sorted(out.rglob("*")):
        is_stale = stale is not None and stale.fullmatch(path.relative_to(out).as_posix())
        if not path.is_dir() and not is_stale and not (replacement / path.relative_to(out)).is_file():
            expected, do = "nothing but earlier output", "choose another name, or remove it first"
            raise PolicyError(str(out), found=f"another file, {path.name}", expected=expected, do=do)


def _fsync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_error(where: str, error_class: type[E] = StorageError) -> E:  # type: ignore[assignment]
    """The error where a checkpoint's directory, or a file in it, is a symbolic link."""
    do = "replace the link with its target; a link to the directory of the whole run is followed"
    return error_class(where, found="a symbolic link", expected="a directory or a file of its own", do=do)


def _check_free(path: Path, where: str) -> None:
    """Raises StorageError if `path` is something other than a file, such as a device, which a rename would replace."""
    with os_errors(where, "writing"):
        is_taken = path.exists() and not path.is_file()
    if is_taken:
        found = f"{what_is_at(path)} under this name"
        do = "choose another name" if path.is_dir() else "delete it, or choose another name"
        raise StorageError(where, found=found, expected="a file, or nothing", do=do)


def _make_dirs(directory: Path) -> None:
    if not directory.is_dir():
        _make_dirs(directory.parent)
        with suppress(FileExistsError):  # created meanwhile; opening reports a file of this name
            directory.mkdir()
        _fsync_dir(directory.parent)


def _fsync_dir(directory: Path) -> None:
    try:
        _fsync(directory, os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not flush directories
            raise


def is_being_written(path: Path) -> bool:
    """True if the writer of a temporary file still has it open."""
    try:
        with FileIO(path, opener=open_regular) as file:
            return not try_lock(file.fileno())
    except OSError:  # gone, or no locks here: then the caller's lock on the store must be enough
        return False


_lock_fds: dict[object, int] = {}
"""The descriptor of each `hold_lock` that has one, by an object of its own: once a forked child has closed it, another
lock may get the same number."""


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
def hold_lock(path: Path, where: str) -> Iterator[int]:
    """Hold the lock file at `path`, and yield its descriptor; it stays there, empty, when it is released.

    Raises:
        LockedError: another process, or another part of this one, holds it.
        StorageError: the file cannot be opened or locked.
    """
    if os.path.lexists(path) and not is_regular(path):
        do = f"delete {path.name!r} if nothing needs it"
        raise StorageError(where, found=f"{what_is_at(path)} named {path.name!r}", expected="a lock file", do=do)
    hold, is_locked, pid = object(), False, os.getpid()
    try:  # an interrupt may come at any line, and a descriptor that is never closed keeps the lock
        with os_errors(where, "locking"):
            fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            _lock_fds[hold] = fd
            is_locked = try_lock(fd)
            if not is_locked:
                owner, own = _lock_owner(fd), _process_text(os.getpid(), socket.gethostname())
                found = f"{'this process' if owner == own else owner} is saving here already"
                do = "wait until it has finished, or stop it: a lock ends with its process"
                if owner == own:
                    do = "close() the manager or the store that saved here before"
                raise LockedError(where, found=found, expected="one writer at a time", do=do)
            with suppress(OSError):  # on a full disk the lock is needed to free space, the note is not
                os.ftruncate(fd, 0)
                os.write(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        yield fd
    finally:
        if hold in _lock_fds and os.getpid() == pid:  # a forked child leaves the lock to its parent
            if is_locked:  # else the note is another holder's
                with suppress(OSError):
                    os.ftruncate(_lock_fds[hold], 0)
            os.close(_lock_fds.pop(hold))


def _lock_owner(fd: int) -> str:
    try:
        note = json.loads(os.pread(fd, 1024, 0))
        return _process_text(note["pid"], note["host"])
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun to write the note
        return "another process"


def _process_text(pid: int, host: str) -> str:
    return f"process {pid:d} on host {host!r}"


def is_process_alive(pid: int) -> bool:
    """True if a process of this machine has this id; True where the system does not say."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or not a process of this system
        pass
    return True


def _close_after_fork() -> None:
    """In a forked child: drop the locks, or a data loader's worker that outlives its killed parent would keep them."""
    for fd in _lock_fds.values():
        os.close(fd)
    _lock_fds.clear()


os.register_at_fork(after_in_child=_close_after_fork)
