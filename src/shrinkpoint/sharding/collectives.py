"""Collectives of ranks: objects from each to each, reductions by key, and errors of one rank that all raise.

Every rank receives about as many bytes as the reduced result has, however many ranks there are: each key, and each
stripe of a long array, is reduced by one rank, which sends the result to all. It merges in the order of the ranks,
numbers in float64 or int64, so that all ranks have the same bits."""

from __future__ import annotations

import contextlib
import math
import pickle
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shrinkpoint import errors
from shrinkpoint.errors import PolicyError, ShrinkpointError, error_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
R = TypeVar("R")
Key = TypeVar("Key", int, str)
Array: TypeAlias = npt.NDArray[Any]
AllGather = Callable[[Any], list[Any]]
"""Returns the objects of all ranks, in rank order; an exception in place of an object is raised by all ranks."""
CELL_BITS = 40  # Bits of a cell's index; the bits above are the key of the array that it is in
_INDEX_MASK = (1 << CELL_BITS) - 1
_PICKLE_PROTOCOL = 3  # Later protocols frame even the smallest messages
_OWNER_STRIDE = 29
_STRIPE = 64  # Consecutive cells of an array that the same rank reduces
_IDENTITY: dict[np.ufunc, float] = {np.add: 0, np.minimum: np.inf, np.maximum: -np.inf}
_Packed: TypeAlias = tuple[str, bytes]  # The dtype and the bytes of an array
_PackedCells: TypeAlias = tuple[_Packed, ...]
"""The starts and the lengths of runs of consecutive cells, and columns of numbers."""


class ArrayReduction(Protocol[R]):
    """Merge operation for arrays of one kind.

    Attributes:
        reductions: `np.add`, `np.minimum` or `np.maximum` for each column of numbers that an array has.
    """

    @property
    def reductions(self) -> Sequence[np.ufunc]: ...

    def merge(self, arrays: list[R]) -> R:
        """Merge arrays of this process; a single one is returned untouched."""
        ...

    def to_cells(self, array: R) -> tuple[Array, list[Array]]:
        """The indices of the cells of an array that are not empty, int64 below 2^40, and their columns."""
        ...

    def from_cells(self, indices: Array, columns: list[Array]) -> R:
        """The array with these cells, in ascending order; columns are float64 or int64."""
        ...


