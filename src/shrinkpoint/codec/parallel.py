"""Decodes the records of a file on several threads; records that do not depend on each other run concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from shrinkpoint.codec.coder import default_threads
from shrinkpoint.codec.recipe import max_ordinal
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import FileTensors, QuantizedTensor, Reference
from shrinkpoint.tensors.info import JSON, EncodedRecord
from shrinkpoint.tensors.memory import Arena

T = TypeVar("T")
P = ParamSpec("P")


def submit_or_run(pool: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Submit work to a pool; if no thread can be started, run it in this thread before returning.

    Raises:
        Exception: what `function` raised in this thread.
    """
    first = threading.Lock()

    def once() -> T:
        if not first.acquire(blocking=False):  # still queued, but already run by the submitter
            raise RuntimeError("already run by the submitting thread")
        return function(*args, **kwargs)

    try:
        return pool.submit(once)
    except RuntimeError:
        first.acquire(blocking=False)
        result: Future[T] = Future()
        result.set_result(function(*args, **kwargs))
        return result


MIN_PARALLEL_BYTES = 1 << 22
"""Tensor bytes from which a single record is decoded by several threads."""


def decode_all(
    recipes: Sequence[tuple[JSON, int, int]],
    read: Callable[[int], EncodedRecord],
    reference: Reference | None,
    *,
    where: str = "file",
    threads: int | None = None,
) -> Reference:
    """Decode all records of a file: its tensors by name, in the order of the records, and their quantized forms.

    Args:
        recipes: (recipe, number of tensors, bytes of its tensors) of every record.
        read: returns the record of an index; called from several threads.
        reference: the decoded parent, if the file is a delta.
        where: the file, for messages.
        threads: number of threads; None: one per core.

    Raises:
        FormatError: the bytes are damaged.
        ChainError: the parent is missing or another one.
    """
    decoded = FileTensors()
    quantized: dict[str, QuantizedTensor] = {}
    workers = default_threads(threads)
    arena = Arena()

    def decode_record(index: int) -> Reference:
        native_threads = workers if recipes[index][2] >= MIN_PARALLEL_BYTES else 1
        return decode(
            read(index),
            decoded,
            reference,
            quantized=quantized,
            where=where,
            allocate=arena.allocate,
            threads=native_threads,
        )

    with ThreadPoolExecutor(workers) as pool:
        for indices in _independent_ranges(recipes):
            # The list is complete before anything is added, because the workers read `decoded`.
            results = [*_map_parallel(pool, decode_record, indices)] if workers > 1 else map(decode_record, indices)
            for result in results:
                decoded.add(result.tensors)
                quantized.update(result.quantized)
    return Reference(decoded, quantized)


def _map_parallel(
    pool: ThreadPoolExecutor, decode_record: Callable[[int], Reference], indices: Sequence[int]
) -> Iterator[Reference]:
    """Like `pool.map`, but records that have not been started are cancelled when one fails."""
    futures: list[Future[Reference]] = []
    try:
        futures += (submit_or_run(pool, decode_record, index) for index in indices)
        yield from (future.result() for future in futures)
    finally:
        for future in futures:
            future.cancel()


def _independent_ranges(recipes: Sequence[tuple[JSON, int, int]]) -> Iterator[Sequence[int]]:
    """Split the records into consecutive ranges in which no record needs a tensor of its own range."""
    start = num_decoded = num_tensors = 0
    for index, (recipe, tensors, _) in enumerate(recipes):
        if max_ordinal(recipe, tensors) >= num_decoded and index > start:
            yield range(start, index)
            start, num_decoded = index, num_tensors
        num_tensors += tensors
    yield range(start, len(recipes))
