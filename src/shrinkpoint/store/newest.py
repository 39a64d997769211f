"""The newest checkpoint that loads, and why newer ones do not. No torch."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shrinkpoint.errors import ChainError, FormatError, MismatchError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store.chain import MAX_READS, manifest_identity
from shrinkpoint.store.listing import Lister, SkippedCheckpoint, StepDirectory, StoreRestore, iter_newest

if TYPE_CHECKING:
    from shrinkpoint.store.checkpoint_file import Device
    from shrinkpoint.store.store import Store

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
                _warn_of(skipped[-1])
        else:
            if loaded is not None:
                return loaded, tuple(skipped)
    return None, tuple(skipped)


def _warn_of(checkpoint: SkippedCheckpoint) -> None:
    place = checkpoint.directory or f"step {checkpoint.step}"
    _log.warning("%s is passed over: %s", place, checkpoint.reason)


def restore_newest(
    stores: Sequence[Store],
    *,
    device: Device = None,
    tie: bool = True,
    keep: Store | None = None,
    weights_only: bool = False,
    max_bytes: int | None = None,
) -> StoreRestore:
    """Load the newest checkpoint of one or more stores that loads; what it passes over is in the result and the log.

    Args:
        stores: of copies of one checkpoint, that in the first of them that loads. What one has forgotten counts in none
            of the later ones.
        keep: the one whose next save is a delta against the checkpoint, if it is read from there.
        weights_only: as for `Store.restore`.
        device, tie, max_bytes: as for `Store.load`.

    Raises:
        NotFoundError: none loads, or there is none.
        StorageError: a store cannot be listed.
    """
    listers = [store._lister for store in stores]
    given: list[tuple[StepDirectory, int]] = []  # what has been looked at, newest first
    forgotten: set[str] = set()  # ids

    def load(store: Store, entry: StepDirectory) -> StoreRestore | None:
        manifest = entry.read_manifest()
        if manifest.id in forgotten:
            return None
        if manifest.weights_only and not weights_only:
            raise store.weights_only_error(manifest)
        state = store._load(manifest, device, tie, store is keep, max_bytes)
        return StoreRestore(entry.step, state, manifest, where=store.storage.describe())

    def candidates() -> Iterator[tuple[int, Callable[[], StoreRestore | None]]]:
        given.clear()
        forgotten.clear()
        for entry, index in iter_newest(listers):
            given.append((entry, index))
            if entry.is_forgotten and entry.manifest is not None:
                forgotten.add(entry.manifest.id)
            if entry.is_visible:
                yield entry.step, partial(load, stores[index], entry)

    for _ in range(MAX_READS):
        restored, skipped = newest_that_loads(candidates(), warn=False)
        if not _has_changed(listers, given, is_over=restored is None):
            break
    if restored is not None:
        for checkpoint in skipped:
            _warn_of(checkpoint)
        return replace(restored, skipped=skipped)
    raise _none_loads_error([store.storage.describe() for store in stores], skipped)


def _has_changed(listers: Sequence[Lister], given: Sequence[tuple[StepDirectory, int]], *, is_over: bool) -> bool:
    """True if a checkpoint newer than the last one given is new, gone, or not as it was; after the end, any one.

    A writer may delete or replace what was listed before it is read: what was found is not the newest then.
    """
    passed, pairs = [*given], iter_newest(listers)
    if not is_over:
        last, index = passed.pop()
        pairs = takewhile(lambda pair: (pair[0].step, pair[1]) != (last.step, index), pairs)
        if not passed:
            return False
    with suppress(StorageError):  # it cannot be listed any more: what was found counts
        return [*_identities(pairs)] != [*_identities(passed)]
    return False


def _identities(pairs: Iterable[tuple[StepDirectory, int]]) -> Iterator[object]:
    """Keys that differ if a visible checkpoint was replaced by a later one of its step."""
    for entry, index in pairs:
        if entry.is_visible:
            manifest = entry.manifest
            yield entry.step, index, str(entry.error) if manifest is None else manifest_identity(manifest)


def _none_loads_error(names: Sequence[str], skipped: Sequence[SkippedCheckpoint]) -> NotFoundError:
    found, do = "no checkpoint", "save one first"
    if skipped:
        reasons = [f"step {checkpoint.step}: {checkpoint.reason}" for checkpoint in skipped]
        if len(reasons) > _MAX_REASONS:
            reasons[_MAX_REASONS:] = [f"and {len(reasons) - _MAX_REASONS} more"]
        found = f"no checkpoint that loads ({'; '.join(reasons)})"
        do = f"run `shrinkpoint verify {shlex.quote(names[0])} --deep`"
    return NotFoundError(", ".join(names), found=found, do=do)
