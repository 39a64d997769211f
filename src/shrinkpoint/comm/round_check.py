"""Comparison of all ranks before each exchange of local steps, through the store of their process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shrinkpoint.comm.rendezvous import ConfigCheck
from shrinkpoint.errors import MismatchError, PolicyError

Problem = tuple[str, str, str, str]
"""The `where`, `found`, `expected` and `do` of an error."""


class RoundCheck(ConfigCheck):
    """Compares what all ranks of a group say of themselves, in every round, before anything is sent.

    What a rank cannot go on with is an error on every rank, and no rank is left waiting in a collective.
    """

    participant_kind = "rank"
    missing_advice = "make the same objects and take the same number of steps in the same order on every rank"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = group.rank()
        super().__init__(group, "local steps", [self._rank], group.size(), where="LocalSteps")

    def check(self, facts: Mapping[str, str | int], problem: Problem | None, timeout: float) -> None:
        """Tell all ranks the facts and the problem of this one, and wait for theirs.

        Args:
            facts: what must be equal on all ranks, by a name for messages; the first that differs is named.
            problem: why this rank cannot go on; None if it can.
            timeout: seconds to wait for each rank.

        Raises:
            PolicyError: a rank has a problem.
            MismatchError: facts differ, or a rank did not say anything in time.
        """
        self.publish({self._rank: {"facts": list(facts.items()), "problem": problem}})
        self.compare(timeout)

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
