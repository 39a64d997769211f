"""What replicas agree on before a payload moves: each says how it was set up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from shrinkpoint.comm.board import Board
from shrinkpoint.errors import MismatchError

TIMEOUT = 30.0
"""Seconds to wait for what another rank says."""


class Agreement:
    """One rank's word among those of all ranks of a group. It is said at once, and compared when `check` is called.

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
        self._board = Board(group, kind)
        self._board.say(self._rank, self._words)

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
        try:
            return self._board.hear(rank, self._timeout)
        except OSError as error:
            found = f"rank {rank} said nothing of its compression within {self._timeout:g} s"
            raise MismatchError(self._kind, found=found, do="call it on every rank of the group") from error
