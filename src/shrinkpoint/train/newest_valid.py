"""The newest or best valid checkpoint of several directories, and why a restore skips the others.

`Store.restore` does the same for the steps of a store, by loading each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.sharding.collectives import AllGather
from shrinkpoint.storage import AnyDirectory, ObjectUrl, resolve_directory
from shrinkpoint.store import Keep, SkippedCheckpoint
from shrinkpoint.store.directory import find_run, read_directory_manifest, verify_directory
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.store.newest import newest_that_loads
from shrinkpoint.store.retention import best_first

PlaceT = TypeVar("PlaceT", bound=Path | ObjectUrl)


class NoCheckpointError(NotFoundError, ValueError):
    """There is no checkpoint to resume from. Also a ValueError, which frameworks raise for this."""


def latest_valid(
    candidates: Iterable[PlaceT],
    *,
    deep: bool = True,
    check: Callable[[PlaceT], object] | None = None,
    gather: AllGather | None = None,
    share: Callable[[PlaceT], tuple[int, int]] | None = None,
) -> tuple[PlaceT | None, tuple[SkippedCheckpoint, ...]]:
    """The first valid checkpoint of several, and those before it that are not; a warning is logged for each of these.

    Args:
        candidates: checkpoint directories, or places in a bucket, the newest first.
        deep: compare every stored byte with its digest; False: read headers and manifests only.
        check: raises a ShrinkpointError if a candidate is not valid; None: verify it as a directory of ours.
        gather: gathers a value from all ranks that call this together with the same candidates: a checkpoint is valid
            if it is so on every rank. None: this process decides alone.
        share: says which files of a candidate this rank verifies, as `verify_directory` takes it; all ranks call it
            together. None: all files.

    Returns:
        The directory, None if no candidate is valid; and the candidates that were skipped.
    """

    def find(directory: PlaceT) -> PlaceT:
        part = (0, 1) if share is None else share(directory)
        verify = check or partial(verify_directory, deep=deep, share=part)
        if gather is None:
            verify(directory)
            return directory
        text = ""
        try:
            verify(directory)
        except Exception as error:  # other ranks wait for this one, so any exception counts as an invalid checkpoint
            text = str(error) or type(error).__name__
        if reasons := [f"rank {rank}: {text}" for rank, text in enumerate(gather(text)) if text]:
            raise _RankError("; ".join(reasons))
        return directory

    pairs = ((directory, partial(find, directory)) for directory in candidates)
    return newest_that_loads(pairs, errors=(ShrinkpointError if gather is None else _RankError,))


def best_valid(
    root: AnyDirectory, *, metric: str = "val_loss", mode: Literal["min", "max"] = "min", deep: bool = True
) -> Path | ObjectUrl:
    """The checkpoint of a framework's run with the best metric that is valid; a warning is logged for each better one.

    Args:
        root: the directory of the run, or its place in a bucket.
        metric: a name under which checkpoints have it, such as "eval_loss" of a Trainer.
        mode: "min" or "max".
        deep: compare every stored byte with its digest; False: read headers and manifests only.

    Raises:
        NotFoundError: there is no checkpoint with this metric, or none of them is valid.
        PolicyError: an unknown mode.
        StorageError: the directory cannot be listed.
    """
    keep, manifests = Keep(best=1, metric=metric, mode=mode), dict[int, tuple[Path | ObjectUrl, DirectoryManifest]]()
    for place in find_run(resolve_directory(root, "root"))[::-1]:
        with suppress(ShrinkpointError):  # `latest_valid` says why where it is asked for the newest
            manifest = read_directory_manifest(place)
            manifests[id(manifest)] = place, manifest
    ranked = best_first([manifest for _, manifest in manifests.values()], keep)
    candidates = [manifests[id(manifest)][0] for manifest in ranked]
    directory, skipped = latest_valid(candidates, deep=deep)
    if directory is None:
        found = "; ".join(one.reason for one in skipped) or f"no checkpoint with the metric {metric!r}"
        do = "pass a metric that `shrinkpoint list` shows, or take the newest"
        raise NoCheckpointError(str(root), found=found, expected="a valid checkpoint with the metric", do=do)
    return directory


class _RankError(Exception):
    """The errors of several ranks."""
