"""Parts of tensors on several ranks, and how these ranks come to know what they have together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shrinkpoint import errors
from shrinkpoint.codec.lattice import MOST_EXPONENT, Lattice, sides, spans
from shrinkpoint.errors import PolicyError, ShrinkpointError, StateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""What every rank says, in rank order, on every rank; an exception that one of them says is raised by all."""


@dataclass(frozen=True)
class Shard:
    """Where a tensor of one rank lies: a box in a tensor of all ranks.

    Attributes:
        whole: the name of the whole tensor, on every rank the same.
        shape: of the whole tensor.
        offsets: where this box begins in it; one number for each axis.
    """

    whole: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def first_row(self) -> int:
        """Of the whole tensor, seen as a matrix; a vector is one row."""
        return self.offsets[0] if sides(self.shape)[0] > 1 else 0

    def columns(self, sizes: tuple[int, ...]) -> slice | Tensor:
        """Which of the whole matrix's columns a box of these sizes has."""
        if len(self.shape) < 2 or sizes[1:] == self.shape[1:]:
            start = 0 if len(self.shape) != 1 else self.offsets[0]
            return slice(start, start + sides(sizes)[1])
        places = torch.arange(math.prod(self.shape[1:])).reshape(self.shape[1:])
        for axis, (start, size) in enumerate(zip(self.offsets[1:], sizes[1:], strict=True)):
            places = places.narrow(axis, start, size)
        return places.reshape(-1)

    def cut(self, lattice: Lattice, sizes: tuple[int, ...]) -> Lattice:
        """The part of a whole tensor's lattice that a box of these sizes has.

        A box of one row has one column for all its places, as files have it: then its step is the geometric mean.
        """
        wanted, rows, columns = spans(lattice.law, sizes), lattice.rows, lattice.columns
        if rows.numel() > 1:
            rows = rows[self.offsets[0] : self.offsets[0] + sizes[0]]
        if columns.numel() > 1:
            columns = columns[self.columns(sizes)]
        if columns.numel() > 1 and wanted[1] == 1:
            mean = round(float(columns.to(torch.float64).mean()))
            rows = (rows + mean).clamp(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int16)
            columns = torch.zeros(1, dtype=torch.int16)
        return replace(lattice, rows=rows.contiguous(), columns=columns.contiguous())

    def seed(self, number: int, sizes: tuple[int, ...]) -> int:
        """Of the box's dither, from that of the whole tensor: the same dither, where the box is whole rows.

        A place's dither is a hash of its number times a constant, plus the seed: so numbers that begin later are a
        larger seed. Other boxes have numbers of their own, and dither that is as good.
        """
        if not number:
            return 0
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        first = sum(start * stride for start, stride in zip(self.offsets, strides, strict=True))
        return (number + first * _PLACE) % (1 << 32) or 1

    def check(self, name: str, sizes: tuple[int, ...]) -> None:
        """Raises `StateError` where a box of these sizes is not within the whole."""
        fits = len(self.shape) == len(self.offsets) == len(sizes)
        if not fits or any(
            start < 0 or start + size > whole
            for start, size, whole in zip(self.offsets, sizes, self.shape, strict=True)
        ):
            found = f"{list(sizes)} at {list(self.offsets)} of {self.whole!r}, which is {list(self.shape)}"
            raise StateError(name, found=found, expected="a box within the whole tensor", do="say where it begins")


_PLACE = 0x9E3779B1  # of `codec.lattice.dither`


@dataclass(frozen=True)
class Shards:
    """What a rank has of the tensors of all ranks that write a checkpoint together.

    Attributes:
        places: by name of a tensor in the rank's state; what is missing here is a whole tensor, on this rank alone.
        gather: a collective of all these ranks: see `gathering`.
    """

    places: Mapping[str, Shard] = field(repr=False)
    gather: Gather = field(repr=False)


def gathering(group: ProcessGroup | None = None) -> Gather:
    """An all-gather of small picklable objects; an exception in place of one is raised on every rank.

    Args:
        group: None: the default one; without a process group, this process alone.
    """
    import torch.distributed as dist

    def gather(thing: Any) -> list[Any]:
        if not (dist.is_available() and dist.is_initialized()):
            return raised([said(thing)])
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, said(thing), group=group)
        return raised(answers)

    return gather


class Link:
    """A gather with which an error of one rank, wherever it happens, is raised by all."""

    def __init__(self, gather: Gather) -> None:
        self._gather, self._known = gather, False

    def __call__(self, thing: Any) -> list[Any]:
        try:
            return raised(self._gather(said(thing)))
        except BaseException:
            self._known = True
            raise

    def together(self, compute: Callable[[], T]) -> T:
        """What this rank computes, while the others do so, too; where one of them fails, all do.

        Raises:
            whatever `compute` raises; what another rank raised, as one of this library's errors.
        """
        try:
            out = compute()
            self(None)  # nobody goes on before all are done
        except Exception as error:
            if not self._known:  # the others will learn of it where they gather next
                with contextlib.suppress(ShrinkpointError):
                    self(error)
            raise
        return out


@dataclass(frozen=True)
class _Told:
    """An error as text, for not every exception survives pickling.

    Attributes:
        kind: its class, where it is one of this library's.
    """

    kind: str
    where: str
    found: str
    expected: str
    do: str


def said(thing: Any) -> Any:
    """What is sent of something; of an exception, its text."""
    if isinstance(thing, ShrinkpointError):
        return _Told(type(thing).__name__, thing.where, thing.found, thing.expected, thing.do)
    if isinstance(thing, BaseException):
        return _Told(PolicyError.__name__, "", f"{type(thing).__name__}: {thing}", "", "see the traceback of that rank")
    return thing


def raised(answers: list[Any]) -> list[Any]:
    """What all ranks said.

    Raises:
        ShrinkpointError: the first of them that is an error.
    """
    for rank, told in enumerate(answers):
        if isinstance(told, _Told):
            kind: type[ShrinkpointError] = getattr(errors, told.kind, PolicyError)
            where = f"rank {rank}: {told.where}" if told.where else f"rank {rank}"
            raise kind(where, found=told.found, expected=told.expected, do=told.do)
    return answers
