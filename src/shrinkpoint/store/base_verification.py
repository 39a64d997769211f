"""Verifies the files that the next delta would depend on, from what this process has written, loaded or read again.

A delta is worth nothing where a byte below it has changed. What was written or loaded here is known by its digest.
Later on, a file that looks touched is read again as a whole, and of all others a share at every save. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shrinkpoint._native import Hasher
from shrinkpoint.container import FileReader
from shrinkpoint.errors import ChainError, CorruptError, ShrinkpointError
from shrinkpoint.storage import LocalStorage, Source, Storage

MAX_SAVES_PER_PASS = 8
"""Saves within which every byte that a delta stands on has been read again and compared with its digest."""
MIN_BYTES = 8 << 20
"""Read again at every save, where there is as much."""
MISSING = "gone"
_WINDOW = 8 << 20
_DO = "the next checkpoint stands alone; `shrinkpoint verify --deep` says which others are hit"
_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class StoredFile:
    """One file of a chain.

    Attributes:
        digest: of its header; vouches for every other byte.
        size: in bytes.
        storage, key: where it lies.
    """

    digest: str
    size: int
    storage: Storage
    key: str

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.storage.describe(self.key)

    @property
    def is_readable(self) -> bool:
        """Whether its bytes can be read again; a storage that only counts them has none that could go wrong."""
        return getattr(self.storage, "keeps_payloads", True)

    def stamp(self) -> object:
        """What changes when somebody writes to a file, or puts another one in its place; None where nothing tells.

        Not the time of the inode's own change: a hard link made or removed elsewhere changes that, too.
        """
        if not isinstance(self.storage, LocalStorage):
            return None
        with suppress(OSError):
            status = Path(self.storage.path.absolute() / self.key).stat()
            return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return MISSING


class BaseVerifier:
    """Says before a save whether the chain below it is still as it was written, or as it was when it was loaded.

    Memory: one row for each part of the file that is being read again.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, object] = {}
        self._queue: list[str] = []  # digests of the files that this round has not come to
        self._scan: _FileScan | None = None  # the one that it has begun

    def mark_verified(self, stamps: Mapping[str, object]) -> None:
        """This process has written these files just now, or read all of them.

        Args:
            stamps: by digest; as they were before reading.
        """
        self._stamps.update(stamps)

    def find_damage(self, files: Sequence[StoredFile]) -> ShrinkpointError | None:
        """Why nothing more should stand on these files; None: all is well, as far as is known by now.

        Reads what is not known or looks touched, and beside that an eighth of all. What is wrong is logged.

        Args:
            files: the chain, keyframe first.
        """
        files = [link for link in files if link.is_readable]
        stamps = {link.digest: self._stamps[link.digest] for link in files if link.digest in self._stamps}
        self._stamps = stamps
        try:
            for link in files:
                stamp = link.stamp()
                if link.digest not in stamps or stamps[link.digest] != stamp:
                    _FileScan(link).read(link, link.size)
                    stamps[link.digest] = stamp  # as it was before reading
            self._read_share({link.digest: link for link in files})
        except ShrinkpointError as error:
            self._scan, self._queue = None, []
            stamps.clear()
            _log.warning("nothing more is made to stand on this, the next checkpoint is a keyframe: %s", error)
            return error
        return None

    def _read_share(self, files: dict[str, StoredFile]) -> None:
        """Read the next share of the chain."""
        total = sum(link.size for link in files.values())
        left = budget = min(total, max(-(-total // MAX_SAVES_PER_PASS), MIN_BYTES))
        begun = 0
        while left > 0:
            if self._scan is None:
                if not self._queue and begun == 2:  # the end of one round and the beginning of the next
                    return
                if not self._queue:
                    self._queue, begun = [*files], begun + 1
                link = files.get(self._queue.pop(0))
                if link is None:  # of a chain before
                    continue
                self._scan = _FileScan(link)
                left -= self._scan.header_bytes
            file = self._scan
            if file.digest not in files:
                self._scan = None
                continue
            left -= file.read(files[file.digest], max(left, 1))
            if file.is_done:
                self._scan = None
        assert left <= budget


class _FileScan:
    """One file on its way through being read.

    Raises:
        ChainError: it is another file.
        FormatError: bytes are at fault.
        StorageError, NotFoundError: it cannot be read.
    """

    def __init__(self, file: StoredFile) -> None:
        self.digest = file.digest
        with file.storage.open(file.key) as source:
            _drop_page_cache(source)
            reader, size = FileReader(source, file.where), source.size
        if reader.digest != file.digest or size != file.size:
            found = f"{size} bytes with header digest {reader.digest}"
            raise ChainError(file.where, found=found, expected=f"{file.size} bytes with {file.digest}", do=_DO)
        entries = [entry for record in reader.records for entry in record.parts.values()]
        self._parts = [(entry.offset, entry.size, entry.pad, entry.digest) for entry in entries]
        self.header_bytes = min((offset - pad for offset, _, pad, _ in self._parts), default=file.size)
        """Bytes of the header, which has been read."""
        self._part_index = self._part_offset = 0  # the part, and how much of it has been read
        self._hasher = Hasher()

    @property
    def is_done(self) -> bool:
        """Whether all of it has been compared."""
        return self._part_index == len(self._parts)

    def read(self, file: StoredFile, max_bytes: int) -> int:
        """Read on from where it was left, `max_bytes` bytes or a little more; how many that were."""
        read = 0
        with file.storage.open(file.key) as source:
            _drop_page_cache(source)
            while read < max_bytes and not self.is_done:
                read += self._read_window(source, file.where)
        return read

    def _read_window(self, source: Source, where: str) -> int:
        offset, size, pad, digest = self._parts[self._part_index]
        length = min(_WINDOW, size - self._part_offset)
        if self._part_offset == 0 and pad and any(source.read(offset - pad, pad)):
            raise CorruptError(where, found=f"a filler that is not zero, at byte {offset - pad}", do=_DO)
        self._hasher.update(source.read(offset + self._part_offset, length))
        self._part_offset += length
        if self._part_offset == size:
            found = self._hasher.hexdigest()
            if found != digest:
                found = f"bytes {offset} to {offset + size} with digest {found}"
                raise CorruptError(where, found=found, expected=digest, do=_DO)
            self._part_index, self._part_offset, self._hasher = self._part_index + 1, 0, Hasher()
        return length + pad


def _drop_page_cache(source: Source) -> None:
    """What the disk has is asked for, not what memory remembers of it."""
    forget: Callable[[], None] | None = getattr(source, "forget_pages", None)
    if forget is not None:
        forget()
