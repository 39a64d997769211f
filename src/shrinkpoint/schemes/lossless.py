"""The default: nothing is lost.

Floats as order-preserving integers; a delta by subtraction under contexts that the decoder holds already (the parent's
exponents, the moments); where two checkpoints are one step apart, the optimizer's own arithmetic as the prediction.
Every choice is made by measuring a sample, and whatever gains nothing is stored as it is. docs/schemes.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shrinkpoint.codec import NUMBERS, Known, Material, Reference, Run, copies, encode, known_arrays, plain, same
from shrinkpoint.codec.arrange import gather
from shrinkpoint.codec.kernel import known_of_tap, tap
from shrinkpoint.codec.run import CHUNK, default_threads
from shrinkpoint.errors import PolicyError
from shrinkpoint.record import Encoded
from shrinkpoint.schemes.candidates import candidates, smallest, stride_of
from shrinkpoint.schemes.groups import Group, partition
from shrinkpoint.schemes.links import Links
from shrinkpoint.state import FlatState

_RECORD = 256
"""Bytes that a coded record adds to the header beyond a plain one's: what coding must gain at least."""


@dataclass(frozen=True)
class Lossless:
    """Every value comes back bit by bit.

    Raises:
        PolicyError: a chunk that is too large, or none.

    Args:
        chunk: numbers coded together; smaller ones make partial reads cheaper and files larger.
    """

    id: ClassVar[str] = "lossless"
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if not 0 < self.chunk <= CHUNK:
            raise PolicyError("Lossless.chunk", found=f"{self.chunk}", expected=f"1 to {CHUNK}", do="choose another")

    def encode(self, flat: FlatState, reference: Reference | None, *, threads: int | None = None) -> Iterator[Encoded]:
        """Yield the records of `flat`; see `schemes.Scheme`."""
        parts = partition(flat, reference)
        links = Links(flat, {info.name for info, _ in parts.copies})
        ordinals: dict[str, int] = {}
        if parts.same and reference is not None:
            yield _numbered(same("~same", parts.same, reference), ordinals)
        for index, group in enumerate(parts.groups):
            yield from self._code(f"~{index}", group, flat, reference, links, ordinals, default_threads(threads))
        if parts.copies:
            infos = [info for info, _ in parts.copies]
            sources = [ordinals[source] for _, source in parts.copies]
            yield copies("~copies", infos, sources, flat.tensors)

    def _code(
        self, bundle: str, group: Group, flat: FlatState, reference: Reference | None, links: Links,
        ordinals: dict[str, int], threads: int,
    ) -> Iterator[Encoded]:  # fmt: skip
        encoded = self._coded(bundle, group, flat, reference, links, ordinals, threads)
        if encoded is not None:
            yield _numbered(encoded, ordinals)
            return
        for info in group.infos:  # one by one, so that any safetensors reader finds them under their names
            yield _numbered(plain(info.name, (info,), flat.tensors), ordinals)

    def _coded(
        self, bundle: str, group: Group, flat: FlatState, reference: Reference | None, links: Links,
        ordinals: dict[str, int], threads: int,
    ) -> Encoded | None:  # fmt: skip
        """The group's record, or None where coding gains nothing."""
        name = group.infos[0].name if len(group.infos) == 1 else bundle
        base = reference if group.based else None
        best: Encoded | None = None
        for taps in {1, group.taps}:
            material = _material(name, group, taps, flat.tensors, base, ordinals)
            if material.nbytes <= _RECORD:
                return None
            runs, estimate = _choose(material, links, threads)
            smallest_so_far = min(_stored(best), material.nbytes - _RECORD)
            if estimate < smallest_so_far:
                runs = tuple(run.with_chunk(self.chunk) for run in runs)
                encoded = encode(material, runs, threads=threads)
                best = encoded if _stored(encoded) < smallest_so_far else best
        return best


def _material(
    name: str, group: Group, taps: int, tensors: dict[str, Tensor], base: Reference | None, ordinals: dict[str, int]
) -> Material:
    known = known_arrays(group.infos, taps, base, group.moments, tensors)
    moments = tuple((ordinals[first], ordinals[second]) for first, second in group.moments)
    return Material(name, group.infos, taps, gather(group.infos, tensors, taps), known, moments)


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


def _numbered(encoded: Encoded, ordinals: dict[str, int]) -> Encoded:
    for info in encoded.infos:
        ordinals[info.name] = len(ordinals)
    return encoded


def _stored(encoded: Encoded | None) -> float:
    if encoded is None:
        return float("inf")
    return sum(memoryview(part).nbytes for part in encoded.parts.values())
