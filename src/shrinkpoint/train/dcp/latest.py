"""Which checkpoint all ranks go on from."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shrinkpoint.sharding.shard_spec import make_all_gather
from shrinkpoint.storage import local_path
from shrinkpoint.store import directory as folders

_log = logging.getLogger("shrinkpoint")


def latest_valid(root: str | Path, group: dist.ProcessGroup | None = None, *, deep: bool = False) -> Path | None:
    """The newest directory below `root` with a checkpoint that is whole for all ranks; all get the same answer.

    Newer is what has the larger number in its name. Every rank checks what it sees: on a disk of its own, a rank may
    see less. What is passed over is said aloud, with the reason.

    Args:
        root: a directory; that there is none is no error.
        group: the ranks that ask, all of them together; None: all there are.
        deep: compare every stored byte with its digest, too.

    Returns:
        None where there is none.
    """
    place = local_path(root, "root").absolute()
    gather = make_all_gather(group)
    seen: set[str] = set().union(*gather(_candidate_names(place)))
    for name in sorted(seen, key=_natural_key, reverse=True):
        reasons = gather(_find_error(place / name, deep=deep))
        if not any(reasons):
            return place / name
        for rank, reason in enumerate(reasons):
            if reason:
                _log.warning("%s is passed over: rank %d: %s", place / name, rank, reason)
    return None


def _candidate_names(root: Path) -> set[str]:
    """Directories that may be meant: also those without a manifest, which a save that failed left behind."""
    try:
        return {path.name for path in root.iterdir() if path.is_dir() and _is_ours(path)}
    except OSError:
        return set()


def _is_ours(path: Path) -> bool:
    return folders.is_checkpoint(path) or any(path.glob("rank-*.safetensors"))


def _find_error(directory: Path, *, deep: bool) -> str:
    try:
        folders.verify_directory(directory, deep=deep)
    except Exception as error:  # the others wait for this rank, whatever it is
        return str(error) or type(error).__name__
    return ""


def _natural_key(name: str) -> tuple[Any, ...]:
    """`step-10` after `step-9`: digits count as numbers, and before letters."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    numbers = tuple((1, int(part), "") if part.isdecimal() else (2, 0, part) for part in parts)
    return numbers, name  # all ranks must have one order, also of step-1 and step-01
