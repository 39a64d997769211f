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

from shrinkpoint.codec.code_streams import CODERS, DELTA_CODERS
from shrinkpoint.codec.codebook_record import CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import MAX_CHUNK, NUMBER_FORMATS, CoderConfig, CodingContext, default_threads
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.lattice_record import LatticeInput, encode_lattice_record
from shrinkpoint.codec.pack import pack_tensors, tap, tap_context
from shrinkpoint.codec.parallel import MIN_PARALLEL_BYTES, submit_or_run
from shrinkpoint.codec.record import RecordInput, coding_context, encode, encode_copies, encode_plain, encode_same
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.schemes.encode.choose_coder import choose_smallest, coder_configs, sample_stride
from shrinkpoint.schemes.encode.contexts import ContextMap
from shrinkpoint.schemes.encode.record_groups import RecordGroup, plan_records
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import EncodedRecord

MIN_BUNDLE_TENSORS = 1024
"""Tensors that share a record also where coding gains nothing, ..."""
MAX_BUNDLE_MEAN_BYTES = 256
"""... if they are smaller than this on average: an entry of its own takes as much in the header."""
_Kind = TypeVar("_Kind", CodebookTensor, LatticeTensor)
_HEADER_OVERHEAD = 256
"""Bytes that a coded record adds to the header beyond a plain one's: what coding must gain at least."""


def encode_records(
    state: FlatState,
    reference: Reference | None,
    *,
    quantized: Mapping[str, QuantizedTensor] | None = None,
    coders: Sequence[str] = CODERS,
    chunk: int = MAX_CHUNK,
    threads: int | None = None,
) -> Iterator[EncodedRecord]:
    """The records of `state`, each after those whose values it needs as context.

    Args:
        reference: the parent's decoded tensors; None makes every record stand alone.
        quantized: of the tensors of `state` that are quantized, what their values were made from.
        coders: how codes may be coded; of `codec.CODERS`.
        chunk: numbers coded together.
        threads: native threads; None uses every core.
    """
    quantized = quantized or {}
    parts = plan_records(state, reference, quantized)
    infos = [*parts.unchanged, *(info for group in parts.groups for info in group.infos)]
    ordinals = {info.name: ordinal for ordinal, info in enumerate(infos)}
    links = ContextMap(state, {info.name for info, _ in parts.copies})
    coder = _RecordEncoder(state, reference, quantized, links, ordinals, coders, chunk, default_threads(threads))
    if parts.unchanged and reference is not None:
        yield encode_same("~same", parts.unchanged, reference)
    for group in coder.encode_all(parts.groups):
        yield from group
    if parts.copies:
        sources = [ordinals[source] for _, source in parts.copies]
        yield encode_copies("~copies", [info for info, _ in parts.copies], sources, state.tensors)


class RecordEncodingMixin:
    """The second half of every scheme, and the same for all: what was kept becomes records.

    Attributes:
        coders, chunk: as of `records`.
    """

    coders: Sequence[str] = CODERS
    chunk: int = MAX_CHUNK

    def encode(
        self,
        state: FlatState,
        reference: Reference | None,
        *,
        quantized: Mapping[str, QuantizedTensor] | None = None,
        threads: int | None = None,
    ) -> Iterator[EncodedRecord]:
        """Yield the records of what was kept; see `schemes.Scheme`."""
        return encode_records(
            state, reference, quantized=quantized, coders=self.coders, chunk=self.chunk, threads=threads
        )


