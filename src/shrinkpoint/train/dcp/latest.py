"""The newest checkpoint of a run that is valid on all ranks."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from shrinkpoint.sharding.collectives import make_all_gather
from shrinkpoint.storage import local_path, natural_key
from shrinkpoint.store.directory import is_checkpoint
from shrinkpoint.train import latest


def latest_valid(root: str | Path, group: dist.ProcessGroup | None = None, *, deep: bool = False) -> Path | None:
    """The newest directory below `root` with a checkpoint that is valid on all ranks; all get the same answer.

    A larger number in its name makes a directory newer. Every rank checks the files that it sees: on a disk of its
    own, a rank may see fewer. A warning with the reason is logged for each checkpoint that is skipped.

    Args:
        root: the directory of the checkpoints; if it does not exist, there are none.
        group: the ranks that call this, all of them together; None: all ranks.
        deep: compare every stored byte with its digest, too.

    Returns:
        The directory; None if there is no valid checkpoint.
    """
    path = local_path(root, "root").absolute()
    gather = make_all_gather(group)
    names: set[str] = set().union(*gather(_candidate_names(path)))
    # The name itself decides between step-1 and step-01: all ranks must have one order.
    newest_first = sorted(names, key=lambda name: (natural_key(name), name), reverse=True)
    return latest.latest_valid([path / name for name in newest_first], deep=deep, gather=gather)[0]


def _candidate_names(root: Path) -> set[str]:
    """Names of directories with a checkpoint, or with payloads of a save that failed before its manifest."""
    try:
        return {path.name for path in root.iterdir() if path.is_dir() and _has_our_files(path)}
    except OSError:
        return set()


def _has_our_files(path: Path) -> bool:
    return is_checkpoint(path) or any(path.glob("rank-*.safetensors"))
