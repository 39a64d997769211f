"""Ranks that publish or follow one sharded model together: what fails on one of them fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shrinkpoint.errors import MembershipError, PolicyError, ShrinkpointError
from shrinkpoint.sharding.collectives import gather_or_raise

T = TypeVar("T")


def check_group(argument: str, group: object) -> None:
    """Raise a PolicyError unless an argument is a process group that this process belongs to."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        expected, do = "a process group that this process belongs to", "pass what torch.distributed.new_group returned"
        raise PolicyError(argument, found=f"{type(group).__name__}", expected=expected, do=do)


class Ranks:
    """The ranks of a process group, or this process alone.

    Args:
        group: None: this process alone.

    Attributes:
        is_sharded: True if there is a group, even of one rank.
        rank, count: of this process, and of all.

    Raises:
        PolicyError: it is no process group, or this process does not belong to it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            check_group("ranks", group)
        self._group, self.is_sharded = group, group is not None
        self.rank, self.count = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the results of all, by rank.

        Raises:
            ShrinkpointError: the first error by rank, on every rank.
            MembershipError: a rank has died, or did not answer in time.
            KeyboardInterrupt: on the rank that was interrupted; the others raise a PolicyError.
        """
        if self._group is None:
            return [compute()]
        interrupts: list[BaseException] = []

        def call() -> T:
            try:
                return compute()
            except Exception:
                raise
            except BaseException as interrupt:
                interrupts.append(interrupt)
                found, do = f"{type(interrupt).__name__}", "call the method again on all ranks"
                raise PolicyError("update", found=found, expected="no interrupt", do=do) from None

        try:
            return gather_or_raise(call, self._group)
        except ShrinkpointError:
            if interrupts:
                raise interrupts[0] from None
            raise
        except RuntimeError as error:  # of torch.distributed
            found, expected = f"a rank that is gone ({str(error)[:200]})", f"all {self.count} ranks"
            raise MembershipError("ranks", found=found, expected=expected, do="start all ranks again") from error

    def run(self, compute: Callable[[], T]) -> T:
        """Call a function on every rank, and return this rank's result; raises as `gather` does."""
        results: list[T] = []
        self.gather(lambda: results.append(compute()))
        return results[0]

    def from_first(self, compute: Callable[[], T]) -> T:
        """Call a function on the first rank, and return its result on every rank; raises as `gather` does."""
        results = self.gather(lambda: [compute()] if self.rank == 0 else [])
        return results[0][0]
