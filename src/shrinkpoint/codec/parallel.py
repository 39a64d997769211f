"""Decodes the records of a file on several threads: records that do not need each other at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from shrinkpoint.codec.arena import Arena
from shrinkpoint.codec.coder import default_threads
from shrinkpoint.codec.recipe import max_ordinal
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import FileTensors, QuantizedTensor, Reference
from shrinkpoint.tensors.info import JSON, EncodedRecord

T = TypeVar("T")
P = ParamSpec("P")


def submit_or_run(pool: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """As `pool.submit`; where no thread can be started, the work is done here before this returns.

    Raises:
        whatever work raised that was done here.
    """
    first = threading.Lock()

    def once() -> T:
        if not first.acquire(blocking=False):  # it stays in the queue, and has been done
            raise RuntimeError("done elsewhere")
        return function(*args, **kwargs)

    try:
        return pool.submit(once)
    except RuntimeError:
        first.acquire(blocking=False)
        done: Future[T] = Future()
        done.set_result(function(*args, **kwargs))
        return done


MIN_PARALLEL_BYTES = 1 << 22
"""Bytes from which a record has work for several threads by itself."""


def decode_all(
    recipes: Sequence[tuple[JSON, int, int]],
    read: Callable[[int], EncodedRecord],
    reference: Reference | None,
    *,
    where: str = "file",
    threads: int | None = None,
) -> Reference:
    """The tensors of a file by name, in the order of its records, and the symbols of those that are quantized.

    Args:
        recipes: (recipe, number of tensors, bytes of its tensors) of every record.
        read: gives the record of an index; called from several threads.
        reference: the parent's tensors, where the file is a delta.
        threads: None: one for every core.

    Raises:
        FormatError, ChainError: as `decode`.
    """
    decoded = FileTensors()
    symbols: dict[str, QuantizedTensor] = {}
    workers = default_threads(threads)
    slab = Arena()

    def one(index: int) -> Reference:
        native = workers if recipes[index][2] >= MIN_PARALLEL_BYTES else 1
        return decode(read(index), decoded, reference, quantized=symbols, where=where, arena=slab, threads=native)

    with ThreadPoolExecutor(workers) as pool:
        for wave in _independent_ranges(recipes):
            # Complete before any is added: `decoded` is being read meanwhile.
            for part in [*_map_parallel(pool, one, wave)] if workers > 1 else map(one, wave):
                decoded.add(part.tensors)
                symbols.update(part.quantized)
    return Reference(decoded, symbols)


def _map_parallel(
    pool: ThreadPoolExecutor, decode_record: Callable[[int], Reference], indices: Sequence[int]
) -> Iterator[Reference]:
    """As `pool.map`; what is left is not begun where one fails."""
    futures: list[Future[Reference]] = []
    try:
        futures += (submit_or_run(pool, decode_record, index) for index in indices)
        yield from (future.result() for future in futures)
    finally:
        for future in futures:
            future.cancel()


def _independent_ranges(recipes: Sequence[tuple[JSON, int, int]]) -> Iterator[Sequence[int]]:
    """Runs of records that need no tensor of their own run."""
    start = done = here = 0
    for index, (recipe, tensors, _) in enumerate(recipes):
        if max_ordinal(recipe, tensors) >= done and index > start:
            yield range(start, index)
            start, done = index, here
        here += tensors
    yield range(start, len(recipes))
