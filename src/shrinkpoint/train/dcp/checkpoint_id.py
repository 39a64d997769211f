"""The directory of a checkpoint, and the number of threads of a rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import is_url, local_path


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
