"""What this process has verified of the files that its next delta would stand on.

A delta is worth nothing where a byte below it has changed. What was written or loaded here is known by its digest.
Later on, a file that looks touched is read again as a whole, and of all others a share at every save. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shrinkpoint._native import Hasher
from shrinkpoint.container import Reader
from shrinkpoint.errors import ChainError, CorruptError, ShrinkpointError
from shrinkpoint.storage import LocalStorage, Source, Storage

ROUND = 8
"""Saves within which every byte that a delta stands on has been read again and compared with its digest."""
MIN_BYTES = 8 << 20
"""Read again at every save, where there is as much."""
GONE = "gone"
_WINDOW = 8 << 20
_DO = "the next checkpoint stands alone; `shrinkpoint verify --deep` says which others are hit"
_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class Link:
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
    def is_kept(self) -> bool:
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
        return GONE


class Verification:
    """Says before a save whether the chain below it is still as it was written, or as it was when it was loaded.

    Memory: one row for each part of the file that is being read again.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, object] = {}
        self._queue: list[str] = []  # digests of the files that this round has not come to
        self._file: _File | None = None  # the one that it has begun

    def learn(self, stamps: Mapping[str, object]) -> None:
        """This process has written these files just now, or read all of them.

        Args:
            stamps: by digest; as they were before reading.
        """
        self._stamps.update(stamps)

    def doubt(self, links: Sequence[Link]) -> ShrinkpointError | None:
        """Why nothing more should stand on these files; None: all is well, as far as is known by now.

        Reads what is not known or looks touched, and beside that an eighth of all. What is wrong is logged.

        Args:
            links: the chain, keyframe first.
        """
        links = [link for link in links if link.is_kept]
        stamps = {link.digest: self._stamps[link.digest] for link in links if link.digest in self._stamps}
        self._stamps = stamps
        try:
            for link in links:
                stamp = link.stamp()
                if link.digest not in stamps or stamps[link.digest] != stamp:
                    _File(link).read(link, link.size)
                    stamps[link.digest] = stamp  # as it was before reading
            self._go_on({link.digest: link for link in links})
        except ShrinkpointError as error:
            self._file, self._queue = None, []
            stamps.clear()
            _log.warning("nothing more is made to stand on this, the next checkpoint is a keyframe: %s", error)
            return error
        return None

    def _go_on(self, links: dict[str, Link]) -> None:
        """Read the next share of the chain."""
        total = sum(link.size for link in links.values())
        left = budget = min(total, max(-(-total // ROUND), MIN_BYTES))
        begun = 0
        while left > 0:
            if self._file is None:
                if not self._queue and begun == 2:  # the end of one round and the beginning of the next
                    return
                if not self._queue:
                    self._queue, begun = [*links], begun + 1
                link = links.get(self._queue.pop(0))
                if link is None:  # of a chain before
                    continue
                self._file = _File(link)
                left -= self._file.begin
            file = self._file
            if file.digest not in links:
                self._file = None
                continue
            left -= file.read(links[file.digest], max(left, 1))
            if file.is_done:
                self._file = None
        assert left <= budget


class _File:
    """One file on its way through being read.

    Raises:
        ChainError: it is another file.
        FormatError: bytes are at fault.
        StorageError, NotFoundError: it cannot be read.
    """

    def __init__(self, link: Link) -> None:
        self.digest = link.digest
        with link.storage.open(link.key) as source:
            _forget_pages(source)
            reader, size = Reader(source, link.where), source.size
        if reader.digest != link.digest or size != link.size:
            found = f"{size} bytes with header digest {reader.digest}"
            raise ChainError(link.where, found=found, expected=f"{link.size} bytes with {link.digest}", do=_DO)
        entries = [entry for record in reader.records for entry in record.parts.values()]
        self._parts = [(entry.offset, entry.size, entry.pad, entry.digest) for entry in entries]
        self.begin = min((offset - pad for offset, _, pad, _ in self._parts), default=link.size)
        """Bytes of the header, which has been read."""
        self._at = self._done = 0  # the part, and how much of it has been read
        self._hasher = Hasher()

    @property
    def is_done(self) -> bool:
        """Whether all of it has been compared."""
        return self._at == len(self._parts)

    def read(self, link: Link, most: int) -> int:
        """Read on from where it was left, `most` bytes or a little more; how many that were."""
        read = 0
        with link.storage.open(link.key) as source:
            _forget_pages(source)
            while read < most and not self.is_done:
                read += self._step(source, link.where)
        return read

    def _step(self, source: Source, where: str) -> int:
        offset, size, pad, digest = self._parts[self._at]
        length = min(_WINDOW, size - self._done)
        if self._done == 0 and pad and any(source.read(offset - pad, pad)):
            raise CorruptError(where, found=f"a filler that is not zero, at byte {offset - pad}", do=_DO)
        self._hasher.update(source.read(offset + self._done, length))
        self._done += length
        if self._done == size:
            found = self._hasher.hexdigest()
            if found != digest:
                found = f"bytes {offset} to {offset + size} with digest {found}"
                raise CorruptError(where, found=found, expected=digest, do=_DO)
            self._at, self._done, self._hasher = self._at + 1, 0, Hasher()
        return length + pad


def _forget_pages(source: Source) -> None:
    """What the disk has is asked for, not what memory remembers of it."""
    forget: Callable[[], None] | None = getattr(source, "forget_pages", None)
    if forget is not None:
        forget()
