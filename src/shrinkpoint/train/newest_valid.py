"""The newest valid checkpoint of several directories, and why a restore skips the others.

`Store.restore` does the same for the steps of a store, by loading each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.sharding.collectives import AllGather
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store import SkippedCheckpoint
from shrinkpoint.store.directory import verify_directory

_log = logging.getLogger("shrinkpoint")
PlaceT = TypeVar("PlaceT", bound=Path | ObjectUrl)


class NoCheckpointError(NotFoundError, ValueError):
    """There is no checkpoint to resume from. Also a ValueError, which frameworks raise for this."""


def numbered_dirs(root: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Number and path of the directories in `root` whose name matches, lowest number first.

    Args:
        name: its first group is the number.
    """
    paths = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    matches = ((name.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


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
    skipped: list[SkippedCheckpoint] = []
    for directory in candidates:
        part = (0, 1) if share is None else share(directory)
        verify = check or partial(verify_directory, deep=deep, share=part)
        error = _find_error(directory, verify, is_alone=gather is None)
        if gather is None:
            reasons = [] if error is None else [str(error)]
        else:
            texts = gather("" if error is None else str(error) or type(error).__name__)
            reasons, error = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text], None
        if not reasons:
            return directory, tuple(skipped)
        for reason in reasons:
            _log.warning("%s is passed over: %s", directory, reason)
        skipped.append(SkippedCheckpoint("; ".join(reasons), directory=directory, error=error))
    return None, tuple(skipped)


# Beside `latest_valid`, so that the traceback of an error in `skipped` does not hold the frame that holds `skipped`.
def _find_error(directory: PlaceT, check: Callable[[PlaceT], object], *, is_alone: bool) -> Exception | None:
    """Error of a candidate. Where other ranks wait for this one, any exception counts as an invalid checkpoint."""
    try:
        check(directory)
    except ShrinkpointError as error:
        return error
    except Exception as error:
        if is_alone:
            raise
        return error
    return None
