"""What a tap may know: the taps before it, and how far the last one moved."""

from __future__ import annotations

from dataclasses import replace

from shrinkpoint import _native
from shrinkpoint.codec.number import Number
from shrinkpoint.codec.run import Bytes, Known, Run


def tap(array: Bytes | None, index: int, taps: int) -> Bytes | None:
    """The `index`-th tap of an arranged array."""
    if array is None:
        return None
    size = array.nbytes // taps
    return array[index * size : (index + 1) * size]


def known_of_tap(number: Number, values: Bytes, known: Known, run: Run, index: int, taps: int) -> Known:
    """What is known of one tap once those before it stand in `values`.

    The predictor "base" takes the parent's tap, under the move of the tap before from *its* parent; "tap" takes the
    tap before, under the move that that one made from its own predecessor. The first tap has no such hint.
    """
    if index == 0 and run.predictor == "tap":
        raise ValueError("the first tap cannot be predicted from a tap before it")
    if taps == 1:
        return known
    here = Known(
        base=tap(known.base, index, taps),
        moment1=tap(known.moment1, index, taps),
        moment2=tap(known.moment2, index, taps),
        moment1_base=tap(known.moment1_base, index, taps),
        shapes=known.shapes,
    )
    if index == 0:
        return here
    before = tap(values, index - 1, taps)
    if run.predictor == "base":
        return replace(here, hint=_moved(number, before, tap(known.base, index - 1, taps)))
    if run.predictor == "tap":
        return replace(
            here, base=before, hint=_moved(number, before, tap(values, index - 2, taps)) if index > 1 else None
        )
    return here


def _moved(number: Number, values: Bytes | None, others: Bytes | None) -> Bytes | None:
    if values is None or others is None:
        return None
    model = _native.Model()
    model.width, model.mantissa = number.width, number.mantissa
    return _native.difference_classes(model, values, others)
