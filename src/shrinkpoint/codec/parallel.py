"""Decodes records and maps tensors on several threads; records that do not depend on each other run concurrently."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from shrinkpoint.codec.coder import default_threads
from shrinkpoint.codec.recipe import CodedRecipe, Recipe, RecipeParser, ordinals
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import DecodedTensors, QuantizedTensor, Reference, as_decoded
from shrinkpoint.device.reads import Reads, finish, finish_together
from shrinkpoint.tensors.info import JSON, EncodedRecord, TensorInfo
from shrinkpoint.tensors.memory import Arena
from shrinkpoint.threads import submit_or_run

T = TypeVar("T")

_has_forked = False


def _mark_fork() -> None:
    global _has_forked
    _has_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_fork)


def thread_pool(workers: int) -> ThreadPoolExecutor:
    """Return a pool whose threads may call torch, in a forked process, too.

    After a fork torch replaces its own pool as soon as a new thread calls it. Where two do so at once, one of them
    finds no pool and fails ("Invalid thread pool!"): so this thread goes before them.
    """
    global _has_forked
    if _has_forked:
        torch.set_num_threads(torch.get_num_threads())
        _has_forked = False
    return ThreadPoolExecutor(workers)


MIN_PARALLEL_BYTES = 1 << 22  # Bytes from which a single record may be coded by several threads
MIN_SHARED_BYTES = 1 << 19
"""Mean bytes of records from which threads share them: Python takes longer over a smaller one than the native core,
and threads that wait for each other's Python are slower than one thread."""
MIN_SHARED_DECODING = 1 << 21  # The same of records to decode, which takes the native core less time than coding
MAX_AHEAD_BYTES = 1 << 25
"""Bytes of records that `map_ordered` begins behind the first unfinished one; more only to occupy all threads."""


def share_out(sizes: Sequence[int], workers: int, least: int = MIN_SHARED_BYTES) -> tuple[bool, list[int]]:
    """Return how `workers` threads take several records, which are begun one after the other.

    Args:
        least: mean bytes of records from which they are shared.

    Returns:
        Whether the threads share the records; otherwise the caller takes them all. And the number of threads for each
        record: shared ones are coded beside each other, each by one thread, which wastes none; a record gets all
        threads if those behind it are too few to occupy the other workers meanwhile.
    """
    if workers == 1 or len(sizes) < 2 or sum(sizes) < least * len(sizes):
        return False, [workers if size >= MIN_PARALLEL_BYTES else 1 for size in sizes]
    counts, rest = [], sum(sizes)
    for size in sizes:
        rest -= size
        is_alone = size >= MIN_PARALLEL_BYTES and min(rest, MAX_AHEAD_BYTES) < size * (workers - 1)
        counts.append(workers if is_alone else 1)
    return True, counts


def map_ordered(function: Callable[[int, int], T], sizes: Sequence[int], workers: int) -> Iterator[T]:
    """Yield `function(index, threads)` of every record in order; what has not begun is cancelled on an error.

    Args:
        function: called in other threads if there are several workers, and enough for them to do.
        sizes: bytes of each record. Behind the first that is under way, `workers` more are begun, or as many as have
            `MAX_AHEAD_BYTES`: results wait in memory.
    """
    is_shared, counts = share_out(sizes, workers)
    if not is_shared:
        yield from map(function, range(len(sizes)), counts)
        return
    starts = [0, *accumulate(sizes)]
    futures: dict[int, Future[T]] = {}
    with thread_pool(workers) as executor:

        def begin_behind(first: int) -> None:
            """Begin what may be under way while record `first` is."""
            index = first + len(futures)
            while index < len(sizes) and (
                index <= first + workers or starts[index + 1] - starts[first + 1] <= MAX_AHEAD_BYTES
            ):
                futures[index] = submit_or_run(executor, function, index, counts[index])
                index += 1

        try:
            begin_behind(0)
            for index in range(len(sizes)):
                result = futures.pop(index).result()
                begin_behind(index + 1)  # so that threads are busy while the caller uses the result
                yield result
                del result
        finally:
            for future in futures.values():
                future.cancel()


