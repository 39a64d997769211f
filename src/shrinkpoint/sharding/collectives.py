"""Collectives of ranks: they gather small picklable objects, and an error of one rank is raised by all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shrinkpoint import errors
from shrinkpoint.errors import PolicyError, ShrinkpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
AllGather = Callable[[Any], list[Any]]
"""What every rank says, in rank order, on every rank; an exception that one of them says is raised by all."""


def make_all_gather(group: ProcessGroup | None = None) -> AllGather:
    """An all-gather of small picklable objects; an exception in place of one is raised on every rank.

    Args:
        group: None: the default one; without a process group, this process alone.
    """
    import torch.distributed as dist

    def gather(thing: Any) -> list[Any]:
        if not (dist.is_available() and dist.is_initialized()):
            return gather_single(thing)
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, pack_error(thing), group=group)
        return raise_remote(answers)

    return gather


def gather_or_raise(
    compute: Callable[[], T],
    group: ProcessGroup | None = None,
    *,
    describe_error: Callable[[Exception], Exception] = lambda error: error,
) -> list[T]:
    """What each process computed, by rank; if one fails, all raise what the first of them by rank raised.

    Args:
        compute: its result is small and can be pickled.
        group: None: the default one, or this process alone if there is none or it has no other process.
        describe_error: makes of what `compute` raised what other ranks are told.

    Raises:
        ShrinkpointError: of the class that was raised; PolicyError if that was not one of this library's.
        whatever `compute` raises, if this process is alone.
    """
    import torch.distributed as dist

    if group is None and (not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1):
        return [compute()]
    result: Any
    cause: Exception | None = None
    try:
        result = compute()
    except Exception as error:
        result, cause = describe_error(error), error
    try:
        return make_all_gather(group)(result)
    except ShrinkpointError as remote_error:
        raise remote_error from cause


def gather_single(obj: Any) -> list[Any]:
    """The all-gather of a single process: its own object; an exception is raised as on several ranks."""
    return raise_remote([pack_error(obj)])


class ErrorGather:
    """A gather with which an error of one rank, wherever it happens, is raised by all."""

    def __init__(self, all_gather: AllGather) -> None:
        self._all_gather, self._is_reported = all_gather, False

    def __call__(self, obj: Any) -> list[Any]:
        try:
            return raise_remote(self._all_gather(pack_error(obj)))
        except BaseException:
            self._is_reported = True
            raise

    def run_all_or_raise(self, compute: Callable[[], T]) -> T:
        """What this rank computes, while the others do so, too; where one of them fails, all do.

        Raises:
            whatever `compute` raises; what another rank raised, as one of this library's errors.
        """
        try:
            out = compute()
            self(None)  # no rank continues before all are done
        except Exception as error:
            if not self._is_reported:  # the others will learn of it where they gather next
                with contextlib.suppress(ShrinkpointError):
                    self(error)
            raise
        return out


@dataclass(frozen=True)
class RemoteError:
    """An error as text, for not every exception survives pickling.

    Attributes:
        kind: its class, where it is one of this library's.
    """

    kind: str
    where: str
    found: str
    expected: str
    do: str


def pack_error(obj: Any) -> Any:
    """What is sent of something; of an exception, its text."""
    if isinstance(obj, ShrinkpointError):
        return RemoteError(type(obj).__name__, obj.where, obj.found, obj.expected, obj.do)
    if isinstance(obj, BaseException):
        return RemoteError(
            PolicyError.__name__, "", f"{type(obj).__name__}: {obj}", "", "see the traceback of that rank"
        )
    return obj


def raise_remote(answers: list[Any]) -> list[Any]:
    """What all ranks said.

    Raises:
        ShrinkpointError: the first of them that is an error.
    """
    for rank, told in enumerate(answers):
        if isinstance(told, RemoteError):
            kind: type[ShrinkpointError] = getattr(errors, told.kind, PolicyError)
            where = f"rank {rank}: {told.where}" if told.where else f"rank {rank}"
            raise kind(where, found=told.found, expected=told.expected, do=told.do)
    return answers