class Collectives(ABC):
    """Collectives of the ranks that write a checkpoint together; all of them call the same ones in the same order."""

    # `rank`, `world_size`: of this process, and of all.
    rank: int
    world_size: int

    def __init__(self) -> None:
        self._has_failed = False
        self._num_exchanges = 0  # the same on all ranks

    @abstractmethod
    def exchange(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        """Send the r-th message to rank r, and return the messages that ranks sent here, in rank order."""

    def all_to_all(self, objects: Sequence[T]) -> list[T]:
        """Send the r-th object to rank r, and return the objects that ranks sent here, in rank order.

        Raises:
            ShrinkpointError: a rank sent an error.
        """
        return self._exchange([_to_message(obj) for obj in objects])

    def all_gather(self, obj: T) -> list[T]:
        """Return the objects of all ranks, in rank order: for what is small, since each rank receives all of them.

        Args:
            obj: an exception is raised by all ranks.
        """
        return self._exchange([_to_message(pack_error(obj))] * self.world_size)

    def value_if_equal(self, obj: T) -> T | None:
        """The object that all ranks have; None if they differ."""
        first, *rest = self.all_gather(obj)
        return first if all(other == first for other in rest) else None

    def max_over_ranks(self, number: int | None) -> int | None:
        """The largest number that a rank has; None if none has any."""
        return max((other for other in self.all_gather(number) if other is not None), default=None)

    def sum_over_ranks(self, *numbers: float) -> tuple[float, ...]:
        """The sum of each number over ranks."""
        return tuple(map(math.fsum, zip(*self.all_gather(numbers), strict=True)))

    def owner(self, key: int | str) -> int:
        """The rank that merges the reports of a key; it is another one in each reduction, which spreads the bytes."""
        number = key if isinstance(key, int) else zlib.crc32(key.encode())
        return (number + _OWNER_STRIDE * self._num_exchanges) % self.world_size

    def reduce(self, reports: Iterable[tuple[Key, T]], merge: Callable[[list[T]], R]) -> dict[Key, R]:
        """Merge the reports of each key, on one rank for all, and return the results on every rank.

        Args:
            reports: keys with the reports of this rank; a key may occur more than once.
            merge: merges the reports of one key, which are in the order of ranks, and of `reports` within a rank.

        Returns:
            The results in the order in which ranks report their keys first.
        """
        outgoing: list[list[tuple[int, Key, T]]] = [[] for _ in range(self.world_size)]
        for position, (key, report) in enumerate(reports):
            outgoing[self.owner(key)].append((position, key, report))
        first: dict[Key, tuple[int, int]] = {}
        received: dict[Key, list[T]] = {}
        for rank, items in enumerate(self.all_to_all([items or None for items in outgoing])):
            for position, key, report in items or ():
                first.setdefault(key, (rank, position))
                received.setdefault(key, []).append(report)
        merged = [(first[key], key, merge(parts)) for key, parts in received.items()]
        gathered = filter(None, self.all_gather(merged or None))
        in_order = sorted(chain.from_iterable(gathered), key=lambda item: item[0])
        return {key: result for _, key, result in in_order}

    def count_keys(self, keys: Iterable[Key]) -> Mapping[Key, int]:
        """Count how often ranks report each key."""
        return self.reduce(((key, None) for key in keys), len)

    def reduce_arrays(self, reports: Mapping[int, list[R]], kind: ArrayReduction[R]) -> dict[int, R]:
        """Merge arrays cell by cell, by their keys; the result is that of `kind.merge`, in no particular order.

        Args:
            reports: by key, the arrays of this rank.
        """
        parts = [(key, *kind.to_cells(array)) for key, arrays in reports.items() for array in arrays]
        cells = np.concatenate([np.empty(0, np.int64), *(indices + (key << CELL_BITS) for key, indices, _ in parts)])
        columns = [np.concatenate(parts) for parts in zip(*(columns for *_, columns in parts), strict=True)]
        cells, columns = self.reduce_cells(cells, columns, kind.reductions)
        return {
            key: kind.from_cells(indices, [column[where] for column in columns])
            for key, indices, where in split_cells(cells)
        }

    def reduce_cells(
        self, cells: Array, columns: Sequence[Array], reductions: Sequence[np.ufunc]
    ) -> tuple[Array, list[Array]]:
        """Reduce numbers by cell, and return the cells that any rank has in ascending order, and their numbers.

        Args:
            cells: int64 [n], not negative: `key << CELL_BITS | index`; may contain a cell more than once.
            columns: numbers [n], in any dtype; none if this rank has no cell. They are reduced in float64 or int64.
            reductions: how to reduce each column: `np.add`, `np.minimum` or `np.maximum`.
        """
        owners = ((cells & _INDEX_MASK) // _STRIPE + (cells >> CELL_BITS)) % self.world_size
        selections = [owners == rank for rank in range(self.world_size)]
        outgoing = [_pack_cells(cells[mine], [column[mine] for column in columns]) for mine in selections]
        reduced = _reduce_in_order(self.all_to_all(outgoing), reductions)
        gathered = [_unpack_cells(part) for part in self.all_gather(_pack_cells(*reduced)) if part is not None]
        if not gathered:
            return reduced
        all_cells = np.concatenate([cells for cells, _ in gathered])
        order = np.argsort(all_cells)
        all_columns = zip(*(columns for _, columns in gathered), strict=True)
        return all_cells[order], [np.concatenate(parts)[order] for parts in all_columns]

    def run_all_or_raise(self, compute: Callable[[], T]) -> T:
        """Run a function that calls collectives, on all ranks at the same time; if it raises on one rank, all raise.

        Raises:
            Exception: whatever `compute` raises; what another rank raised, as an error of this library.
        """
        self._has_failed = False
        try:
            result = compute()
            self.all_gather(None)  # no rank continues before all are done
        except Exception as error:
            if not self._has_failed:  # the other ranks get the error in the collective that they call next
                with contextlib.suppress(ShrinkpointError):
                    self.all_gather(error)
            raise
        return result

    def _exchange(self, messages: Sequence[bytes]) -> list[Any]:
        self._num_exchanges += 1
        try:
            return raise_remote([pickle.loads(data) if data else None for data in self.exchange(messages)])
        except BaseException:
            self._has_failed = True
            raise


class LocalCollectives(Collectives):
    """The collectives of a single process: nothing is copied, and arrays stay where they are."""

    rank, world_size = 0, 1

    def exchange(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        return messages

    def all_to_all(self, objects: Sequence[T]) -> list[T]:
        return [*objects]

    def all_gather(self, obj: T) -> list[T]:
        return raise_remote([pack_error(obj)])

    def reduce(self, reports: Iterable[tuple[Key, T]], merge: Callable[[list[T]], R]) -> dict[Key, R]:
        received: dict[Key, list[T]] = {}
        for key, report in reports:
            received.setdefault(key, []).append(report)
        return {key: merge(parts) for key, parts in received.items()}

    def count_keys(self, keys: Iterable[Key]) -> Mapping[Key, int]:
        return Counter(keys)

    def reduce_arrays(self, reports: Mapping[int, list[R]], kind: ArrayReduction[R]) -> dict[int, R]:
        return {key: kind.merge(arrays) for key, arrays in reports.items()}


class GroupCollectives(Collectives):
    """The collectives of a process group, on its device; of nccl, that is the current one.

    Args:
        group: None: the default group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        super().__init__()
        self._group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        devices = [backend.partition(":")[0] for backend in dist.get_backend_config(group).split(",")]
        self._device = "cpu" if "cpu" in devices else devices[0]

    def exchange(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        import torch
        from torch.distributed import all_to_all_single

        others = [b"" if rank == self.rank else message for rank, message in enumerate(messages)]
        sizes = torch.tensor([len(message) for message in others], device=self._device)
        received_sizes = torch.empty_like(sizes)
        all_to_all_single(received_sizes, sizes, group=self._group)
        lengths = received_sizes.tolist()
        data = torch.from_numpy(np.frombuffer(bytearray(b"".join(others)), np.uint8)).to(self._device)
        received = torch.empty(sum(lengths), dtype=torch.uint8, device=self._device)
        all_to_all_single(received, data, lengths, sizes.tolist(), group=self._group)
        parts = [part.cpu().numpy().tobytes() for part in torch.split(received, lengths)]
        return [messages[self.rank] if rank == self.rank else part for rank, part in enumerate(parts)]


def make_collectives(group: ProcessGroup | None = None) -> Collectives:
    """The collectives of a process group.

    Args:
        group: None: the default group; without a default group, this process alone.
    """
    import torch.distributed as dist

    return GroupCollectives(group) if dist.is_available() and dist.is_initialized() else LocalCollectives()


def gather_or_raise(
    compute: Callable[[], T],
    group: ProcessGroup | None = None,
    *,
    describe_error: Callable[[Exception], Exception] = lambda error: error,
) -> list[T]:
    """Call a function on every rank, and return the results of all; if one fails, all raise the first error by rank.

    Args:
        compute: returns something small that can be pickled.
        group: None: the default group, or this process alone if there is none or it has no other process.
        describe_error: turns what `compute` raised into the error that is sent to the other ranks.

    Raises:
        ShrinkpointError: of the class that was raised; PolicyError if that was not one of this library's.
        Exception: whatever `compute` raises, if this process is alone.
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
        return make_collectives(group).all_gather(result)
    except ShrinkpointError as remote_error:
        raise remote_error from cause


@dataclass(frozen=True)
class RemoteError:
    """An error as text, because not every exception survives pickling."""

    kind: str  # the name of its class in `errors`
    where: str
    found: str
    expected: str
    do: str


def pack_error(obj: Any) -> Any:
    """The object itself, or an exception as a `RemoteError`."""
    if isinstance(obj, ShrinkpointError):
        return RemoteError(type(obj).__name__, obj.where, obj.found, obj.expected, obj.do)
    if isinstance(obj, BaseException):
        return RemoteError(PolicyError.__name__, "", error_text(obj), "", "see the traceback of that rank")
    return obj


def raise_remote(objects: list[Any]) -> list[Any]:
    """Return the objects of all ranks.

    Raises:
        ShrinkpointError: one of them is a `RemoteError`; the first one is raised.
    """
    for rank, error in enumerate(objects):
        if isinstance(error, RemoteError):
            kind: type[ShrinkpointError] = getattr(errors, error.kind, PolicyError)
            where = f"rank {rank}: {error.where}" if error.where else f"rank {rank}"
            raise kind(where, found=error.found, expected=error.expected, do=error.do)
    return objects


def _to_message(obj: Any) -> bytes:
    return b"" if obj is None else pickle.dumps(obj, _PICKLE_PROTOCOL)


def split_cells(cells: Array) -> Iterator[tuple[int, Array, slice]]:
    """Key, indices and place of each array in cells in ascending order."""
    keys, starts = np.unique(cells >> CELL_BITS, return_index=True)
    ends = np.append(starts, cells.size)[1:]
    for key, start, end in zip(keys.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield key, cells[start:end] & _INDEX_MASK, slice(start, end)


def _pack_cells(cells: Array, columns: Sequence[Array]) -> _PackedCells | None:
    """Cells and their numbers in few bytes, counts in the narrowest dtype; None if there are no cells."""
    if not cells.size:
        return None
    starts = np.flatnonzero(np.diff(cells, prepend=-2) != 1)
    lengths = np.diff(starts, append=cells.size)
    return tuple(map(_pack, (cells[starts], lengths, *columns)))


def _pack(array: Array) -> _Packed:
    """The dtype and the bytes of an array; of integers that are not negative, in the narrowest dtype."""
    if array.dtype.kind == "i" and array.min() >= 0:
        array = array.astype(np.min_scalar_type(array.max()))
    return array.dtype.str[1:], array.tobytes()


def _unpack_cells(packed: _PackedCells) -> tuple[Array, list[Array]]:
    """Cells and their numbers, in int64 or float64."""
    arrays = [np.frombuffer(data, dtype) for dtype, data in packed]
    starts, lengths = (array.astype(np.int64) for array in arrays[:2])
    cells = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    return cells, [array.astype(np.float64 if array.dtype.kind == "f" else np.int64) for array in arrays[2:]]


def _reduce_in_order(
    packed: Sequence[_PackedCells | None], reductions: Sequence[np.ufunc]
) -> tuple[Array, list[Array]]:
    """The cells that any part has, and their numbers reduced in the order of the parts, in float64 or int64."""
    parts = [_unpack_cells(part) for part in packed if part is not None]
    if not parts:
        return np.empty(0, np.int64), [np.empty(0) for _ in reductions]
    cells = np.unique(np.concatenate([indices for indices, _ in parts]))
    dtypes = [column.dtype for column in parts[0][1]]
    reduced = [np.full(cells.size, _IDENTITY[r], dtype) for r, dtype in zip(reductions, dtypes, strict=True)]
    for indices, columns in parts:
        positions = np.searchsorted(cells, indices)
        for reduction, result, column in zip(reductions, reduced, columns, strict=True):
            reduction.at(result, positions, column)
    return cells, reduced
