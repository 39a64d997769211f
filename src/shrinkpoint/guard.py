"""Context managers around reading and building: what strange bytes raise becomes an error of our tree, and
the garbage collector waits while many objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shrinkpoint.errors import CorruptError, ShrinkpointError, StorageError

_DO = "restore another checkpoint, or fetch an intact copy of this file"
MAX_MESSAGE_CHARS = 200  # letters of another's message


@contextmanager
def read_guard(where: str) -> Iterator[None]:
    """Read inside of it: bytes, and nothing that a caller may have got wrong.

    Raises:
        CorruptError: anything went wrong that has no name of its own; the cause is chained.
        StorageError: the system could not read.
    """
    try:
        yield
    except (ShrinkpointError, Warning):
        raise
    except OSError as error:
        raise StorageError(where, found=_error_text(error), do="look at the file system") from error
    except MemoryError as error:
        do = "read it where there is more memory, or restore another checkpoint"
        raise CorruptError(where, found="what takes more memory than there is", do=do) from error
    except Exception as error:
        raise CorruptError(where, found=f"bytes that no release writes ({_error_text(error)})", do=_DO) from error


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_MESSAGE_CHARS]}"


@contextmanager
def no_gc() -> Iterator[None]:
    """Python's search for cycles waits until the end, as each one would go through all that has been made so far.

    For what takes seconds at most, and has no cycles of its own. Of several threads in here, the first to leave ends
    it for all.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
