"""Comparison of all ranks before each exchange of local steps, through the store of their process group."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shrinkpoint.comm.membership import LostMemberError, Membership
from shrinkpoint.comm.rendezvous import ConfigCheck
from shrinkpoint.errors import MismatchError, PolicyError

Problem = tuple[str, str, str, str]
"""The `where`, `found`, `expected` and `do` of an error."""
_POLL_SECONDS = 0.01


class RoundCheck(ConfigCheck):
    """Compares what all ranks of a group say of themselves, in every round, before anything is sent.

    What a rank cannot go on with is an error on every rank, and no rank is left waiting in a collective. With a
    membership a rank that dies is a LostMemberError as soon as that is known.
    """

    participant_kind = "rank"
    missing_advice = "make the same objects and take the same number of steps in the same order on every rank"

    def __init__(self, group: dist.ProcessGroup, membership: Membership | None = None) -> None:
        self._rank, self._membership = group.rank(), membership
        super().__init__(group, "local steps", [self._rank], group.size(), where="LocalSteps")

    def check(self, facts: Mapping[str, str | int], problem: Problem | None, timeout: float) -> bool:
        """Tell all ranks the facts and the problem of this one, and wait for theirs.

        Args:
            facts: what must be equal on all ranks, by a name for messages; the first that differs is named.
            problem: why this rank cannot go on; None if it can.
            timeout: seconds to wait for each rank.

        Returns:
            Whether a rank knows of a process that waits to join: the same on all ranks.

        Raises:
            PolicyError: a rank has a problem.
            MismatchError: facts differ, or a rank did not say anything in time.
        """
        has_newcomers = self._membership is not None and self._membership.has_newcomers()
        message = {"facts": list(facts.items()), "problem": problem, "newcomers": has_newcomers}
        configs = self.exchange(message, timeout)
        self._check_equal(configs)
        return any(config["newcomers"] for config in configs)

    def exchange(self, message: Mapping[str, Any], timeout: float) -> list[Any]:
        """Tell all ranks a message of plain values, and return those of all, in the order of ranks."""
        self.publish({self._rank: message})
        return [self._read(rank, timeout) for rank in range(self._num_participants)]

    def _read(self, participant: int, timeout: float) -> Any:
        if self._membership is None:
            return super()._read(participant, timeout)
        deadline = time.monotonic() + timeout
        while not self._channel.has(participant, self._round):
            self._membership.check_member(participant)
            if time.monotonic() > deadline:
                problem = f"rank {participant} is alive and did not come in {timeout:g} s"
                raise LostMemberError(self._where, found=problem, do="form the next group")
            time.sleep(_POLL_SECONDS)
        return json.loads(self._channel.read(participant, timeout, self._round))

    def _check_equal(self, configs: Sequence[Any]) -> None:
        for rank, config in enumerate(configs):
            if config["problem"] is not None:
                where, found, expected, advice = config["problem"]
                raise PolicyError(f"{where}, rank {rank}", found=found, expected=expected, do=advice)
        first = dict(configs[0]["facts"])
        for rank, config in enumerate(configs):
            facts = dict(config["facts"])
            for name in {**first, **facts}:
                if first.get(name) != facts.get(name):
                    problem = f"{name}: {first.get(name, 'none')} on rank 0, {facts.get(name, 'none')} on rank {rank}"
                    raise MismatchError(self._where, found=problem, expected="the same on all ranks", do=_advice(name))


def _advice(name: str) -> str:
    if name in ("round", "global weights"):
        return "call step equally often on every rank, and load the state of the same step on every rank, or on none"
    return "give every rank the same model and the same arguments"