@dataclass(frozen=True)
class _RecordEncoder:
    """One state on its way into records.

    Attributes:
        ordinals: of every tensor that is not a copy.
        workers: records that are coded at the same time; a large one has them all to itself.
    """

    state: FlatState
    reference: Reference | None
    quantized: Mapping[str, QuantizedTensor]
    contexts: ContextMap
    ordinals: dict[str, int]
    coders: Sequence[str]
    chunk: int
    workers: int

    def encode_all(self, groups: Sequence[RecordGroup]) -> Iterator[list[EncodedRecord]]:
        """The records of each group. No more groups are begun than there are workers: what is done waits in memory."""
        if self.workers == 1:
            yield from (self._encode_group(index, group) for index, group in enumerate(groups))
            return
        with ThreadPoolExecutor(self.workers) as pool:
            begun: deque[Future[list[EncodedRecord]]] = deque()
            try:
                for index, group in enumerate(groups):
                    begun.append(submit_or_run(pool, self._encode_group, index, group))
                    if len(begun) > self.workers:
                        yield begun.popleft().result()
                while begun:
                    yield begun.popleft().result()
            finally:
                for future in begun:
                    future.cancel()

    def _encode_group(self, index: int, group: RecordGroup) -> list[EncodedRecord]:
        name = group.infos[0].name if len(group.infos) == 1 else f"~{index}"
        if group.kind == "codes":
            return [self._encode_codebooks(name, group)]
        if group.kind == "points":
            return [self._encode_lattices(name, group)]
        encoded = self._encode_values(name, group)
        if encoded is not None:
            return [encoded]
        if len(group.infos) >= MIN_BUNDLE_TENSORS and sum(
            info.nbytes for info in group.infos
        ) < MAX_BUNDLE_MEAN_BYTES * len(group.infos):
            return [encode_plain(name, group.infos, self.state.tensors)]
        # One by one, so that any safetensors reader finds them under their names.
        return [encode_plain(info.name, (info,), self.state.tensors) for info in group.infos]

    def _encode_codebooks(self, name: str, group: RecordGroup) -> EncodedRecord:
        infos, found = group.infos, self._quantized_tensors(group, CodebookTensor)
        delta = group.has_reference and (found[0].residual or any(coder in DELTA_CODERS for coder in self.coders))
        base = self.reference if delta else None
        known = coding_context(infos, 1, None, group.moments, self.state.tensors)
        tensors = tuple(self.state.tensors[info.name] for info in infos)
        under = tuple(self.quantized[other].codes for other in group.context_names)
        ordinals = tuple(self.ordinals[other] for other in group.context_names)
        material = CodebookInput(name, infos, tensors, found, known, self._ordinals(group), base, under, ordinals)
        threads = self.workers if sum(info.numel for info in infos) >= MIN_PARALLEL_BYTES else 1
        return encode_codebook_record(material, coders=self.coders, threads=threads)

    def _encode_lattices(self, name: str, group: RecordGroup) -> EncodedRecord:
        infos, points, tensors = group.infos, self._quantized_tensors(group, LatticeTensor), self.state.tensors
        others = tuple(tensors[other] for other in group.context_names)
        ordinals = tuple(self.ordinals[other] for other in group.context_names)
        material = LatticeInput(
            name,
            infos,
            tuple(tensors[info.name] for info in infos),
            points,
            self.reference if group.has_reference else None,
            others,
            ordinals,
        )
        return encode_lattice_record(
            material, threads=self.workers if sum(info.numel for info in infos) >= MIN_PARALLEL_BYTES else 1
        )

    def _quantized_tensors(self, group: RecordGroup, kind: type[_Kind]) -> tuple[_Kind, ...]:
        found = (self.quantized[info.name] for info in group.infos)
        return tuple(one for one in found if isinstance(one, kind))

    def _encode_values(self, name: str, group: RecordGroup) -> EncodedRecord | None:
        """The group's record, or None where coding gains nothing."""
        best: EncodedRecord | None = None
        for taps in sorted({1, group.taps}):
            material = self._record_input(name, group, taps)
            if material.nbytes <= _HEADER_OVERHEAD:
                return None
            threads = self.workers if material.nbytes >= MIN_PARALLEL_BYTES else 1
            runs, estimate = _choose_configs(material, self.contexts, threads)
            smallest_so_far = min(_encoded_size(best), material.nbytes - _HEADER_OVERHEAD)
            if estimate < smallest_so_far:
                runs = tuple(run.with_chunk(self.chunk) for run in runs)
                encoded = encode(material, runs, threads=threads)
                best = encoded if _encoded_size(encoded) < smallest_so_far else best
        return best

    def _record_input(self, name: str, group: RecordGroup, taps: int) -> RecordInput:
        tensors = self.state.tensors
        base = self.reference if group.has_reference else None
        known = coding_context(group.infos, taps, base, group.moments, tensors)
        return RecordInput(
            name, group.infos, taps, pack_tensors(group.infos, tensors, taps), known, self._ordinals(group)
        )

    def _ordinals(self, group: RecordGroup) -> tuple[tuple[int, int], ...]:
        return tuple((self.ordinals[first], self.ordinals[second]) for first, second in group.moments)


def _choose_configs(record: RecordInput, contexts: ContextMap, threads: int) -> tuple[tuple[CoderConfig, ...], float]:
    """The runs of a record's taps and the record's estimated bytes."""
    info, taps = record.infos[0], record.taps
    number = NUMBER_FORMATS[info.dtype]
    facts = contexts.optimizer_info(info)
    values = tap(record.values, 0, taps)
    assert values is not None
    known = tap_context(number, record.values, record.context, CoderConfig("level"), 0, taps)
    first, cost = choose_smallest(number, values, known, coder_configs(record, values, known, facts), threads)
    if taps == 1:
        return (first,), cost
    index = min(2, taps - 1)  # the first tap that has all its hints
    costs = []
    for run in _later_taps(record.context, first):
        values = tap(record.values, index, taps)
        assert values is not None
        known = tap_context(number, record.values, record.context, run, index, taps)
        costs.append(
            (run.estimate_bytes(number, values, known, sample_stride(values.nbytes // number.itemsize), threads), run)
        )
    later = min(costs, key=lambda pair: pair[0])
    return (first, later[1]), cost + (taps - 1) * later[0]


def _later_taps(context: CodingContext, first: CoderConfig) -> Iterator[CoderConfig]:
    """How taps after the first may be coded."""
    largest = first.top or (first.bias + 126) >> first.fine
    top = min(max(largest, 0), (1 << 12) - 1)
    yield first
    yield CoderConfig("delta", predictor="tap", top=top)
    if context.base is not None:
        yield CoderConfig("delta", predictor="base", top=top)


def _encoded_size(encoded: EncodedRecord | None) -> float:
    if encoded is None:
        return float("inf")
    return sum(memoryview(part).nbytes for part in encoded.parts.values())
