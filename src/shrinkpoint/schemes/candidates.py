"""Which runs are worth trying for an array, and which of them is smallest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shrinkpoint.codec import NUMBERS, Known, Material, Number, Run
from shrinkpoint.codec.run import Bytes
from shrinkpoint.record import Role
from shrinkpoint.schemes.adam import square_run, step_run
from shrinkpoint.state import AdamFacts

_SAMPLE = 1 << 15
"""Numbers from which candidates are compared."""
_MARGIN = 8
"""Levels above the sample's largest that still have symbols of their own."""


def candidates(record: Material, values: Bytes, known: Known, facts: AdamFacts | None) -> Iterator[Run]:
    """Runs that can code a record; at least one, the likeliest first.

    Args:
        values: of its first tap, which the runs are tuned to; they hold for the others, too.
        known: of that tap.
    """
    number, role = NUMBERS[record.infos[0].dtype], record.infos[0].role
    if not number.is_float:
        yield from _of_integers(number, known)
        return
    union = _union(number, record.values)
    sign, shift = bool(union >> (number.width - 1)), _trailing_zeros(union, number.mantissa)
    if record.known.base is not None:
        both = min(shift, _trailing_zeros(_union(number, record.known.base), number.mantissa)) if shift else 0
        yield from _against_base(number, known, role, facts, both)
    yield from _levels(number, values.view(f"u{number.bytes}"), known, role, sign, shift)


def smallest(number: Number, values: Bytes, known: Known, runs: Iterator[Run], threads: int) -> tuple[Run, float]:
    """The run that codes a sample of `values` smallest, and its estimated bytes for all of them.

    A run without a rival is not measured: its estimate is 0, and coding everything tells.
    """
    first, *rest = runs
    if not rest:
        return first, 0.0
    stride = stride_of(values.nbytes // number.bytes)
    costs = [(run.measure(number, values, known, stride, threads), run) for run in (first, *rest)]
    cost, run = min(costs, key=lambda pair: pair[0])
    return run, cost


def stride_of(count: int) -> int:
    """Which tiles of an array of `count` numbers make a sample."""
    return max(1, count // _SAMPLE)


def _of_integers(number: Number, known: Known) -> Iterator[Run]:
    if known.base is not None:
        yield Run("delta", predictor="base")
    if number.width > 8:
        yield Run("delta")
    yield Run("planes")


def _against_base(number: Number, known: Known, role: Role, facts: AdamFacts | None, shift: int) -> Iterator[Run]:
    assert known.base is not None
    words = known.base.view(f"u{number.bytes}")
    top = int(_sample(words).max() & (1 << (number.width - 1)) - 1) >> number.mantissa
    if role is Role.MOMENT1:
        return  # a first moment forgets its parent within a few steps: standing alone is smaller (docs/design.md)
    predicted = None
    if facts is not None and (number.width, number.mantissa) == (32, 23) and known.moment1 is not None:
        if role is Role.MOMENT2:
            predicted = square_run(facts) if known.moment1_base is not None else None
        elif known.moment2 is not None:
            predicted = step_run(facts, top)
    if predicted is not None:
        yield predicted
    if role is not Role.MOMENT2:
        yield Run("delta", predictor="base", moments=known.moment2 is not None, top=top, shift=shift)


def _levels(
    number: Number, words: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]], known: Known, role: Role,
    sign: bool, shift: int,
) -> Iterator[Run]:  # fmt: skip
    fine = min(3 if number.width == 16 and role is not Role.PARAMETER else 2, number.mantissa - shift)
    largest = int((_sample(words) & words.dtype.type((1 << (number.width - 1)) - 1)).max()) >> (number.mantissa - fine)
    bias = largest + _MARGIN - 126
    alone = Run("level", fine=fine, shift=shift, sign=sign, bias=bias)
    factors = number.width <= 32 and known.shapes is not None
    moment = role in (Role.MOMENT1, Role.MOMENT2)
    if factors:
        fitted = Run("level", factors=True, fine=fine, shift=shift, sign=sign, bias=bias)
        if role is Role.MOMENT2 and known.base is not None:
            yield Run("level", companion="base", factors=True, fine=fine, shift=shift, sign=sign, bias=bias)
        if role is Role.MOMENT2 and known.moment1 is not None and number.has_float_exponent:
            yield Run("level", companion="moment1", factors=True, fine=fine, shift=shift, sign=sign, bias=bias)
        if moment:
            yield fitted
    yield alone


def _sample(
    words: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]],
) -> np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]:
    return words[:: max(1, words.size // _SAMPLE)]


def _union(number: Number, values: Bytes) -> int:
    """Every bit that some number has."""
    return int(np.bitwise_or.reduce(values.view(f"u{number.bytes}")))


def _trailing_zeros(union: int, most: int) -> int:
    if union == 0:
        return 0
    return min((union & -union).bit_length() - 1, most)
