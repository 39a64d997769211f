"""Context managers for reading: `read_guard` turns any error about invalid bytes into one of `shrinkpoint.errors`, and
`no_gc` pauses the garbage collector while many objects are created.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shrinkpoint.errors import RESTORE_ADVICE, CorruptError, ShrinkpointError, StorageError, error_text

_SHORT_BYTES, _MAX_MEAN_BYTES = 1 << 26, 1024
"""Bytes of a state, and mean bytes of its tensors, up to which saving or loading it takes seconds at most."""


@contextmanager
def read_guard(where: str) -> Iterator[None]:
    """Guards code that depends only on the bytes of a file, not on arguments of a caller.

    Args:
        where: the file, for messages.

    Raises:
        CorruptError: any error that is not one of this library; the cause is chained.
        StorageError: the system could not read.
    """
    try:
        yield
    except (ShrinkpointError, Warning):
        raise
    except OSError as error:
        raise StorageError(where, found=error_text(error), do="check the disk and the permissions") from error
    except MemoryError as error:
        do = "read it where there is more memory, or restore another checkpoint"
        raise CorruptError(where, found="out of memory", do=do) from error
    except Exception as error:
        found = f"bytes that no release writes ({error_text(error)})"
        raise CorruptError(where, found=found, do=RESTORE_ADVICE) from error


@contextmanager
def no_gc() -> Iterator[None]:
    """Pauses Python's search for reference cycles, each of which would visit all objects created so far.

    For code that takes seconds at most and creates no cycles. The first of several threads to leave ends it for all.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def pause_gc(nbytes: int, tensors: int = 0) -> AbstractContextManager[None]:
    """Returns `no_gc` for saving or loading a state of so many bytes and tensors, if that is short; else nothing."""
    return no_gc() if nbytes <= max(_SHORT_BYTES, _MAX_MEAN_BYTES * tensors) else nullcontext()
