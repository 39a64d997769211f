"""Where the processes of a group leave words for each other: before any message, and without a collective."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shrinkpoint.errors import PolicyError

_generations: dict[tuple[str, str], int] = {}
"""How often this process came to a board: a later time never reads an older word."""


class Board:
    """Words by seat and round, in the store that a process group was made with.

    It works before the first message and on every backend, and ends that disagree cannot break it. A collective could
    not do that: who was set up otherwise would not take part.

    Args:
        group: None: the default one.
        kind: what the words are about; every process comes to the boards of a kind in the same order.

    Raises:
        PolicyError: this release of torch does not give the store.
    """

    def __init__(self, group: dist.ProcessGroup | None, kind: str) -> None:
        self.group: dist.ProcessGroup = group or dist.distributed_c10d._get_default_group()
        self._kind, self._store = kind, _store(self.group)
        name = dist.distributed_c10d._get_process_group_name(self.group)
        _generations[name, kind] = self._generation = _generations.get((name, kind), 0) + 1

    def say(self, seat: int, word: str, turn: int = 0) -> None:
        """Leave the word of a seat. Waits for nobody."""
        self._store.set(self._key(seat, turn), word)

    def hear(self, seat: int, patience: float, turn: int = 0) -> str:
        """The word of any seat.

        Raises:
            TimeoutError: it was not said within `patience` seconds.
            ConnectionError: the store is gone.
        """
        key = self._key(seat, turn)
        try:
            self._store.wait([key], timedelta(seconds=patience))
            return str(self._store.get(key), "utf-8")
        except RuntimeError as error:  # every store says so that it waited in vain
            kind = TimeoutError if "timeout" in str(error).lower() else ConnectionError
            raise kind(str(error)) from error

    def wipe(self, seat: int, turn: int) -> None:
        """Take a word away that everybody has read."""
        self._store.delete_key(self._key(seat, turn))

    def _key(self, seat: int, turn: int) -> str:
        return f"shrinkpoint/{self._kind}/{self._generation}/{turn}/{seat}"


def _store(group: dist.ProcessGroup) -> Any:
    get = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if get is None:
        found = f"torch {torch.__version__} does not give the store of a process group"
        raise PolicyError("process group", found=found, do="use torch 2.6 or newer")
    return get(group)
