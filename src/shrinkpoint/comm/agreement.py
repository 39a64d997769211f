"""What replicas agree on before a payload moves: each says how it was set up, over the store of their group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shrinkpoint.errors import MismatchError, PolicyError

TIMEOUT = 30.0
"""Seconds to wait for what another rank says."""
_generations: dict[tuple[str, str], int] = {}
"""How often a group was given something of a kind in this process: a later one never reads an older word."""


class Agreement:
    """One rank's word among those of all ranks of a group. It is said at once, and compared when `check` is called.

    The words travel through the store that the group was made with: before the first message, on every backend, and
    without a collective that a rank which was set up otherwise would not take part in.

    Args:
        group: None: the default one.
        kind: what is set up; attached in the same order on every rank.
        words: plain values, the same on every rank if all is well.
        timeout: seconds to wait for another rank's word.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, kind: str, words: Mapping[str, Any], timeout: float = TIMEOUT
    ) -> None:
        self._kind, self._timeout = kind, timeout
        self._words, self._open = json.dumps(words, sort_keys=True), True
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        home: Any = group or dist.group.WORLD
        self._store = _store(home)
        seat = (dist.distributed_c10d._get_process_group_name(home), kind)
        _generations[seat] = self._generation = _generations.get(seat, 0) + 1
        self._store.set(self._key(self._rank), self._words)

    def check(self) -> None:
        """Compare the words of all ranks, once.

        Raises:
            MismatchError: they differ, or one is not said within the timeout; on every rank that checks.
        """
        if not self._open:
            return
        said = [self._read(rank) for rank in range(self._ranks)]
        others = [rank for rank, words in enumerate(said) if words != said[0]]
        if others:
            found = f"rank 0 has {said[0]}, rank {others[0]} has {said[others[0]]}"
            raise MismatchError(self._kind, found=found, expected="the same on all ranks", do="set all ranks up alike")
        self._open = False

    def _read(self, rank: int) -> str:
        key = self._key(rank)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout))
            return str(self._store.get(key), "utf-8")
        except RuntimeError as error:
            found = f"rank {rank} said nothing of its compression within {self._timeout:g} s"
            raise MismatchError(self._kind, found=found, do="call it on every rank of the group") from error

    def _key(self, rank: int) -> str:
        return f"shrinkpoint/{self._kind}/{self._generation}/{rank}"


def _store(group: Any) -> Any:
    get = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if get is None:
        found = f"torch {torch.__version__} does not give the store of a process group"
        raise PolicyError("process group", found=found, do="use torch 2.6 or newer")
    return get(group)
