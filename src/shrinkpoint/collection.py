"""No search for garbage while many small objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed() -> Iterator[None]:
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
