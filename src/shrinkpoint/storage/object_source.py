"""Reads ranges of an object; what is read in small pieces comes in blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from shrinkpoint._native import empty
from shrinkpoint.errors import StorageError
from shrinkpoint.storage.base import Source, check_range
from shrinkpoint.storage.object_requests import send_request
from shrinkpoint.threads import submit_or_run

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BLOCK_BYTES = 1 << 18  # Bytes of a block: what one request brings at least
_MAX_RUN = 16  # blocks that one request brings at most, where they are read one after another
_MAX_BLOCKS = 128  # that are held
_MAX_REQUEST_BYTES = 1 << 23  # a slow line still brings them before a request times out


class ObjectSource(Source):
    """An object open for reading: always the very object that was opened.

    Every request names its ETag. If it is replaced or deleted meanwhile, reading raises; bytes of two objects are never
    mixed. Memory: 32 MiB of blocks at most.

    Args:
        store: the client.
        path: of the object, below the client's prefix.
        where: its name in messages.
        pool: runs the requests of one large read side by side.

    Raises:
        NotFoundError: there is no such object.
        StorageError: the service cannot be reached.
    """

    def __init__(self, store: ObjectStore, path: str, where: str, pool: Executor) -> None:
        self._store, self._path, self._where, self._pool = store, path, where, pool
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._next_block, self._run = 1, 1  # where the last request ended, and how many blocks it brought
        # Learn size and ETag, and read the first block, in one request
        import obstore

        def get() -> tuple[Any, memoryview]:
            try:
                answer = obstore.get(self._store, self._path, options={"range": (0, BLOCK_BYTES)})
                return answer.meta, memoryview(answer.bytes())
            except obstore.exceptions.BaseError as error:
                if "416" not in str(error):  # an empty object has no such range
                    raise
                return obstore.head(self._store, self._path), memoryview(b"")

        self._meta, first = send_request(self._where, "opening", get)
        if first.nbytes != min(self.size, BLOCK_BYTES):
            raise self._short_error(0, min(self.size, BLOCK_BYTES), first.nbytes)
        self._blocks[0] = Future()
        self._blocks[0].set_result(first)

    @property
    def size(self) -> int:
        return int(self._meta["size"])

    @property
    def e_tag(self) -> str | None:
        """ETag of the content; None if the service sends none."""
        e_tag: str | None = self._meta["e_tag"]
        return e_tag

    def read(self, offset: int, length: int) -> bytes | memoryview:
        check_range(self._where, self.size, offset, length)
        if length == 0:
            return b""
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        if length > BLOCK_BYTES * _MAX_RUN and not self._has_blocks(first, last + 1):
            return self._read_large(offset, length)
        blocks = self._get_blocks(first, last + 1)
        begin = offset - first * BLOCK_BYTES
        if first == last:
            return blocks[0][begin : begin + length]
        return memoryview(b"".join(blocks))[begin : begin + length].toreadonly()

    def read_ahead(self) -> None:
        """Begin to fetch the whole object, unless it is larger than what is held; returns at once."""
        num_blocks = -(-self.size // BLOCK_BYTES)
        if num_blocks > _MAX_BLOCKS:
            return
        requests = []
        with self._lock:
            for begin in range(0, num_blocks, _MAX_RUN):
                missing = [i for i in range(begin, min(begin + _MAX_RUN, num_blocks)) if i not in self._blocks]
                if missing:  # a gap in between is rare, and fetched once more
                    requests.append(self._enter_request(missing[0], missing[-1] + 1))
        for indices, futures in requests:
            submit_or_run(self._pool, self._fetch, indices, futures)

    def _has_blocks(self, begin: int, end: int) -> bool:
        with self._lock:
            return end - begin <= _MAX_BLOCKS and all(index in self._blocks for index in range(begin, end))

    def _enter_request(self, begin: int, end: int) -> tuple[range, list[Future[memoryview]]]:
        """Enter blocks, to be fetched by the caller in one request."""
        futures: list[Future[memoryview]] = [Future() for _ in range(begin, end)]
        self._blocks.update(zip(range(begin, end), futures, strict=True))
        return range(begin, end), futures

    def _get_blocks(self, begin: int, end: int) -> Sequence[memoryview]:
        """The blocks of a range; those that are missing are read in one request for each gap between others."""
        with self._lock:
            missing = [index for index in range(begin, end) if index not in self._blocks]
            gaps = self._plan_requests(missing)
            futures = [self._blocks.get(index) or self._blocks[index] for index in range(begin, end)]
            for index in range(begin, end):
                self._blocks.move_to_end(index)
            while len(self._blocks) > _MAX_BLOCKS:
                self._blocks.popitem(last=False)
        for indices, filled in gaps:
            self._fetch(indices, filled)
        return [future.result() for future in futures]

    def _plan_requests(self, missing: Sequence[int]) -> list[tuple[range, list[Future[memoryview]]]]:
        """Enter the missing blocks, to be fetched by the caller; reading on takes more with each request."""
        requests = []
        while missing:
            begin, end = missing[0], missing[0] + 1
            while end in missing:
                end += 1
            missing = [index for index in missing if index >= end]
            self._run = min(2 * self._run, _MAX_RUN) if begin == self._next_block else 1
            num_blocks = -(-self.size // BLOCK_BYTES)
            while end - begin < self._run and end < num_blocks and end not in self._blocks:
                end += 1
            self._next_block = end
            requests.append(self._enter_request(begin, end))
        return requests

    def _fetch(self, indices: range, futures: Sequence[Future[memoryview]]) -> None:
        begin, end = indices[0] * BLOCK_BYTES, min((indices[-1] + 1) * BLOCK_BYTES, self.size)
        try:
            data = self._request(begin, end)
        except BaseException as error:
            with self._lock:
                for index, future in zip(indices, futures, strict=True):
                    if self._blocks.get(index) is future:
                        del self._blocks[index]
            for future in futures:
                future.set_exception(error)
            return
        for number, future in enumerate(futures):
            future.set_result(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])

    def _read_large(self, offset: int, length: int) -> memoryview:
        """Read with several requests side by side."""
        out = empty(length).data

        def fill(begin: int) -> None:
            size = min(_MAX_REQUEST_BYTES, length - begin)
            out[begin : begin + size] = self._request(offset + begin, offset + begin + size)

        for _ in self._pool.map(fill, range(0, length, _MAX_REQUEST_BYTES)):
            pass
        return out.toreadonly()

    def _request(self, begin: int, end: int) -> memoryview:
        """Read bytes from `begin` to `end` of the object that was opened."""
        import obstore

        options: dict[str, Any] = {"range": (begin, end)}
        if self._meta["e_tag"] is not None:
            options["if_match"] = self._meta["e_tag"]

        def get() -> memoryview:
            try:
                answer = obstore.get(self._store, self._path, options=options)  # type: ignore[arg-type]
                if (answer.meta["e_tag"], answer.meta["size"]) == (self._meta["e_tag"], self.size):
                    return memoryview(answer.bytes())
            except (FileNotFoundError, obstore.exceptions.PreconditionError):
                pass
            found, expected = "another object than the one that was opened, or none", "the object that was opened"
            do = "read again: something was saved meanwhile"
            raise StorageError(self._where, found=found, expected=expected, do=do)

        data = send_request(self._where, "reading", get)
        if data.nbytes != end - begin:
            raise self._short_error(begin, end, data.nbytes)
        return data

    def _short_error(self, begin: int, end: int, size: int) -> StorageError:
        found, expected = f"an answer of {size} bytes", f"bytes {begin} to {end}"
        return StorageError(self._where, found=found, expected=expected, do="read again; the service is at fault")

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
