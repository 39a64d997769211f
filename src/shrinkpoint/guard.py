"""The net below every public entry that reads: whatever strange bytes raise becomes an error of our tree.

Causes are mended where they are: readers check what they are told before they act on it. What they have overlooked ends
here, so that whoever falls back on an older checkpoint needs to know our errors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shrinkpoint.errors import CorruptError, ShrinkpointError, StorageError

_DO = "restore another checkpoint, or fetch an intact copy of this file"
_LONGEST = 200  # letters of another's message


@contextmanager
def guarded(where: str) -> Iterator[None]:
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
        raise StorageError(where, found=_text(error), do="look at the file system") from error
    except MemoryError as error:
        do = "read it where there is more memory, or restore another checkpoint"
        raise CorruptError(where, found="what takes more memory than there is", do=do) from error
    except Exception as error:
        raise CorruptError(where, found=f"bytes that no release writes ({_text(error)})", do=_DO) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:_LONGEST]}"
