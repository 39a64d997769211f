"""Encodes a state into records, bit-exact; all schemes use this after quantization.

Floats are coded as order-preserving integers; deltas by subtraction, with contexts that the decoder has already (the
parent's exponents, the moments); checkpoints one step apart with the optimizer's own arithmetic as the prediction; and
codes of a quantizer with the parent's codes as context. Configurations are chosen by measuring (docs/schemes.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.codebook_record import CODERS, DELTA_CODERS, CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import (
    MAX_CHUNK,
    NUMBER_FORMATS,
    Bytes,
    CoderConfig,
    CodingContext,
    NumberFormat,
    default_threads,
    pack_tensors,
    tap,
    tap_context,
)
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.lattice_record import LatticeInput, encode_lattice_record
from shrinkpoint.codec.parallel import map_ordered
from shrinkpoint.codec.record import RecordInput, coding_context, encode, encode_copies, encode_plain, encode_same
from shrinkpoint.codec.reference import QuantizedTensor, Reference, lattice_source
from shrinkpoint.codec.twister_record import encode_twisters
from shrinkpoint.schemes.encode.record_groups import ContextMap, RecordGroup, plan_records
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import EncodedRecord, OptimizerInfo, Role

_Words: TypeAlias = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
_SAMPLE_SIZE = 1 << 15  # Number of values in the sample on which configurations are compared
_COARSE_STRIDE = 8  # times that of the sample by which a coder is chosen
_EXACT_SHARE = 1 / 8  # of the bytes of values: what is predicted bit for bit takes less
_LEVEL_MARGIN = 8  # Levels above the largest of the sample that still have a token of their own


def coder_configs(
    record: RecordInput, values: Bytes, context: CodingContext, info: OptimizerInfo | None, *, exact: bool = True
) -> Iterator[CoderConfig]:
    """Yield the configurations that can code a record; at least one, the most likely one first.

    Args:
        record: tensors of one dtype and role.
        values: bytes of its first tap, for which the configurations are tuned; they are valid for all taps.
        context: coding context of the first tap.
        info: what is known about the optimizer; None: nothing.
        exact: look for bits that no number uses in all numbers; else in a sample, so that coding may find others.
    """
    number, role = NUMBER_FORMATS[record.infos[0].dtype], record.infos[0].role
    if not number.mantissa:  # integers
        if context.base is not None:
            yield CoderConfig("delta", predictor="base")
        if number.width > 8:
            yield CoderConfig("delta")
        yield CoderConfig("planes")
        return
    words = record.values.view(f"u{number.itemsize}")
    sample = _sample(words)
    union = int(np.bitwise_or.reduce(words if exact else sample))
    sign, shift = bool(union >> (number.width - 1)), _trailing_zeros(union, number.mantissa)
    if record.context.base is not None:
        base_zeros = _trailing_zeros(_union(number, record.context.base, exact), number.mantissa) if shift else 0
        yield from _delta_configs(number, context, role, info, min(shift, base_zeros))
    if values.nbytes < record.values.nbytes:
        sample = _sample(values.view(words.dtype))
    yield from _level_configs(number, sample, context, role, sign, shift)


def choose_smallest(
    number: NumberFormat, values: Bytes, context: CodingContext, configs: Iterator[CoderConfig], threads: int
) -> tuple[CoderConfig, float]:
    """Return the configuration that codes a sample of `values` smallest, and its estimated bytes for all values.

    A single configuration is not measured: its estimate is 0.
    """
    first, *rest = configs
    if not rest:
        return first, 0.0
    stride = sample_stride(values.nbytes // number.itemsize)
    costs = [(config.estimate_bytes(number, values, context, stride, threads), config) for config in (first, *rest)]
    cost, config = min(costs, key=lambda pair: pair[0])
    return config, cost


def is_far_smaller(
    number: NumberFormat, values: Bytes, context: CodingContext, prediction: CoderConfig, chosen: CoderConfig
) -> bool:
    """True if a prediction by the optimizer's arithmetic takes less than half of what a choice of earlier saves does.

    It is exact one step after the parent, and no better than others some steps later: so a choice made then says
    nothing about now. A few tiles tell. Where it is not exact, the choice need not be measured.
    """
    if prediction.predictor not in ("adam", "square") or prediction.predictor == chosen.predictor:
        return False
    stride = _COARSE_STRIDE * sample_stride(values.nbytes // number.itemsize)
    predicted = prediction.estimate_bytes(number, values, context, stride, 1)
    is_exact = predicted < values.nbytes * _EXACT_SHARE
    return is_exact and 2 * predicted < chosen.estimate_bytes(number, values, context, stride, 1)


def sample_stride(count: int) -> int:
    """Return the stride between the tiles that are sampled of an array of `count` values."""
    return max(1, count // _SAMPLE_SIZE)


def _delta_configs(
    number: NumberFormat, context: CodingContext, role: Role, info: OptimizerInfo | None, shift: int
) -> Iterator[CoderConfig]:
    assert context.base is not None
    words = context.base.view(f"u{number.itemsize}")
    top = int(_sample(words).max() & (1 << (number.width - 1)) - 1) >> number.mantissa
    if role is Role.MOMENT1:
        return  # a first moment forgets its parent within a few steps: coding without it is smaller (docs/design.md)
    prediction = None
    if info is not None and (number.width, number.mantissa) == (32, 23) and context.moment1 is not None:
        if role is Role.MOMENT2:
            prediction = square_config(info) if context.moment1_base is not None else None
        elif context.moment2 is not None:
            prediction = step_config(info, top)
    if prediction is not None:
        yield prediction
    if role is not Role.MOMENT2:
        yield CoderConfig("delta", predictor="base", moments=context.moment2 is not None, top=top, shift=shift)


def _level_configs(
    number: NumberFormat, sample: _Words, context: CodingContext, role: Role, sign: bool, shift: int
) -> Iterator[CoderConfig]:
    fine = min(3 if number.width == 16 and role is not Role.PARAMETER else 2, number.mantissa - shift)
    magnitudes = sample & sample.dtype.type((1 << (number.width - 1)) - 1)
    largest = int(magnitudes.max()) >> (number.mantissa - fine)
    bias = largest + _LEVEL_MARGIN - 126
    plain = CoderConfig("level", fine=fine, shift=shift, sign=sign, bias=bias)
    if number.width <= 32 and context.shapes is not None:
        if role is Role.MOMENT2 and context.base is not None:
            yield replace(plain, companion="base", factors=True)
        if role is Role.MOMENT2 and context.moment1 is not None and number.has_float_exponent:
            yield replace(plain, companion="moment1", factors=True)
        if role in (Role.MOMENT1, Role.MOMENT2):
            yield replace(plain, factors=True)
    yield plain


def _sample(words: _Words) -> _Words:
    """Some values from all over the array, in memory of their own: to read each of them there is a cache miss."""
    return np.ascontiguousarray(words[:: max(1, words.size // _SAMPLE_SIZE)])


def _union(number: NumberFormat, values: Bytes, exact: bool) -> int:
    """The bitwise or of all values, or of a sample."""
    words = values.view(f"u{number.itemsize}")
    return int(np.bitwise_or.reduce(words if exact else _sample(words)))


def _trailing_zeros(union: int, max_zeros: int) -> int:
    return min((union & -union).bit_length() - 1, max_zeros) if union else 0


def step_config(info: OptimizerInfo, top: int) -> CoderConfig | None:
    """Return the configuration that predicts W_t from W_(t-1), m_t and v_t; None if hyperparameters are missing.

    Args:
        info: step, learning rate, betas, eps and weight decay of the parameter.
        top: largest exponent of the parent's values.
    """
    if info.step is None or info.lr is None or info.beta1 is None or info.beta2 is None or info.eps is None:
        return None
    if info.step < 1 or not 0 <= info.beta1 < 1 or not 0 <= info.beta2 < 1:
        return None
    decay = 1.0 - info.lr * (info.weight_decay or 0.0) if info.decoupled else 1.0
    size = info.lr / (1.0 - info.beta1**info.step)
    correction = math.sqrt(1.0 - info.beta2**info.step)
    return CoderConfig(
        "delta", predictor="adam", moments=True, top=top, parameters=(decay, -size, correction, info.eps)
    )


def square_config(info: OptimizerInfo) -> CoderConfig | None:
    """Return the configuration that predicts v_t from v_(t-1), m_t and m_(t-1); None if the betas are missing."""
    if info.beta1 is None or info.beta2 is None or not 0 <= info.beta1 < 1 or not 0 <= info.beta2 < 1:
        return None
    parameters = (info.beta1, info.beta2, 1.0 - info.beta1, 1.0 - info.beta2)
    return CoderConfig("delta", predictor="square", top=0, parameters=parameters)


GroupKind: TypeAlias = tuple[object, ...]
"""The properties that groups with one choice have in common: dtype, role, shape, taps, and the kind of context."""
ConfigKind: TypeAlias = tuple[object, ...]
"""The fields of a configuration that are chosen by measuring; all others follow from the numbers."""


@dataclass(frozen=True)
class CoderChoice:
    """The smallest coding of a record."""

    taps: int  # as in `recipe.CodedRecipe`
    configs: tuple[ConfigKind, ...]  # the kind of the configuration of each tap; the last one serves all later taps
    ratio: float  # coded bytes by bytes of the numbers where this was chosen


def config_kind(config: CoderConfig) -> ConfigKind:
    """Return the fields of a configuration that are chosen by measuring."""
    return config.tokens, config.predictor, config.companion, config.moments, config.factors


def group_kind(group: RecordGroup) -> GroupKind:
    """Return what a group has in common with those that share its choice. One of several tensors shares with none."""
    info = group.infos[0]
    members = info.shape if len(group.infos) == 1 else (info.name, len(group.infos))
    return info.dtype, info.role, members, group.taps, group.has_reference, bool(group.moments)


class ChainChoices:
    """The choices that hold now: made by the first delta of a chain, and again by its 2nd, 4th, 8th, ...

    What codes smallest changes most at the beginning of a run: twenty steps after its start the levels of second
    moments do, and soon the square of the gradient, which the first moments tell, takes 15% less. A choice costs a
    measurement, so it is made ever less often.
    """

    def __init__(self) -> None:
        self.by_kind: dict[GroupKind, CoderChoice] = {}
        self._num_deltas = 0

    def begin_save(self, *, is_delta: bool) -> None:
        """Count a save of the chain, or begin a new chain; drop the choices that are to be made again."""
        self._num_deltas = self._num_deltas + 1 if is_delta else 0
        if self._num_deltas & (self._num_deltas - 1) == 0:
            self.by_kind.clear()


class SaveChoices:
    """The choices for one save: those of the chain so far, and one for each kind that is new.

    The first group of a kind chooses and the others wait, whatever thread they are in: so the same bytes are written
    with any number of threads. Groups must be started in their order.

    Args:
        chain: the choices of the chain; changed in place.
        groups: the groups of values of this save, in their order.
    """

    def __init__(self, chain: dict[GroupKind, CoderChoice], groups: Sequence[RecordGroup]) -> None:
        self._chain, self._before = chain, dict(chain)
        self._first: dict[GroupKind, str] = {}
        for group in groups:
            self._first.setdefault(group_kind(group), group.infos[0].name)
        self._chosen: dict[GroupKind, Future[CoderChoice | None]] = {
            kind: Future() for kind in self._first if kind not in chain
        }

    def get(self, group: RecordGroup, choose: Callable[[], CoderChoice | None]) -> CoderChoice | None:
        """Return the choice for a group, made by `choose` if the group is the first of a new kind."""
        kind = group_kind(group)
        if kind in self._before:
            return self._before[kind]
        if self._first[kind] != group.infos[0].name:
            return self._chosen[kind].result()
        choice: CoderChoice | None = None
        try:
            choice = choose()
        finally:
            self._chosen[kind].set_result(choice)
        if choice is not None:
            self._chain[kind] = choice
        return choice

    def reject(self, group: RecordGroup) -> None:
        """Forget a choice of an earlier save that serves a group badly: the next save chooses again."""
        kind = group_kind(group)
        if kind in self._before:
            self._chain.pop(kind, None)


_HEADER_OVERHEAD = 256
"""Bytes that a coded record needs in the header beyond a plain one: coding must save more than that."""
_MAX_GROWTH = 1.1  # A record that is larger by this factor than the choice for it promises is measured by itself
_T = TypeVar("_T")


@dataclass(frozen=True)
class ValueEncoder:
    """Encodes the groups of values of one state."""

    state: FlatState  # the tensors
    reference: Reference | None  # the parent's decoded tensors; None: no record depends on a parent
    contexts: ContextMap  # the moments of each tensor
    ordinals: Mapping[str, int]  # name -> ordinal in the file, of all tensors but copies
    choices: SaveChoices  # what codes each kind of group
    chunk: int  # number of values that are coded together

    def encode(self, name: str, group: RecordGroup, threads: int) -> EncodedRecord | None:
        """Return the coded record of a group, or None if plain records are not larger. Groups begin in their order."""
        measured: list[EncodedRecord | None] = []

        def choose() -> CoderChoice | None:
            encoded, choice = self._encode_smallest(name, group, threads)
            measured.append(encoded)
            return choice

        choice = self.choices.get(group, choose)
        if choice is None or measured:
            return measured[0] if measured else self._encode_smallest(name, group, threads)[0]
        encoded = self._encode_as(name, group, choice, threads)
        if encoded is not None:
            return encoded
        self.choices.reject(group)
        return self._encode_smallest(name, group, threads)[0]

    def _encode_as(self, name: str, group: RecordGroup, choice: CoderChoice, threads: int) -> EncodedRecord | None:
        """The record coded as chosen; None if that does not serve it well."""
        record = self._record(name, group, choice.taps)

        def attempt(exact: bool) -> EncodedRecord | None:
            configs = self._configs_of(record, choice, exact)
            return None if configs is None else self._encode_record(record, configs, threads)

        encoded = _with_known_bits(attempt)
        promised = _MAX_GROWTH * choice.ratio * record.values.nbytes + _HEADER_OVERHEAD
        return encoded if _encoded_size(encoded) < min(promised, record.values.nbytes - _HEADER_OVERHEAD) else None

    def _encode_smallest(
        self, name: str, group: RecordGroup, threads: int
    ) -> tuple[EncodedRecord | None, CoderChoice | None]:
        """The smallest coded record of all candidates and what codes it; None if plain records are not larger."""
        best: EncodedRecord | None = None
        choice: CoderChoice | None = None
        for taps in sorted({1, group.taps}):
            record = self._record(name, group, taps)
            if record.values.nbytes <= _HEADER_OVERHEAD:
                return None, None
            smallest_so_far = min(_encoded_size(best), record.values.nbytes - _HEADER_OVERHEAD)
            encoded, configs = self._measure(record, smallest_so_far, threads)
            size = _encoded_size(encoded)
            if size < smallest_so_far:
                best = encoded
                choice = CoderChoice(taps, tuple(map(config_kind, configs)), size / record.values.nbytes)
        return best, choice

    def _measure(
        self, record: RecordInput, limit: float, threads: int
    ) -> tuple[EncodedRecord | None, tuple[CoderConfig, ...]]:
        """The record coded with the configurations that look smallest; None if they look larger than `limit`."""

        def attempt(exact: bool) -> tuple[EncodedRecord | None, tuple[CoderConfig, ...]]:
            configs, estimate = self._choose_configs(record, exact, threads)
            return (self._encode_record(record, configs, threads) if estimate < limit else None), configs

        return _with_known_bits(attempt)

    def _record(self, name: str, group: RecordGroup, taps: int) -> RecordInput:
        base = self.reference if group.has_reference else None
        context = coding_context(group.infos, taps, base, group.moments, self.state.tensors)
        values = pack_tensors(group.infos, self.state.tensors, taps)
        moments = tuple((self.ordinals[first], self.ordinals[second]) for first, second in group.moments)
        return RecordInput(name, group.infos, taps, values, context, moments)

    def _encode_record(self, record: RecordInput, configs: tuple[CoderConfig, ...], threads: int) -> EncodedRecord:
        configs = tuple(replace(config, chunk=self.chunk) for config in configs)
        return encode(record, configs, threads=threads)

    def _first_configs(self, record: RecordInput, exact: bool) -> tuple[Bytes, CodingContext, Iterator[CoderConfig]]:
        info = record.infos[0]
        values = tap(record.values, 0, record.taps)
        assert values is not None
        number = NUMBER_FORMATS[info.dtype]
        context = tap_context(number, record.values, record.context, CoderConfig("level"), 0, record.taps)
        return values, context, coder_configs(record, values, context, self.contexts.optimizer_info(info), exact=exact)

    def _configs_of(self, record: RecordInput, choice: CoderChoice, exact: bool) -> tuple[CoderConfig, ...] | None:
        """The configurations of the chosen kinds; None if one cannot code these numbers, or does not fit them."""
        values, context, generated = self._first_configs(record, exact)
        candidates = list(generated)
        first = next((config for config in candidates if config_kind(config) == choice.configs[0]), None)
        if first is None or record.taps == 1:
            number, prediction = NUMBER_FORMATS[record.infos[0].dtype], candidates[0]
            if first is None or is_far_smaller(number, values, context, prediction, first):
                return None
            return (first,)
        later_candidates = _later_taps(record.context, first)
        later = next((config for config in later_candidates if config_kind(config) == choice.configs[1]), None)
        return None if later is None else (first, later)

    def _choose_configs(self, record: RecordInput, exact: bool, threads: int) -> tuple[tuple[CoderConfig, ...], float]:
        """The configurations of the first and the later taps of a record, and its estimated bytes."""
        number, taps = NUMBER_FORMATS[record.infos[0].dtype], record.taps
        first_values, first_context, candidates = self._first_configs(record, exact)
        first, cost = choose_smallest(number, first_values, first_context, candidates, threads)
        if taps == 1:
            return (first,), cost
        index = min(2, taps - 1)  # the first tap for which all contexts exist
        costs = []
        for config in _later_taps(record.context, first):
            values = tap(record.values, index, taps)
            assert values is not None
            context = tap_context(number, record.values, record.context, config, index, taps)
            stride = sample_stride(values.nbytes // number.itemsize)
            costs.append((config.estimate_bytes(number, values, context, stride, threads), config))
        later_cost, later = min(costs, key=lambda pair: pair[0])
        return (first, later), cost + (taps - 1) * later_cost


def _with_known_bits(attempt: Callable[[bool], _T]) -> _T:
    """Result of `attempt` with the bits that a sample uses; or with those of all numbers, if the sample was wrong."""
    try:
        return attempt(False)
    except _native.DropsBits:
        return attempt(True)


def _later_taps(context: CodingContext, first: CoderConfig) -> Iterator[CoderConfig]:
    max_level = first.top or (first.bias + 126) >> first.fine
    top = min(max(max_level, 0), (1 << 12) - 1)
    yield first
    yield CoderConfig("delta", predictor="tap", top=top)
    if context.base is not None:
        yield CoderConfig("delta", predictor="base", top=top)


def _encoded_size(encoded: EncodedRecord | None) -> float:
    return math.inf if encoded is None else sum(memoryview(part).nbytes for part in encoded.parts.values())


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
        coders: allowed coders of codes, of `CODERS`.
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
        if self.reference is not None and group.has_reference and group.kind == "values":
            twisters = encode_twisters(name, group.infos, self.state.tensors, self.reference)
            if twisters is not None:
                return [twisters]
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
