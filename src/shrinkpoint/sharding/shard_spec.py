"""Shards of tensors on several ranks, and the all-gather with which ranks share what they know of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shrinkpoint import errors
from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, Lattice, matrix_shape, scale_counts
from shrinkpoint.errors import PolicyError, ShrinkpointError, StateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
AllGather = Callable[[Any], list[Any]]
"""What every rank says, in rank order, on every rank; an exception that one of them says is raised by all."""


@dataclass(frozen=True)
class ShardSpec:
    """Where a tensor of one rank lies: a box in a tensor of all ranks.

    Attributes:
        global_name: the name of the whole tensor, on every rank the same.
        global_shape: of the whole tensor.
        offsets: where this box begins in it; one number for each axis.
    """

    global_name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def global_numel(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.global_shape)

    @property
    def first_row(self) -> int:
        """Of the whole tensor, seen as a matrix; a vector is one row."""
        return self.offsets[0] if matrix_shape(self.global_shape)[0] > 1 else 0

    def columns(self, sizes: tuple[int, ...]) -> slice | Tensor:
        """Which of the whole matrix's columns a box of these sizes has."""
        if len(self.global_shape) < 2 or sizes[1:] == self.global_shape[1:]:
            start = 0 if len(self.global_shape) != 1 else self.offsets[0]
            return slice(start, start + matrix_shape(sizes)[1])
        places = torch.arange(math.prod(self.global_shape[1:])).reshape(self.global_shape[1:])
        for axis, (start, size) in enumerate(zip(self.offsets[1:], sizes[1:], strict=True)):
            places = places.narrow(axis, start, size)
        return places.reshape(-1)

    def slice_lattice(self, lattice: Lattice, sizes: tuple[int, ...]) -> Lattice:
        """The part of a whole tensor's lattice that a box of these sizes has.

        A box of one row has one column for all its places, as files have it: then its step is the geometric mean.
        """
        wanted, rows, columns = scale_counts(lattice.spacing, sizes), lattice.rows, lattice.columns
        if rows.numel() > 1:
            rows = rows[self.offsets[0] : self.offsets[0] + sizes[0]]
        if columns.numel() > 1:
            columns = columns[self.columns(sizes)]
        if columns.numel() > 1 and wanted[1] == 1:
            mean = round(float(columns.to(torch.float64).mean()))
            rows = (rows + mean).clamp(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT).to(torch.int16)
            columns = torch.zeros(1, dtype=torch.int16)
        return replace(lattice, rows=rows.contiguous(), columns=columns.contiguous())

    def dither_seed(self, global_seed: int, sizes: tuple[int, ...]) -> int:
        """Of the box's dither, from that of the whole tensor: the same dither, where the box is whole rows.

        A place's dither is a hash of its number times a constant, plus the seed: so numbers that begin later are a
        larger seed. Other boxes have numbers of their own, and dither that is as good.
        """
        if not global_seed:
            return 0
        strides = [math.prod(self.global_shape[axis + 1 :]) for axis in range(len(self.global_shape))]
        first = sum(start * stride for start, stride in zip(self.offsets, strides, strict=True))
        return (global_seed + first * _INDEX_MULTIPLIER) % (1 << 32) or 1

    def check(self, name: str, sizes: tuple[int, ...]) -> None:
        """Raises `StateError` where a box of these sizes is not within the whole."""
        fits = len(self.global_shape) == len(self.offsets) == len(sizes)
        if not fits or any(
            start < 0 or start + size > whole
            for start, size, whole in zip(self.offsets, sizes, self.global_shape, strict=True)
        ):
            found = f"{list(sizes)} at {list(self.offsets)} of {self.global_name!r}, which is {list(self.global_shape)}"
            raise StateError(name, found=found, expected="a box within the whole tensor", do="say where it begins")


_INDEX_MULTIPLIER = 0x9E3779B1  # of `codec.lattice.dither`


@dataclass(frozen=True)
class ShardLayout:
    """What a rank has of the tensors of all ranks that write a checkpoint together.

    Attributes:
        specs: by name of a tensor in the rank's state; what is missing here is a whole tensor, on this rank alone.
        all_gather: a collective of all these ranks: see `make_all_gather`.
    """

    specs: Mapping[str, ShardSpec] = field(repr=False)
    all_gather: AllGather = field(repr=False)


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
