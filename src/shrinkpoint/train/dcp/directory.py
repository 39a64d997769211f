"""The directories of checkpoints: as torch passes them, and the newest that is valid on all ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shrinkpoint import validate
from shrinkpoint.codec.coder import default_threads
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.sharding.collectives import Collectives, make_collectives
from shrinkpoint.storage import (
    AnyDirectory,
    LocalStorage,
    ObjectUrl,
    directory_storage,
    is_object_url,
    is_url,
    resolve_directory,
)
from shrinkpoint.storage.paths import parse_object_url
from shrinkpoint.store.directory import find_place, sort_by_history
from shrinkpoint.store.history import Place
from shrinkpoint.store.identify import MANIFEST, is_checkpoint
from shrinkpoint.train import newest_valid


def ranks_on_machine() -> int:
    """The number of ranks that torchrun has started on this machine; 1 if it has not started this one."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1


class CheckpointDirectory:
    """The directory of a checkpoint, torch's `checkpoint_id`, and this rank's threads: a part of Reader and Writer.

    A wrong directory that is passed to `dcp.save` or `dcp.load` raises no error before `_directory` is read: torch may
    not report an earlier one to all ranks.

    Args:
        path: the directory, or a URL of object storage; None: it is set later.
        threads: native threads; None: every core, shared with the ranks that torchrun has started on this machine.

    Raises:
        PolicyError: `path` is a URL of something else, or `threads` is no number of threads.
    """

    def __init__(self, path: AnyDirectory | None, threads: int | None) -> None:
        super().__init__()
        self._threads = validate.check_threads(threads)
        if self._threads is None and (ranks := ranks_on_machine()) > 1:
            self._threads = max(1, default_threads(None) // ranks)
        if path is not None:
            resolve_directory(path, "path")
        self._set_checkpoint_id(path)

    @property
    def checkpoint_id(self) -> Path | str | None:
        """The directory of this checkpoint; in a bucket its URL."""
        return str(self._path) if isinstance(self._path, ObjectUrl) else self._path

    @property
    def path(self) -> Path | str | None:
        """The same, by the name that torch's own reader and writer use."""
        return self.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if it is a path, or a URL of object storage."""
        return is_place(checkpoint_id)

    def _set_checkpoint_id(self, value: Any) -> None:
        self._checkpoint_id = value
        # Resolved now: the process may change its working directory later.
        self._path = resolve_directory(value) if is_place(value) else None

    @property
    def _directory(self) -> Path | ObjectUrl:
        """The absolute path, or the place in a bucket; raises a PolicyError if there is none."""
        if self._path is None:
            value = self._checkpoint_id
            found = "no path" if value is None else f"{value!r:.200}, which is no path of a directory"
            do = "pass checkpoint_id=, or the path to Writer or Reader"
            raise PolicyError("checkpoint_id", found=found, expected="a directory", do=do)
        return self._path


def is_place(value: Any) -> bool:
    """True if a value is a path, or a URL of object storage."""
    if isinstance(value, str | os.PathLike) and not is_url(value) and os.fspath(value):
        return True
    with suppress(PolicyError):
        return isinstance(value, ObjectUrl) or (is_object_url(value) and bool(parse_object_url(value)))
    return False


def latest_valid(
    root: AnyDirectory, group: dist.ProcessGroup | None = None, *, deep: bool = False
) -> Path | ObjectUrl | None:
    """The newest directory below `root` with a checkpoint that is valid on all ranks; all get the same answer.

    The newest is the one that was saved last. Ranks that see one disk divide its files among them, so that
    each file is read once; on a disk of its own, a rank checks all that it sees, which may be fewer. A warning with the
    reason is logged for each checkpoint that is skipped.

    Args:
        root: the directory or the URL of the checkpoints; if it does not exist, there are none.
        group: the ranks that call this, all of them together; None: all ranks.
        deep: compare every stored byte with its digest, too.

    Returns:
        The directory, or its place in a bucket; None if there is no valid checkpoint.
    """
    path = resolve_directory(root, "root")
    collectives = make_collectives(group)
    found: list[Any] = collectives.all_gather(_own_candidate_names(path, collectives.rank))  # an error is raised by all
    # The first rank that sees a checkpoint reads its manifest.
    first_ranks = {name: rank for rank, names in reversed([*enumerate(found)]) for name in names}
    mine = [name for name, rank in first_ranks.items() if rank == collectives.rank]
    gathered: list[Any] = collectives.all_gather({name: find_place(path / name) for name in mine})
    places: dict[str, Place] = {name: place for rank in gathered for name, place in rank.items()}
    # All ranks have one order: the name itself decides between step-1 and step-01.
    candidates = sort_by_history({path / name: place for name, place in places.items()})[::-1]
    share = partial(file_share, collectives=collectives)
    return newest_valid.latest_valid(candidates, deep=deep, gather=collectives.all_gather, share=share)[0]


def file_share(directory: Path | ObjectUrl, collectives: Collectives) -> tuple[int, int]:
    """Share of a checkpoint's files that this rank checks: (i, n), every n-th from the i-th on; a collective.

    n is the number of ranks that see the same manifest: the same inode, changed at the same nanosecond. A copy on
    another disk differs in both; only a copy of a whole disk, block by block, is taken for the disk.
    """
    storage = directory_storage(directory)
    stamp: object = None
    with suppress(ShrinkpointError):
        if isinstance(storage, LocalStorage):
            stamp = storage.stamp(MANIFEST)
        elif (version := getattr(storage, "version", None)) is not None:
            stamp = version(MANIFEST)
    stamps = collectives.all_gather(stamp)
    if stamp is None:  # nothing to compare: this rank alone says what it finds
        return 0, 1
    ranks = [rank for rank, other in enumerate(stamps) if other == stamp]
    return ranks.index(collectives.rank), len(ranks)


def _own_candidate_names(root: Path | ObjectUrl, rank: int) -> set[str] | ShrinkpointError:
    """Names of directories with a checkpoint, or with payloads of a save that failed before its manifest; or an error.

    Only the first rank looks into a bucket, which is the same for all.
    """
    if isinstance(root, Path):
        try:
            paths = [path for path in root.iterdir() if path.is_dir()]
            return {path.name for path in paths if is_checkpoint(path) or any(path.glob("rank-*.safetensors"))}
        except OSError:  # a rank may not see the directory
            return set()
        except ShrinkpointError as error:
            return error
    try:
        parts = (key.split("/") for key in (directory_storage(root).list() if rank == 0 else ()))
        return {part[0] for part in parts if len(part) == 2 and (part[1] == MANIFEST or part[1].startswith("rank-"))}
    except ShrinkpointError as error:
        return error
