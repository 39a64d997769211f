"""Encodes a state into records, bit-exact; all schemes use this after quantization.

Floats are coded as order-preserving integers; deltas by subtraction, with contexts that the decoder has already (the
parent's exponents, the moments); checkpoints one step apart with the optimizer's own arithmetic as the prediction; and
codes of a quantizer with the parent's codes as context. Configurations are chosen by measuring (docs/schemes.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from shrinkpoint.codec.code_streams import CODERS, DELTA_CODERS
from shrinkpoint.codec.codebook_record import CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coded_record import coding_context
from shrinkpoint.codec.coder import MAX_CHUNK, default_threads
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.lattice_record import LatticeInput, encode_lattice_record
from shrinkpoint.codec.parallel import map_ordered
from shrinkpoint.codec.record import encode_copies, encode_plain, encode_same
from shrinkpoint.codec.reference import QuantizedTensor, Reference, lattice_source
from shrinkpoint.schemes.encode.record_groups import RecordGroup, plan_records
from shrinkpoint.schemes.encode.value_records import ChainChoices, CoderChoice, GroupKind, SaveChoices, ValueEncoder
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import EncodedRecord

MIN_BUNDLE_TENSORS = 1024
"""Number of tensors that share a record even if they cannot be compressed, provided that they are small."""
MAX_BUNDLE_MEAN_BYTES = 256  # Their largest mean size in bytes: a header entry of its own takes as much
_Quantized = TypeVar("_Quantized", CodebookTensor, LatticeTensor)


def encode_records(
    state: FlatState,
    reference: Reference | None,
    *,
    quantized: Mapping[str, QuantizedTensor] | None = None,
    copies: Collection[str] = (),
    coders: Sequence[str] = CODERS,
    chunk: int = MAX_CHUNK,
    choices: dict[GroupKind, CoderChoice] | None = None,
    threads: int | None = None,
) -> Iterator[EncodedRecord]:
    """Yield the records of `state`, each after those that it needs as context.

    Args:
        state: tensors with the values that a reader will get.
        reference: the parent's decoded tensors; None: no record depends on a parent.
        quantized: name of a quantized tensor -> its codes and codebook or lattice.
        copies: names of tensors on lattices that share no record with others, since they move less.
        coders: allowed coders of codes, of `codec.CODERS`.
        chunk: number of values that are coded together.
        choices: what codes each kind of tensor in this chain; what is chosen now is added.
        threads: native threads; None: all cores.
    """
    quantized = quantized or {}
    plan = plan_records(state, reference, quantized, copies)
    infos = [*plan.unchanged, *(info for group in plan.groups for info in group.infos)]
    ordinals = {info.name: ordinal for ordinal, info in enumerate(infos)}
    workers = default_threads(threads)
    save_choices = SaveChoices(
        {} if choices is None else choices, [group for group in plan.groups if group.kind == "values"]
    )
    values = ValueEncoder(state, reference, plan.contexts, ordinals, save_choices, chunk)
    encoder = _RecordEncoder(state, reference, quantized, values, ordinals, coders)
    if plan.unchanged and reference is not None:
        yield encode_same("~same", plan.unchanged, reference)
    groups = plan.groups
    # Codes are fewer than the bytes of their tensors, but what is needed to code them grows with these.
    sizes = [sum(info.nbytes for info in group.infos) for group in groups]
    for records in map_ordered(lambda index, count: encoder.encode(index, groups[index], count), sizes, workers):
        yield from records
    if plan.copies:
        sources = [ordinals[source] for _, source in plan.copies]
        yield encode_copies("~copies", [info for info, _ in plan.copies], sources, state.tensors)


class RecordEncodingMixin:
    """Implements `encode`, the second step of every scheme, which is the same for all of them."""

    coders: Sequence[str] = CODERS  # allowed coders of codes
    chunk: int = MAX_CHUNK  # number of values that are coded together
    copies: frozenset[str] = frozenset()  # names of tensors that share no record with others

    def encode(
        self,
        state: FlatState,
        reference: Reference | None,
        *,
        quantized: Mapping[str, QuantizedTensor] | None = None,
        threads: int | None = None,
    ) -> Iterator[EncodedRecord]:
        """Yield the records of a quantized state, as `encode_records` does."""
        self._choices.begin_save(is_delta=reference is not None)
        return encode_records(
            state,
            reference,
            quantized=quantized,
            copies=self.copies,
            coders=self.coders,
            chunk=self.chunk,
            choices=self._choices.by_kind,
            threads=threads,
        )

    @cached_property
    def _choices(self) -> ChainChoices:
        """Coder of each kind of tensor in the present chain."""
        return ChainChoices()


@dataclass(frozen=True)
class _RecordEncoder:
    """Encodes the record groups of one state."""

    state: FlatState
    reference: Reference | None
    quantized: Mapping[str, QuantizedTensor]
    values: ValueEncoder
    ordinals: dict[str, int]  # name -> ordinal in the file, of all tensors but copies
    coders: Sequence[str]

    def encode(self, index: int, group: RecordGroup, threads: int) -> list[EncodedRecord]:
        """Return the records of a group; one, unless its tensors are stored as they are."""
        name = group.infos[0].name if len(group.infos) == 1 else f"~{index}"
        encode_group = {"codes": self._encode_codebooks, "points": self._encode_lattices, "values": self.values.encode}
        encoded = encode_group[group.kind](name, group, threads)
        if encoded is not None:
            return [encoded]
        nbytes = sum(info.nbytes for info in group.infos)
        if len(group.infos) >= MIN_BUNDLE_TENSORS and nbytes < MAX_BUNDLE_MEAN_BYTES * len(group.infos):
            return [encode_plain(name, group.infos, self.state.tensors)]
        # One record for each tensor, so that any safetensors reader finds them under their names.
        return [encode_plain(info.name, (info,), self.state.tensors) for info in group.infos]

    def _encode_codebooks(self, name: str, group: RecordGroup, threads: int) -> EncodedRecord:
        infos, quantized = group.infos, self._quantized_tensors(group, CodebookTensor)
        uses_parent = quantized[0].residual or any(coder in DELTA_CODERS for coder in self.coders)
        record = CodebookInput(
            name,
            infos,
            tuple(self.state.tensors[info.name] for info in infos),
            quantized,
            coding_context(infos, 1, None, group.moments, self.state.tensors),
            tuple((self.ordinals[first], self.ordinals[second]) for first, second in group.moments),
            self.reference if group.has_reference and uses_parent else None,
            tuple(self.quantized[context].codes for context in group.context_names),
            tuple(self.ordinals[context] for context in group.context_names),
        )
        return encode_codebook_record(record, coders=self.coders, threads=threads)

    def _encode_lattices(self, name: str, group: RecordGroup, threads: int) -> EncodedRecord:
        tensors, quantized = self.state.tensors, self._quantized_tensors(group, LatticeTensor)
        sources = [lattice_source(tensors, info.name) for info in group.infos]
        values: list[Tensor | None] = []
        for info, source, codes in zip(group.infos, sources, quantized, strict=True):
            is_made_from_codes = source is not None and source.quantized is codes
            values.append(None if is_made_from_codes else tensors[info.name])  # there is nothing to compare
        second_moments: list[Tensor | LatticeTensor] = []
        for context in group.context_names:
            source = lattice_source(tensors, context)
            if source is None or source.dtype != torch.float32 or source.quantized.relative_to:
                second_moments.append(tensors[context])
            else:
                second_moments.append(source.quantized)
        record = LatticeInput(
            name,
            group.infos,
            tuple(values),
            quantized,
            self.reference if group.has_reference else None,
            tuple(second_moments),
            tuple(self.ordinals[context] for context in group.context_names),
        )
        return encode_lattice_record(record, threads=threads)

    def _quantized_tensors(self, group: RecordGroup, kind: type[_Quantized]) -> tuple[_Quantized, ...]:
        tensors = (self.quantized[info.name] for info in group.infos)
        return tuple(tensor for tensor in tensors if isinstance(tensor, kind))
