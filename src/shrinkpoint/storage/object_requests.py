"""Requests to an object storage: clients, retries, and the errors of this library for what the service answers.

An `ObjectSource` reads ranges of an object; what is read in small pieces comes in blocks.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shrinkpoint._native import empty
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError, StorageError, missing_extra
from shrinkpoint.storage.base import Source, check_range
from shrinkpoint.storage.paths import ObjectUrl
from shrinkpoint.threads import submit_or_run

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
# Two layers retry: obstore itself, with its own back-off, and `send_request` where obstore gives up.
REQUEST_SECONDS = 180.0  # Longest time in seconds of one request with all of obstore's retries
_MAX_RETRIES = 10  # by obstore
_PAUSES = (0.1, 0.4, 1.6)  # seconds before `send_request` sends a request again whose answer broke off
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_sender = 0  # the process in which obstore's threads run
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
_STATUS = re.compile(r"status code: ([0-9]{3}[A-Za-z ]{0,40})")
_RETRIES = re.compile(r"after ([0-9]{1,4}) retries")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_REFUSED = ("PermissionDeniedError", "UnauthenticatedError")
BUCKET_ADVICE = "create it, or choose another one"
_DO = "the service or the way to it failed: save or load again; committed checkpoints are untouched"


class ObjectConflictError(StorageError):
    """A condition of a write does not hold: the object is another than it was, or is there already."""


def connect(url: ObjectUrl, options: Mapping[str, Any], *, seconds: float, retries: bool = True) -> ObjectStore:
    """Makes a client of obstore for a place in a bucket.

    Args:
        options: further arguments of `obstore.store.from_url`, such as `config` and `credential_provider`.
        seconds: after which a request ends, with all its retries.
        retries: False: obstore sends no request twice.

    Raises:
        MissingExtraError: obstore is not installed.
        PolicyError: the options, or what the environment says, do not make a client.
    """
    try:
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        raise missing_extra(error, "cloud") from error
    limit = timedelta(seconds=seconds)
    # Given here, options of the client are not taken from the environment any more.
    is_plain = os.environ.get(f"{_VARIABLES[url.scheme]}ALLOW_HTTP", "").lower() in ("true", "1")
    client = {"connect_timeout": min(limit, timedelta(seconds=10)), "timeout": limit, "allow_http": is_plain}
    retry = {"max_retries": _MAX_RETRIES, "retry_timeout": limit}
    if not retries:
        options = {**options, "retry_config": {**retry, "max_retries": 0}}
    options = {**options, "client_options": {**client, **options.get("client_options", {})}}
    try:
        return from_url(str(url), **{"retry_config": retry, **options})
    except BaseException as error:  # a panic in obstore is no `Exception`
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        # Their texts may hold what was configured, keys too.
        found = f"settings of which obstore makes no client ({type(error).__name__})"
        do = f"check the options, and the environment variables that begin with {_VARIABLES[url.scheme]}"
        raise PolicyError(str(url), found=found, expected="settings of this service", do=do) from None


def send_request(where: str, operation: str, call: Callable[[], T]) -> T:
    """Call obstore, and raise errors of this library for its own.

    obstore sends most requests again that fail. It does not when the connection breaks in the middle of an answer, nor
    where it may not: then `call` is called again, so it must bear that.

    Args:
        where: the object, for messages.
        operation: what is being done, for messages: "writing".

    Raises:
        NotFoundError: there is no such object.
        ObjectConflictError: a condition of a write does not hold.
        StorageError: anything else. Neither the message nor a chained error repeats the service's text: it may hold a
            signed URL or a key.
    """
    check_not_forked(where)
    for pause in (*_PAUSES, None):
        try:
            return call()
        except ShrinkpointError:
            raise
        except Exception as error:
            if pause is None or not _is_broken_answer(error):
                raise _translate(where, operation, error) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of obstore, at a setting that it does not check
                raise
            raise _endpoint_error(where, f"{operation} failed (PanicException)") from None
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def check_not_forked(where: str) -> None:
    """Raise a StorageError in a fork of a process that has sent requests: obstore's threads are not in it, and it would
    wait for them forever."""
    global _sender
    _sender = _sender or os.getpid()
    if _sender != os.getpid():
        found, expected = "a fork of a process that has used object storage", "a spawned process"
        raise StorageError(where, found=found, expected=expected, do='start the process with the method "spawn"')


def _is_broken_answer(error: Exception) -> bool:
    text = str(error)
    if "NoSuchUpload" in text:  # the answer that an upload is complete was lost
        return True
    if type(error).__name__ != "GenericError" or _RETRIES.search(text):
        return False
    status = _STATUS.search(text)
    return status is None or status[1].startswith(("5", "429"))  # which obstore sends again where it may


def _translate(where: str, operation: str, error: Exception) -> ShrinkpointError:
    text, kind = str(error), type(error).__name__
    if any(name in text for name in _NO_BUCKET):
        return StorageError(where, found="no such bucket", expected="a bucket", do=BUCKET_ADVICE)
    if isinstance(error, FileNotFoundError):
        return NotFoundError(where, found="no such object", do="check the URL")
    if "BadScheme" in text:
        return _endpoint_error(where, f"{operation} failed (an endpoint without https://)")
    reason = _reason(text, kind)
    if kind in _REFUSED or "403 Forbidden" in text or "401 Unauthorized" in text:
        do = "check the credentials, and what they may do in this bucket"
        return StorageError(where, found=f"{operation} was refused ({reason})", do=do)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        do = "read it again: another process writes here"
        return ObjectConflictError(where, found=f"{operation} found another object than before ({reason})", do=do)
    return StorageError(where, found=f"{operation} failed ({reason})", do=_DO)


def _endpoint_error(where: str, found: str) -> StorageError:
    prefix = _VARIABLES.get(where.partition(":")[0], "AWS_")
    do = f"write an endpoint with https://; one with http:// also needs {prefix}ALLOW_HTTP=true"
    return StorageError(where, found=found, do=do)


def _reason(text: str, kind: str) -> str:
    """Text of an error: status, code, and the number of retries."""
    status, code, retries = _STATUS.search(text), _CODE.search(text), _RETRIES.search(text)
    parts = [match[1].strip() for match in (status, code) if match]
    if not parts:
        is_late = "timed out" in text.lower() or "TimedOut" in text
        parts = ["no answer in time" if is_late else "no connection" if "error sending request" in text else kind]
    if retries:
        parts.append(f"{retries[1]} retries")
    return ", ".join(parts)


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
