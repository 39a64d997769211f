"""The newest checkpoint that loads, and why newer ones do not. No torch."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shrinkpoint.errors import ChainError, FormatError, MismatchError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.storage import ObjectUrl, Storage
from shrinkpoint.store.listing import NewestFirst, SkippedCheckpoint, StepDirectory, StoreRestore
from shrinkpoint.store.manifest import Manifest

T = TypeVar("T")
_log = logging.getLogger("shrinkpoint")
LOAD_ERRORS: tuple[type[Exception], ...] = (ChainError, FormatError, MismatchError, NotFoundError, StorageError)
"""Errors of a checkpoint that does not load, after which an older one is tried."""
_MAX_REASONS = 5  # Number of checkpoints for which an error says why they do not load


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


def restore_first(
    entries: NewestFirst, storages: Sequence[Storage], load: Callable[[int, Manifest], Any]
) -> StoreRestore | NotFoundError:
    """The first checkpoint of stores that loads, or the error that none does.

    Args:
        entries: of all stores, newest first.
        load: loads the state of a checkpoint of the store with this index.
    """
    forgotten: set[str] = set()  # ids

    def load_entry(index: int, entry: StepDirectory) -> StoreRestore | None:
        manifest = entry.read_manifest()
        if manifest.id in forgotten:
            return None
        return StoreRestore(entry.step, load(index, manifest), manifest, where=storages[index].describe())

    def candidates() -> Iterator[tuple[int, Callable[[], StoreRestore | None]]]:
        for entry, index in entries:
            if entry.is_forgotten and entry.manifest is not None:
                forgotten.add(entry.manifest.id)
            if entry.is_visible:
                yield entry.step, partial(load_entry, index, entry)

    restored, skipped = newest_that_loads(candidates(), warn=False)
    if restored is not None:
        return replace(restored, skipped=skipped)
    found, do = "no checkpoint", "save one first"
    if skipped:
        reasons = [f"step {checkpoint.step}: {checkpoint.reason}" for checkpoint in skipped]
        if len(reasons) > _MAX_REASONS:
            reasons[_MAX_REASONS:] = [f"and {len(reasons) - _MAX_REASONS} more"]
        found = f"no checkpoint that loads ({'; '.join(reasons)})"
        do = f"run `shrinkpoint verify {shlex.quote(storages[0].describe())} --deep`"
    return NotFoundError(", ".join(storage.describe() for storage in storages), found=found, do=do)
