"""All records of a file: those that do not need each other are decoded side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shrinkpoint.codec.codec import decode
from shrinkpoint.codec.pool import submitted
from shrinkpoint.codec.recipe import needs
from shrinkpoint.codec.reference import Earlier, Origin, Reference
from shrinkpoint.codec.run import default_threads
from shrinkpoint.codec.slab import Slab
from shrinkpoint.record import JSON, Encoded

LARGE = 1 << 22
"""Bytes from which a record has work for several threads by itself."""


def decode_all(
    recipes: Sequence[tuple[JSON, int, int]],
    read: Callable[[int], Encoded],
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
    decoded = Earlier()
    symbols: dict[str, Origin] = {}
    workers = default_threads(threads)
    slab = Slab()

    def one(index: int) -> Reference:
        native = workers if recipes[index][2] >= LARGE else 1
        return decode(read(index), decoded, reference, symbols=symbols, where=where, slab=slab, threads=native)

    with ThreadPoolExecutor(workers) as pool:
        for wave in _waves(recipes):
            # Complete before any is added: `decoded` is being read meanwhile.
            for part in [*_side_by_side(pool, one, wave)] if workers > 1 else map(one, wave):
                decoded.add(part.tensors)
                symbols.update(part.symbols)
    return Reference(decoded, symbols)


def _side_by_side(
    pool: ThreadPoolExecutor, one: Callable[[int], Reference], wave: Sequence[int]
) -> Iterator[Reference]:
    """As `pool.map`; what is left is not begun where one fails."""
    futures: list[Future[Reference]] = []
    try:
        futures += (submitted(pool, one, index) for index in wave)
        yield from (future.result() for future in futures)
    finally:
        for future in futures:
            future.cancel()


def _waves(recipes: Sequence[tuple[JSON, int, int]]) -> Iterator[Sequence[int]]:
    """Runs of records that need no tensor of their own run."""
    start = done = here = 0
    for index, (recipe, tensors, _) in enumerate(recipes):
        if needs(recipe, tensors) >= done and index > start:
            yield range(start, index)
            start, done = index, here
        here += tensors
    yield range(start, len(recipes))
