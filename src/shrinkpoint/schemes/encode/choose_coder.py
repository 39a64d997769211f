"""Proposes entropy-coder configurations for an array and chooses the smallest on a sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from shrinkpoint.codec.coded_record import RecordInput
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, NumberFormat
from shrinkpoint.tensors.info import OptimizerInfo, Role

_Words: TypeAlias = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
_SAMPLE_SIZE = 1 << 15
"""Number of values in the sample on which configurations are compared."""
_COARSE_STRIDE = 8  # times that of the sample by which a coder is chosen
_EXACT_SHARE = 1 / 8  # of the bytes of values: what is predicted bit for bit takes less
_LEVEL_MARGIN = 8
"""Levels above the largest of the sample that still have a token of their own."""


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
    if not number.is_float:
        yield from _integer_configs(number, context)
        return
    words = record.values.view(f"u{number.itemsize}")
    sample = _sample(words)
    union = int(np.bitwise_or.reduce(words if exact else sample))
    sign, shift = bool(union >> (number.width - 1)), _trailing_zeros(union, number.mantissa)
    if record.context.base is not None:
        base_zeros = _trailing_zeros(_union(number, record.context.base, exact), number.mantissa) if shift else 0
        yield from _delta_configs(number, context, role, info, min(shift, base_zeros))
    if values.nbytes < record.nbytes:
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
    """Whether a prediction by the optimizer's arithmetic takes less than half of what a choice of earlier saves does.

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
    number: NumberFormat,
    sample: _Words,
    context: CodingContext,
    role: Role,
    sign: bool,
    shift: int,
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
