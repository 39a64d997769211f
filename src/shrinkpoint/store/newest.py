"""The newest checkpoint that loads, and why newer ones do not. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from shrinkpoint.errors import ChainError, FormatError, MismatchError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store.listing import SkippedCheckpoint

T = TypeVar("T")
_log = logging.getLogger("shrinkpoint")
LOAD_ERRORS: tuple[type[Exception], ...] = (ChainError, FormatError, MismatchError, NotFoundError, StorageError)
"""Errors of a checkpoint that does not load, after which an older one is tried."""


def newest_that_loads(
    candidates: Iterable[tuple[int | Path | ObjectUrl, Callable[[], T | None]]],
    *,
    errors: tuple[type[Exception], ...] = LOAD_ERRORS,
    warn: bool = True,
) -> tuple[T | None, tuple[SkippedCheckpoint, ...]]:
    """Load the first of several checkpoints that loads.

    Args:
        candidates: step of a store or directory of each checkpoint, newest first, with the function that loads it. A
            function that returns None is passed over without a word.
        errors: what counts as a checkpoint that does not load; any other exception is raised.
        warn: log a warning for each checkpoint that is skipped.

    Returns:
        What was loaded, None if nothing was; and the newer checkpoints, which do not load.
    """
    skipped: list[SkippedCheckpoint] = []
    for place, load in candidates:
        try:
            loaded = load()
        except errors as error:
            own = error if isinstance(error, ShrinkpointError) else None
            step, directory = (place, None) if isinstance(place, int) else (None, place)
            skipped.append(SkippedCheckpoint(str(error), step, directory, own))
            if warn:
                _log.warning("%s is passed over: %s", place, error)
        else:
            if loaded is not None:
                return loaded, tuple(skipped)
    return None, tuple(skipped)