def decode_all(
    recipes: Sequence[tuple[JSON, int, int]],
    read: Callable[[int], EncodedRecord],
    reference: Reference | None,
    *,
    where: str = "file",
    threads: int | None = None,
    needed: Collection[int] | None = None,
    skip: Callable[[int], Sequence[TensorInfo]] | None = None,
    with_values: bool = True,
    trust_base: bool = False,
    overwrite: bool = False,
) -> Reference:
    """Decode all records of a file: its tensors by name, in the order of the records, and their quantized forms.

    Args:
        recipes: (recipe, number of tensors, bytes of its tensors) of every record.
        read: returns the record of an index; called from several threads.
        reference: the decoded parent, if the file is a delta.
        where: the file, for messages.
        threads: number of threads; None: one per core.
        needed: indices of the records to decode; None: all.
        skip: called instead with the index of every other record; returns its tensors.
        with_values: False: of what is on lattices decode the codes alone.
        trust_base: the parent was decoded from the files of this chain: its tensors are not compared with digests, as
            this file's values are.
        overwrite: the parent was decoded for this file alone. So its tensors are overwritten where that is possible,
            and must not be used again; they are trusted, too.

    Raises:
        FormatError: the bytes are damaged.
        ChainError: the parent is missing or another one.
    """
    decoded, quantized = DecodedTensors(), dict[str, QuantizedTensor]()
    workers, arena, code_arena = default_threads(threads), Arena(), Arena()
    parser, counts = RecipeParser(), [tensors for _, tensors, _ in recipes]
    parsed = [parser.parse_valid(recipe, tensors) for recipe, tensors, _ in recipes]
    later_moments = _later_moments(parsed, counts) if overwrite else set()
    sources = set() if reference is None else as_decoded(reference.tensors).needed_names()

    def decode_record(index: int, native_threads: int) -> Reference | Sequence[TensorInfo]:
        if needed is not None and skip is not None and index not in needed:
            return skip(index)
        encoded = read(index)
        is_read_later = index in later_moments or any(info.name in sources for info in encoded.infos)
        return decode(
            encoded,
            decoded,
            reference,
            quantized=quantized,
            where=where,
            recipe=parsed[index],
            allocate=arena.allocate,
            allocate_codes=code_arena.allocate,
            threads=native_threads,
            with_values=with_values,
            overwrite_base=overwrite and not is_read_later,
            trust_base=overwrite or trust_base,
        )

    with thread_pool(workers) as pool:
        for indices in _independent_ranges(parsed, counts):
            # The list is complete before anything is added, because the workers read `decoded`.
            sizes = [recipes[index][2] for index in indices]
            for result in _map_largest_first(pool, decode_record, indices, sizes, workers):
                if isinstance(result, Reference):
                    decoded.add(result.tensors)
                    quantized.update(result.quantized)
                else:
                    decoded.skip(info.name for info in result)
    return Reference(decoded, quantized)


def _map_largest_first(
    pool: ThreadPoolExecutor,
    decode_record: Callable[[int, int], T],
    indices: Sequence[int],
    sizes: Sequence[int],
    workers: int,
) -> Iterable[T]:
    """The records in order; the largest is begun first, so that all threads end at about the same time.

    Records that have not been started are cancelled when one fails.
    """
    order = sorted(range(len(indices)), key=lambda position: -sizes[position])
    is_shared, counts = share_out([sizes[position] for position in order], workers, MIN_SHARED_DECODING)
    threads = dict(zip(order, counts, strict=True))
    if not is_shared:
        return (decode_record(index, threads[position]) for position, index in enumerate(indices))
    futures: dict[int, Future[T]] = {}
    try:
        for position in order:
            futures[position] = submit_or_run(pool, decode_record, indices[position], threads[position])
        return [futures[position].result() for position in range(len(indices))]
    finally:
        for future in futures.values():
            future.cancel()


def _later_moments(recipes: Sequence[Recipe | None], counts: Sequence[int]) -> set[int]:
    """The records whose tensors of the parent are read again by a later record: first moments under second ones."""
    starts = [*accumulate(counts, initial=0)]
    out: set[int] = set()
    for recipe in recipes:
        if isinstance(recipe, CodedRecipe) and any(run.predictor == "square" for run in recipe.runs):
            out.update(bisect_right(starts, first) - 1 for first, _ in recipe.moments)
    return out


def _independent_ranges(recipes: Sequence[Recipe | None], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split the records into consecutive ranges in which no record needs a tensor of its own range."""
    start = num_decoded = num_tensors = 0
    for index, (recipe, tensors) in enumerate(zip(recipes, counts, strict=True)):
        if index > start and recipe is not None and max(ordinals(recipe), default=-1) >= num_decoded:
            yield range(start, index)
            start, num_decoded = index, num_tensors
        num_tensors += tensors
    yield range(start, len(recipes))


MIN_BATCH_NUMEL = 1 << 19
"""Number of values from which tensors are a task for a thread: handing over fewer costs more than it gains."""


@overload
def map_tensors(function: Callable[[str, int], Reads[T]], tensors: Mapping[str, Tensor]) -> dict[str, T]: ...
@overload
def map_tensors(function: Callable[[str, int], T], tensors: Mapping[str, Tensor]) -> dict[str, T]: ...
def map_tensors(function: Callable[[str, int], Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `function(name, threads)` of each tensor, or its result, by name in the same order.

    Tensors in host memory are shared out among as many threads as torch uses: large ones one by one, small ones in
    batches, each by one thread; `threads` is more for a tensor that is alone. Others are taken in this thread, whose
    CUDA stream is current, and wait for their devices together.
    """
    workers = torch.get_num_threads()
    if not all(tensor.is_cpu for tensor in tensors.values()):
        return finish_together({name: function(name, workers) for name in tensors})
    is_shared, counts = share_out([4 * tensor.numel() for tensor in tensors.values()], workers)
    if not is_shared:
        return {name: finish(function(name, count)) for name, count in zip(tensors, counts, strict=True)}
    batches, sizes = list[list[str]](), list[int]()
    for name, tensor in tensors.items():
        if not sizes or sizes[-1] >= MIN_BATCH_NUMEL or tensor.numel() >= MIN_BATCH_NUMEL:
            batches.append([])
            sizes.append(0)
        batches[-1].append(name)
        sizes[-1] += tensor.numel()

    def compute(index: int, threads: int) -> list[Any]:
        return [finish(function(name, threads)) for name in batches[index]]

    results = map_ordered(compute, [4 * size for size in sizes], workers)
    return {
        name: result
        for batch, part in zip(batches, results, strict=True)
        for name, result in zip(batch, part, strict=True)
    }
