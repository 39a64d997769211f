"""Verifies, before each save, the files that the next delta would depend on.

A delta cannot be decoded once a byte of one of its bases has changed. Files that this process wrote or loaded are known
to be right. A file whose size, time or inode has changed since is read again completely, and of all others a share is
read again at every save. No torch."""

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
"""Number of saves within which every byte of a chain has been read again and compared with its digest."""
MIN_BYTES = 8 << 20
"""Bytes that are read again at every save, if the chain has as many."""
MISSING = "gone"
_WINDOW = 8 << 20
_DO = "the next checkpoint is a keyframe; `shrinkpoint verify --deep` says which others are damaged"
_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class StoredFile:
    """One file of a chain under one key.

    Attributes:
        digest: of its header, which authenticates every other byte.
        size: in bytes.
        storage, key: where it is stored.
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
        """Whether its bytes can be read again; a storage that only counts bytes keeps none."""
        return getattr(self.storage, "keeps_payloads", True)

    def stamp(self) -> object:
        """A value that changes when the file is written to or replaced; None if the storage has none.

        Device, inode, size and time of modification. The time of the inode's change is left out: a hard link made or
        removed elsewhere changes it, too.
        """
        if not isinstance(self.storage, LocalStorage):
            return None
        with suppress(OSError):
            status = Path(self.storage.path.absolute() / self.key).stat()
            return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return MISSING


class BaseVerifier:
    """Finds damage in a chain before another delta is written against it.

    Memory: one row for each part of the file that is being read again.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, object] = {}
        self._queue: list[str] = []  # digests of the files still to be read in this pass
        self._scan: _FileScan | None = None  # the file that is being read

    def mark_verified(self, stamps: Mapping[str, object]) -> None:
        """Record files that this process has just written, or has read completely.

        Args:
            stamps: `StoredFile.stamp` by digest, taken before reading.
        """
        self._stamps.update(stamps)

    def find_damage(self, files: Sequence[StoredFile]) -> ShrinkpointError | None:
        """The first damage found in a chain; None if none is known so far.

        Reads files that are unknown or have changed, and an eighth of all bytes besides. Damage is logged.

        Args:
            files: the chain, keyframe first.
        """
        files = [file for file in files if file.is_readable]
        stamps = {file.digest: self._stamps[file.digest] for file in files if file.digest in self._stamps}
        self._stamps = stamps
        try:
            for file in files:
                stamp = file.stamp()
                if file.digest not in stamps or stamps[file.digest] != stamp:
                    _FileScan(file).read(file, file.size)
                    stamps[file.digest] = stamp  # taken before reading
            self._read_share({file.digest: file for file in files})
        except ShrinkpointError as error:
            self._scan, self._queue = None, []
            stamps.clear()
            _log.warning("no delta is written against this, the next checkpoint is a keyframe: %s", error)
            return error
        return None

    def _read_share(self, files: dict[str, StoredFile]) -> None:
        """Read the next share of the chain."""
        total = sum(file.size for file in files.values())
        budget = min(total, max(-(-total // MAX_SAVES_PER_PASS), MIN_BYTES))
        passes = 0
        while budget > 0:
            if self._scan is None:
                if not self._queue and passes == 2:  # the end of one pass and the beginning of the next
                    return
                if not self._queue:
                    self._queue, passes = [*files], passes + 1
                file = files.get(self._queue.pop(0))
                if file is None:  # of an earlier chain
                    continue
                self._scan = _FileScan(file)
                budget -= self._scan.header_bytes
            scan = self._scan
            if scan.digest not in files:
                self._scan = None
                continue
            budget -= scan.read(files[scan.digest], max(budget, 1))
            if scan.is_done:
                self._scan = None


class _FileScan:
    """Reads one file part by part and compares each with its digest.

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
            raise ChainError(
                file.where,
                found=f"{size} bytes with header digest {reader.digest}",
                expected=f"{file.size} bytes with {file.digest}",
                do=_DO,
            )
        entries = [entry for record in reader.records for entry in record.parts.values()]
        self._parts = [(entry.offset, entry.size, entry.pad, entry.digest) for entry in entries]
        self.header_bytes = min((offset - pad for offset, _, pad, _ in self._parts), default=file.size)
        """Bytes of the header, which is read when the scan begins."""
        self._part_index = self._part_offset = 0  # the current part, and the bytes of it read so far
        self._hasher = Hasher()

    @property
    def is_done(self) -> bool:
        """Whether all parts have been compared."""
        return self._part_index == len(self._parts)

    def read(self, file: StoredFile, max_bytes: int) -> int:
        """Read on by `max_bytes` bytes or a little more, and return how many were read."""
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
    """Make the next read go to the disk, where the storage can do that."""
    forget_pages: Callable[[], None] | None = getattr(source, "forget_pages", None)
    if forget_pages is not None:
        forget_pages()
