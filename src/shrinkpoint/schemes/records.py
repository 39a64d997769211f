"""A state into records, exactly: where every scheme's ways meet.

Floats as order-preserving integers; a delta by subtraction under contexts that the decoder holds already (the parent's
exponents, the moments); where two checkpoints are one step apart, the optimizer's own arithmetic as the prediction; and
a quantizer's codes under the parent's codes. Every choice is made by measuring. docs/schemes.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from shrinkpoint.codec import (
    CODERS,
    DELTA_CODERS,
    NUMBERS,
    Codebooked,
    Known,
    Material,
    Origin,
    Pointed,
    Points,
    Reference,
    Run,
    Symbols,
    copies,
    encode,
    encode_gridded,
    encode_quantized,
    known_arrays,
    plain,
    same,
)
from shrinkpoint.codec.arrange import gather
from shrinkpoint.codec.kernel import known_of_tap, tap
from shrinkpoint.codec.pool import submitted
from shrinkpoint.codec.run import CHUNK, default_threads
from shrinkpoint.codec.waves import LARGE
from shrinkpoint.record import Encoded
from shrinkpoint.schemes.candidates import candidates, smallest, stride_of
from shrinkpoint.schemes.groups import Group, partition
from shrinkpoint.schemes.links import Links
from shrinkpoint.state import FlatState

MANY = 1024
"""Tensors that share a record also where coding gains nothing, ..."""
MANY_BYTES = 256
"""... if they are smaller than this on average: an entry of its own takes as much in the header."""
_Kind = TypeVar("_Kind", Symbols, Points)
_RECORD = 256
"""Bytes that a coded record adds to the header beyond a plain one's: what coding must gain at least."""


def records(
    flat: FlatState,
    reference: Reference | None,
    *,
    symbols: Mapping[str, Origin] | None = None,
    coders: Sequence[str] = CODERS,
    chunk: int = CHUNK,
    threads: int | None = None,
) -> Iterator[Encoded]:
    """The records of `flat`, each after those whose values it needs as context.

    Args:
        reference: the parent's decoded tensors; None makes every record stand alone.
        symbols: of the tensors of `flat` that are quantized, what their values were made from.
        coders: how codes may be coded; of `codec.CODERS`.
        chunk: numbers coded together.
        threads: native threads; None uses every core.
    """
    symbols = symbols or {}
    parts = partition(flat, reference, symbols)
    infos = [*parts.same, *(info for group in parts.groups for info in group.infos)]
    ordinals = {info.name: ordinal for ordinal, info in enumerate(infos)}
    links = Links(flat, {info.name for info, _ in parts.copies})
    coder = _Coder(flat, reference, symbols, links, ordinals, coders, chunk, default_threads(threads))
    if parts.same and reference is not None:
        yield same("~same", parts.same, reference)
    for group in coder.in_order(parts.groups):
        yield from group
    if parts.copies:
        sources = [ordinals[source] for _, source in parts.copies]
        yield copies("~copies", [info for info, _ in parts.copies], sources, flat.tensors)


class Coding:
    """The second half of every scheme, and the same for all: what was kept becomes records.

    Attributes:
        coders, chunk: as of `records`.
    """

    coders: Sequence[str] = CODERS
    chunk: int = CHUNK

    def encode(
        self,
        flat: FlatState,
        reference: Reference | None,
        *,
        symbols: Mapping[str, Origin] | None = None,
        threads: int | None = None,
    ) -> Iterator[Encoded]:
        """Yield the records of what was kept; see `schemes.Scheme`."""
        return records(flat, reference, symbols=symbols, coders=self.coders, chunk=self.chunk, threads=threads)


