"""Requests to an object storage: clients, retries, and the errors of this library for what the service answers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError, StorageError, missing_extra
from shrinkpoint.storage.paths import ObjectUrl

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
        do = f"look at the options, and at the environment variables that begin with {_VARIABLES[url.scheme]}"
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
        found, expected = "a fork of a process that has used object storage", "a process that has not, or a spawned one"
        raise StorageError(where, found=found, expected=expected, do='start it with the method "spawn"')


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
        return StorageError(where, found="no such bucket", expected="a bucket", do="create it, or name another one")
    if isinstance(error, FileNotFoundError):
        return NotFoundError(where, found="no such object", do="list what there is")
    if "BadScheme" in text:
        return _endpoint_error(where, f"{operation} failed (an endpoint without https://)")
    reason = _reason(text, kind)
    if kind in _REFUSED or "403 Forbidden" in text or "401 Unauthorized" in text:
        do = "look at the credentials, and at what they may do in this bucket"
        return StorageError(where, found=f"{operation} was refused ({reason})", do=do)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        do = "read it again; something else writes here"
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
