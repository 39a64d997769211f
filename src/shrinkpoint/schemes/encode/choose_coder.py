"""Proposes entropy-coder configurations for an array and chooses the smallest on a sample."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, NumberFormat
from shrinkpoint.codec.record import RecordInput
from shrinkpoint.schemes.encode.adam_predictor import square_config, step_config
from shrinkpoint.tensors.flat_state import OptimizerInfo
from shrinkpoint.tensors.info import Role

_SAMPLE_SIZE = 1 << 15
"""Numbers from which candidates are compared."""
_LEVEL_MARGIN = 8
"""Levels above the sample's largest that still have symbols of their own."""


def coder_configs(
    record: RecordInput, values: Bytes, context: CodingContext, info: OptimizerInfo | None
) -> Iterator[CoderConfig]:
    """Runs that can code a record; at least one, the likeliest first.

    Args:
        values: of its first tap, which the runs are tuned to; they hold for the others, too.
        context: of that tap.
    """
    number, role = NUMBER_FORMATS[record.infos[0].dtype], record.infos[0].role
    if not number.is_float:
        yield from _integer_configs(number, context)
        return
    union = _union(number, record.values)
    sign, shift = bool(union >> (number.width - 1)), _trailing_zeros(union, number.mantissa)
    if record.context.base is not None:
        both = min(shift, _trailing_zeros(_union(number, record.context.base), number.mantissa)) if shift else 0
        yield from _delta_configs(number, context, role, info, both)
    yield from _level_configs(number, values.view(f"u{number.itemsize}"), context, role, sign, shift)


def choose_smallest(
    number: NumberFormat, values: Bytes, context: CodingContext, configs: Iterator[CoderConfig], threads: int
) -> tuple[CoderConfig, float]:
    """The run that codes a sample of `values` smallest, and its estimated bytes for all of them.

    A run without a rival is not measured: its estimate is 0, and coding everything tells.
    """
    first, *rest = configs
    if not rest:
        return first, 0.0
    stride = sample_stride(values.nbytes // number.itemsize)
    costs = [(run.estimate_bytes(number, values, context, stride, threads), run) for run in (first, *rest)]
    cost, run = min(costs, key=lambda pair: pair[0])
    return run, cost


def sample_stride(count: int) -> int:
    """Which tiles of an array of `count` numbers make a sample."""
    return max(1, count // _SAMPLE_SIZE)


def _integer_configs(number: NumberFormat, context: CodingContext) -> Iterator[CoderConfig]:
    if context.base is not None:
        yield CoderConfig("delta", predictor="base")
    if number.width > 8:
        yield CoderConfig("delta")
    yield CoderConfig("planes")


def _delta_configs(
    number: NumberFormat, context: CodingContext, role: Role, info: OptimizerInfo | None, shift: int
) -> Iterator[CoderConfig]:
    assert context.base is not None
    words = context.base.view(f"u{number.itemsize}")
    top = int(_sample(words).max() & (1 << (number.width - 1)) - 1) >> number.mantissa
    if role is Role.MOMENT1:
        return  # a first moment forgets its parent within a few steps: standing alone is smaller (docs/design.md)
    predicted = None
    if info is not None and (number.width, number.mantissa) == (32, 23) and context.moment1 is not None:
        if role is Role.MOMENT2:
            predicted = square_config(info) if context.moment1_base is not None else None
        elif context.moment2 is not None:
            predicted = step_config(info, top)
    if predicted is not None:
        yield predicted
    if role is not Role.MOMENT2:
        yield CoderConfig("delta", predictor="base", moments=context.moment2 is not None, top=top, shift=shift)


def _level_configs(
    number: NumberFormat,
    words: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]],
    context: CodingContext,
    role: Role,
    sign: bool,
    shift: int,
) -> Iterator[CoderConfig]:
    fine = min(3 if number.width == 16 and role is not Role.PARAMETER else 2, number.mantissa - shift)
    largest = int((_sample(words) & words.dtype.type((1 << (number.width - 1)) - 1)).max()) >> (number.mantissa - fine)
    bias = largest + _LEVEL_MARGIN - 126
    alone = CoderConfig("level", fine=fine, shift=shift, sign=sign, bias=bias)
    factors = number.width <= 32 and context.shapes is not None
    moment = role in (Role.MOMENT1, Role.MOMENT2)
    if factors:
        fitted = CoderConfig("level", factors=True, fine=fine, shift=shift, sign=sign, bias=bias)
        if role is Role.MOMENT2 and context.base is not None:
            yield CoderConfig("level", companion="base", factors=True, fine=fine, shift=shift, sign=sign, bias=bias)
        if role is Role.MOMENT2 and context.moment1 is not None and number.has_float_exponent:
            yield CoderConfig("level", companion="moment1", factors=True, fine=fine, shift=shift, sign=sign, bias=bias)
        if moment:
            yield fitted
    yield alone


def _sample(
    words: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]],
) -> np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]:
    return words[:: max(1, words.size // _SAMPLE_SIZE)]


def _union(number: NumberFormat, values: Bytes) -> int:
    """Every bit that some number has."""
    return int(np.bitwise_or.reduce(values.view(f"u{number.itemsize}")))


def _trailing_zeros(union: int, max_zeros: int) -> int:
    if union == 0:
        return 0
    return min((union & -union).bit_length() - 1, max_zeros)
