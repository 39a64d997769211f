"""Encodes groups of tensors whose values are stored exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from shrinkpoint import _native
from shrinkpoint.codec.coded_record import RecordInput, coding_context, encode
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext
from shrinkpoint.codec.pack import pack_tensors, tap, tap_context
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.encode.choose_coder import choose_smallest, coder_configs, is_far_smaller, sample_stride
from shrinkpoint.schemes.encode.coder_choices import CoderChoice, SaveChoices, config_kind
from shrinkpoint.schemes.encode.record_groups import ContextMap, RecordGroup
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import EncodedRecord

_HEADER_OVERHEAD = 256
"""Bytes that a coded record needs in the header beyond a plain one: coding must save more than that."""
_MAX_GROWTH = 1.1
"""A record that is larger by this factor than the choice for it promises is measured by itself."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class ValueEncoder:
    """Encodes the groups of values of one state.

    Attributes:
        state: the tensors.
        reference: the parent's decoded tensors; None: no record depends on a parent.
        contexts: the moments of each tensor.
        ordinals: name -> ordinal in the file, of all tensors but copies.
        choices: what codes each kind of group.
        chunk: number of values that are coded together.
    """

    state: FlatState
    reference: Reference | None
    contexts: ContextMap
    ordinals: Mapping[str, int]
    choices: SaveChoices
    chunk: int

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
        promised = _MAX_GROWTH * choice.ratio * record.nbytes + _HEADER_OVERHEAD
        return encoded if _encoded_size(encoded) < min(promised, record.nbytes - _HEADER_OVERHEAD) else None

    def _encode_smallest(
        self, name: str, group: RecordGroup, threads: int
    ) -> tuple[EncodedRecord | None, CoderChoice | None]:
        """The smallest coded record of all candidates and what codes it; None if plain records are not larger."""
        best: EncodedRecord | None = None
        choice: CoderChoice | None = None
        for taps in sorted({1, group.taps}):
            record = self._record(name, group, taps)
            if record.nbytes <= _HEADER_OVERHEAD:
                return None, None
            smallest_so_far = min(_encoded_size(best), record.nbytes - _HEADER_OVERHEAD)
            encoded, configs = self._measure(record, smallest_so_far, threads)
            size = _encoded_size(encoded)
            if size < smallest_so_far:
                best = encoded
                choice = CoderChoice(taps, tuple(map(config_kind, configs)), size / record.nbytes)
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
        """The first tap with its context, and the configurations that can code it."""
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
    """What `attempt` returns that knows which bits are used from a sample; or from all numbers, if that was wrong."""
    try:
        return attempt(False)
    except _native.DropsBits:
        return attempt(True)


def _later_taps(context: CodingContext, first: CoderConfig) -> Iterator[CoderConfig]:
    """Yield the configurations that can code the taps after the first."""
    max_level = first.top or (first.bias + 126) >> first.fine
    top = min(max(max_level, 0), (1 << 12) - 1)
    yield first
    yield CoderConfig("delta", predictor="tap", top=top)
    if context.base is not None:
        yield CoderConfig("delta", predictor="base", top=top)


def _encoded_size(encoded: EncodedRecord | None) -> float:
    return math.inf if encoded is None else sum(memoryview(part).nbytes for part in encoded.parts.values())
