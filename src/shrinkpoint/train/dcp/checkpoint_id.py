"""Where a checkpoint goes, and how much of the machine is this rank's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import is_url, local_path


class CheckpointId:
    """What torch calls a `checkpoint_id`. Nothing is raised before it is needed: not all ranks might hear of it.

    Args:
        strict: all ranks hear of it: raise PolicyError at once where it is no path.
    """

    def __init__(self, value: Any = None, *, strict: bool = False) -> None:
        if strict and value is not None:
            local_path(value)
        self._value = value
        self.path: Path | None = None
        if is_path(value):
            self.path = Path(value).absolute()  # now: the process may change its directory later

    @property
    def directory(self) -> Path:
        """The directory.

        Raises:
            PolicyError: there is none.
        """
        if self.path is None:
            found = "no path" if self._value is None else f"{self._value!r:.200}, which is no path of a directory"
            do = "pass checkpoint_id=, or the path to Writer or Reader"
            raise PolicyError("checkpoint_id", found=found, expected="a directory", do=do)
        return self.path


def is_path(value: Any) -> bool:
    """Whether something can be a directory: any path but a URL."""
    return isinstance(value, str | os.PathLike) and not is_url(value) and bool(os.fspath(value))


def threads_per_rank(threads: int | None) -> int | None:
    """Native threads of this rank; where torchrun has started several on this machine, they share its cores.

    Raises:
        PolicyError: it is no number of threads.
    """
    threads = validate.check_threads(threads)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if threads is not None or not ranks.isdecimal() or int(ranks) < 2:
        return threads
    return max(1, len(os.sched_getaffinity(0)) // int(ranks))
