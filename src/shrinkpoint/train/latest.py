"""The newest of several checkpoint directories that is valid."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.sharding.collectives import AllGather
from shrinkpoint.store import SkippedCheckpoint
from shrinkpoint.store.directory import verify_directory

_log = logging.getLogger("shrinkpoint")


def latest_valid(
    candidates: Iterable[Path],
    *,
    deep: bool = True,
    check: Callable[[Path], object] | None = None,
    gather: AllGather | None = None,
) -> tuple[Path | None, tuple[SkippedCheckpoint, ...]]:
    """The first valid checkpoint of several, and those before it that are not; a warning is logged for each of these.

    Args:
        candidates: checkpoint directories, the newest first.
        deep: compare every stored byte with its digest; False: read headers and manifests only.
        check: raises a ShrinkpointError if a candidate is not valid; None: verify it as a directory of ours.
        gather: gathers a value from all ranks that call this together with the same candidates: a checkpoint is valid
            if it is so on every rank. None: this process decides alone.

    Returns:
        The directory, None if no candidate is valid; and the candidates that were skipped.
    """
    skipped: list[SkippedCheckpoint] = []
    for directory in candidates:
        error = _find_error(
            directory, check or (lambda path: verify_directory(path, deep=deep)), is_alone=gather is None
        )
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


def _find_error(directory: Path, check: Callable[[Path], object], *, is_alone: bool) -> Exception | None:
    """The error of a candidate. Where other ranks wait for this one, any exception counts as an invalid checkpoint."""
    try:
        check(directory)
    except ShrinkpointError as error:
        return error
    except Exception as error:
        if is_alone:
            raise
        return error
    return None
