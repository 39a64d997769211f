"""What a coder could reach: held-out conditional entropies of the fields of a checkpoint.

A model (a table of counts per context) is fitted on a random half of the values and charged for coding the other half,
so a context that only memorises costs more instead of less. The tables themselves, and the row and column means of v,
are not charged for: a real file pays for them.

A value of fp32 is a sign, 8 bits of exponent, 7 bits of mantissa that are nearly uniform and 16 that are uniform (bf16
has the first three only). A delta is the difference of two values in the order-preserving integer domain, its sign and
magnitude class modelled and the bits below the leading one taken as they are.

In a convolution the taps of one kernel resemble each other; there the difference to the previous tap is a further
estimate. For every stream several estimates are made and the smallest is the reference; all of them go to the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

TAPS = "previous tap "  # begins the name of every estimate that looks at neighbours in a kernel
BACKOFF = 4.0  # weight, in values, of the context-free distribution inside every context


@dataclass(frozen=True)
class Fields:
    """The tensors of one stream, end to end, with what is known of each value's place.

    Attributes:
        values: float32 [n].
        tensor: int64 [n], index of the tensor.
        outer: float64 [n], row mean x column mean / mean of |value|, of the tensor seen as a matrix.
        tap: int64 [n], place inside the kernel (last axis) of a convolution; 0 everywhere in other tensors.
    """

    values: Array
    tensor: Array
    outer: Array
    tap: Array

    @classmethod
    def of(cls, tensors: Sequence[Array]) -> Fields:
        return cls(
            np.concatenate([t.ravel() for t in tensors]),
            np.repeat(np.arange(len(tensors)), [t.size for t in tensors]),
            np.concatenate([_outer(t) for t in tensors]),
            np.concatenate([_tap(t) for t in tensors]),
        )


def _outer(tensor: Array) -> Array:
    a = np.abs(tensor.astype(np.float64))
    if a.ndim < 2:
        return np.full(a.size, a.mean())
    a = a.reshape(a.shape[0], -1)
    return (a.mean(1)[:, None] * a.mean(0)[None] / max(a.mean(), 1e-300)).ravel()


def _tap(tensor: Array) -> Array:
    width = tensor.shape[-1] if tensor.ndim > 2 else 1
    return np.arange(tensor.size) % width


def held_out(symbols: Array, *contexts: Array) -> float:
    """Bits per symbol of one random half under the counts of the other half, in every context apart.

    Args:
        symbols: integers [n].
        contexts: integers [n] each; together they are the context.
    """
    symbol, alphabet = _dense(symbols)
    context = np.zeros(len(symbol), np.int64)
    for part in contexts:
        dense, size = _dense(part)
        context = context * size + dense
    context, total = _dense(context)
    fit = np.random.default_rng(0).random(len(symbol)) < 0.5
    key = context * alphabet + symbol
    prior = np.bincount(symbol[fit], minlength=alphabet) + 0.02
    counts = np.bincount(key[fit], minlength=total * alphabet).reshape(total, alphabet)
    model = counts + BACKOFF * prior / prior.sum()
    model /= model.sum(1, keepdims=True)
    return float(-np.log2(model.ravel()[key[~fit]]).mean())


def _dense(values: Array) -> tuple[Array, int]:
    """Values renumbered 0, 1, ... in order, and how many there are. The range must be small against the count."""
    shifted = values.astype(np.int64) - values.min()
    present = np.flatnonzero(np.bincount(shifted))
    renumber = np.zeros(present[-1] + 1, np.int64)
    renumber[present] = np.arange(len(present))
    return renumber[shifted], len(present)


def bits(values: Array) -> Array:
    """The bit patterns of float32, or of bfloat16 held as uint16, as int64."""
    return np.ascontiguousarray(values).view(f"u{values.itemsize}").astype(np.int64)


def exponent(values: Array) -> Array:
    width = values.itemsize * 8
    return (bits(values) >> (width - 9)) & 255


def monotone(values: Array) -> Array:
    """Integers in the order of the floats: adjacent floats are adjacent integers."""
    pattern, sign = bits(values), 1 << (values.itemsize * 8 - 1)
    return np.where(pattern < sign, pattern + sign, 2 * sign - 1 - pattern)


def _mantissa(values: Array) -> float:
    """Bits of the mantissa: the upper seven measured, the rest whole."""
    width = values.itemsize * 8
    return held_out((bits(values) >> (width - 16)) & 127) + width - 16


def octave(values: Array, steps: int = 1) -> Array:
    """floor(steps * log2(values)), at most 40 octaves below the largest."""
    logs = np.log2(np.maximum(values.astype(np.float64), 1e-300))
    logs = np.maximum(logs, logs.max() - 40)
    return np.floor(logs * steps).astype(np.int64)


def classes(difference: Array) -> tuple[Array, float]:
    """Signed bit lengths of integers, and how many bits per value stand below the leading ones."""
    magnitude = np.abs(difference)
    length = np.where(magnitude > 0, np.floor(np.log2(np.maximum(magnitude, 1))) + 1, 0).astype(np.int64)
    return np.sign(difference) * length, float(np.maximum(length - 1, 0).mean())


def neighbours(values: Array, tap: Array, alone: Mapping[str, float]) -> dict[str, float]:
    """Where there are convolutions: what values cost as differences to the previous tap of their kernel.

    The first tap and all other tensors cost the smallest of `alone`. Context: the difference before this one, or the
    exponent of the previous tap.
    """
    later = np.flatnonzero(tap)
    if not len(later):
        return {}
    order = monotone(values)
    kinds, _ = classes(order - np.roll(order, 1))
    _, raw = classes((order - np.roll(order, 1))[later])
    before = np.where(tap[later] > 1, np.roll(kinds, 1)[later], 99)
    share, rest = len(later) / len(values), min(alone.values())

    def mixed(*contexts: Array) -> float:
        return share * (held_out(kinds[later], *contexts) + raw) + (1 - share) * rest

    return {
        TAPS + "| previous difference": mixed(before),
        TAPS + "| exponent of previous tap": mixed(np.roll(exponent(values), 1)[later]),
    }


def smallest(estimates: Mapping[str, float], taps: bool = True) -> float:
    """The reference: the smallest estimate, with or without those that look at neighbours in a kernel."""
    return min(bits for name, bits in estimates.items() if taps or not name.startswith(TAPS))


def parameters(w: Fields, values: Array) -> dict[str, float]:
    """Bits per value of weights that stand alone. `values`: `w.values`, or their bfloat16 as uint16."""
    rest = 1 + _mantissa(values)
    e = exponent(values)
    found = {"order-0": held_out(e) + rest, "| tensor": held_out(e, w.tensor) + rest}
    return found | neighbours(values, w.tap, found)


def first_moments(m: Fields, v: Fields) -> dict[str, float]:
    rest = 1 + _mantissa(m.values)
    e = exponent(m.values)
    found = {
        "order-0": held_out(e) + rest,
        "| tensor": held_out(e, m.tensor) + rest,
        "| exponent of v": held_out(e, exponent(v.values)) + rest,
    }
    return found | neighbours(m.values, m.tap, found)


def second_moments(v: Fields) -> dict[str, float]:
    rest = _mantissa(v.values)
    e = exponent(v.values)
    near = octave(v.outer, 4)
    found = {
        "order-0": held_out(e) + rest,
        "| tensor": held_out(e, v.tensor) + rest,
        "| row x column mean": held_out(e - (near >> 2), near & 3) + rest,
    }
    return found | neighbours(v.values, v.tap, found)


def delta(values: Array, base: Array, m: Fields, v: Fields) -> dict[str, float]:
    """Bits per value of weights whose base the decoder holds. `values`, `base`: float32, or bfloat16 as uint16."""
    kinds, raw = classes(monotone(values) - monotone(base))
    ratio = octave(np.abs(m.values) / np.sqrt(np.maximum(v.values, 1e-30)), 2)
    ratio = np.clip(ratio, -20, 4)
    e = exponent(base)
    found = {
        "order-0": held_out(kinds) + raw,
        "| base exponent": held_out(kinds, e) + raw,
        "| base exponent, |m|/sqrt(v)": held_out(kinds, e, ratio) + raw,
    }
    if m.tap.any():
        before = np.where(m.tap > 0, np.roll(kinds, 1), 99)
        found[TAPS + "| its difference"] = held_out(kinds, before) + raw
        found[TAPS + "| base exponent, its difference"] = held_out(kinds, e, before) + raw
    return found