@dataclass(frozen=True)
class _Coder:
    """One state on its way into records.

    Attributes:
        ordinals: of every tensor that is not a copy.
        workers: records that are coded at the same time; a large one has them all to itself.
    """

    flat: FlatState
    reference: Reference | None
    symbols: Mapping[str, Origin]
    links: Links
    ordinals: dict[str, int]
    coders: Sequence[str]
    chunk: int
    workers: int

    def in_order(self, groups: Sequence[Group]) -> Iterator[list[Encoded]]:
        """The records of each group. No more groups are begun than there are workers: what is done waits in memory."""
        if self.workers == 1:
            yield from (self._records(index, group) for index, group in enumerate(groups))
            return
        with ThreadPoolExecutor(self.workers) as pool:
            begun: deque[Future[list[Encoded]]] = deque()
            try:
                for index, group in enumerate(groups):
                    begun.append(submitted(pool, self._records, index, group))
                    if len(begun) > self.workers:
                        yield begun.popleft().result()
                while begun:
                    yield begun.popleft().result()
            finally:
                for future in begun:
                    future.cancel()

    def _records(self, index: int, group: Group) -> list[Encoded]:
        name = group.infos[0].name if len(group.infos) == 1 else f"~{index}"
        if group.kind == "codes":
            return [self._quantized(name, group)]
        if group.kind == "points":
            return [self._gridded(name, group)]
        encoded = self._coded(name, group)
        if encoded is not None:
            return [encoded]
        if len(group.infos) >= MANY and sum(info.nbytes for info in group.infos) < MANY_BYTES * len(group.infos):
            return [plain(name, group.infos, self.flat.tensors)]
        # One by one, so that any safetensors reader finds them under their names.
        return [plain(info.name, (info,), self.flat.tensors) for info in group.infos]

    def _quantized(self, name: str, group: Group) -> Encoded:
        infos, found = group.infos, self._origins(group, Symbols)
        delta = group.based and (found[0].residual or any(coder in DELTA_CODERS for coder in self.coders))
        base = self.reference if delta else None
        known = known_arrays(infos, 1, None, group.moments, self.flat.tensors)
        tensors = tuple(self.flat.tensors[info.name] for info in infos)
        under = tuple(self.symbols[other].codes for other in group.under)
        ordinals = tuple(self.ordinals[other] for other in group.under)
        material = Codebooked(name, infos, tensors, found, known, self._ordinals(group), base, under, ordinals)
        threads = self.workers if sum(info.numel for info in infos) >= LARGE else 1
        return encode_quantized(material, coders=self.coders, threads=threads)

    def _gridded(self, name: str, group: Group) -> Encoded:
        infos, points, tensors = group.infos, self._origins(group, Points), self.flat.tensors
        others = tuple(tensors[other] for other in group.under)
        ordinals = tuple(self.ordinals[other] for other in group.under)
        material = Pointed(
            name, infos, tuple(tensors[info.name] for info in infos), points,
            self.reference if group.based else None, others, ordinals,
        )  # fmt: skip
        return encode_gridded(material, threads=self.workers if sum(info.numel for info in infos) >= LARGE else 1)

    def _origins(self, group: Group, kind: type[_Kind]) -> tuple[_Kind, ...]:
        found = (self.symbols[info.name] for info in group.infos)
        return tuple(one for one in found if isinstance(one, kind))

    def _coded(self, name: str, group: Group) -> Encoded | None:
        """The group's record, or None where coding gains nothing."""
        best: Encoded | None = None
        for taps in sorted({1, group.taps}):
            material = self._material(name, group, taps)
            if material.nbytes <= _RECORD:
                return None
            threads = self.workers if material.nbytes >= LARGE else 1
            runs, estimate = _choose(material, self.links, threads)
            smallest_so_far = min(_stored(best), material.nbytes - _RECORD)
            if estimate < smallest_so_far:
                runs = tuple(run.with_chunk(self.chunk) for run in runs)
                encoded = encode(material, runs, threads=threads)
                best = encoded if _stored(encoded) < smallest_so_far else best
        return best

    def _material(self, name: str, group: Group, taps: int) -> Material:
        tensors = self.flat.tensors
        base = self.reference if group.based else None
        known = known_arrays(group.infos, taps, base, group.moments, tensors)
        return Material(name, group.infos, taps, gather(group.infos, tensors, taps), known, self._ordinals(group))

    def _ordinals(self, group: Group) -> tuple[tuple[int, int], ...]:
        return tuple((self.ordinals[first], self.ordinals[second]) for first, second in group.moments)


def _choose(material: Material, links: Links, threads: int) -> tuple[tuple[Run, ...], float]:
    """The runs of a record's taps and the record's estimated bytes."""
    info, taps = material.infos[0], material.taps
    number = NUMBERS[info.dtype]
    facts = links.facts(info)
    values = tap(material.values, 0, taps)
    assert values is not None
    known = known_of_tap(number, material.values, material.known, Run("level"), 0, taps)
    first, cost = smallest(number, values, known, candidates(material, values, known, facts), threads)
    if taps == 1:
        return (first,), cost
    index = min(2, taps - 1)  # the first tap that has all its hints
    costs = []
    for run in _later_taps(material.known, first):
        values = tap(material.values, index, taps)
        assert values is not None
        known = known_of_tap(number, material.values, material.known, run, index, taps)
        costs.append((run.measure(number, values, known, stride_of(values.nbytes // number.bytes), threads), run))
    later = min(costs, key=lambda pair: pair[0])
    return (first, later[1]), cost + (taps - 1) * later[0]


def _later_taps(known: Known, first: Run) -> Iterator[Run]:
    """How taps after the first may be coded."""
    largest = first.top or (first.bias + 126) >> first.fine
    top = min(max(largest, 0), (1 << 12) - 1)
    yield first
    yield Run("delta", predictor="tap", top=top)
    if known.base is not None:
        yield Run("delta", predictor="base", top=top)


def _stored(encoded: Encoded | None) -> float:
    if encoded is None:
        return float("inf")
    return sum(memoryview(part).nbytes for part in encoded.parts.values())
