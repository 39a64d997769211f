"""The directories of checkpoints: as torch passes them, and the newest that is valid on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.sharding.collectives import make_all_gather
from shrinkpoint.storage import is_url, local_path, natural_key
from shrinkpoint.store.directory import is_checkpoint
from shrinkpoint.train import restore


class CheckpointId:
    """The directory that torch calls a `checkpoint_id`.

    An invalid value raises no error before `directory` is read: torch may not report an earlier one to all ranks.

    Args:
        value: a path; None if it is not known yet.
        strict: raise at once if the value is not a path, because this is called on all ranks.

    Attributes:
        path: the absolute path; None if there is none.

    Raises:
        PolicyError: with `strict`, the value is not a path.
    """

    def __init__(self, value: Any = None, *, strict: bool = False) -> None:
        if strict and value is not None:
            local_path(value)
        self._value = value
        self.path: Path | None = None
        if is_path(value):
            self.path = Path(value).absolute()  # resolved now: the process may change its working directory later

    @property
    def directory(self) -> Path:
        """The absolute path.

        Raises:
            PolicyError: there is none.
        """
        if self.path is None:
            found = "no path" if self._value is None else f"{self._value!r:.200}, which is no path of a directory"
            do = "pass checkpoint_id=, or the path to Writer or Reader"
            raise PolicyError("checkpoint_id", found=found, expected="a directory", do=do)
        return self.path


def is_path(value: Any) -> bool:
    """Whether a value is a path, and no URL."""
    return isinstance(value, str | os.PathLike) and not is_url(value) and bool(os.fspath(value))


def threads_per_rank(threads: int | None) -> int | None:
    """The number of native threads of this rank; None: every core.

    Ranks that torchrun has started on one machine share its cores.

    Args:
        threads: the number that was asked for; None: choose one.

    Raises:
        PolicyError: `threads` is not a number of threads.
    """
    threads = validate.check_threads(threads)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if threads is not None or not ranks.isdecimal() or int(ranks) < 2:
        return threads
    return max(1, len(os.sched_getaffinity(0)) // int(ranks))


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
    return restore.latest_valid([path / name for name in newest_first], deep=deep, gather=gather)[0]


def _candidate_names(root: Path) -> set[str]:
    """Names of directories with a checkpoint, or with payloads of a save that failed before its manifest."""
    try:
        return {path.name for path in root.iterdir() if path.is_dir() and _has_our_files(path)}
    except OSError:
        return set()


def _has_our_files(path: Path) -> bool:
    return is_checkpoint(path) or any(path.glob("rank-*.safetensors"))
