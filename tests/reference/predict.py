"""Predictions of deltas (F32, each operation rounded by itself) and levels predicted by factors."""

from __future__ import annotations

import numpy as np
from reference.run import Floats, Known, Run


def bits_of(value: np.float32) -> int:
    return int(np.asarray(value, dtype=np.float32).view(np.uint32))


def predictions(run: Run, known: Known, count: int) -> tuple[list[int], list[int]]:
    """(bit patterns predicted, bit patterns of |s|), the latter for the predictor `square` only."""
    if run.predictor == "none":
        return [0] * count, []
    if run.predictor == "base":
        return known.base, []
    base = np.array(known.base, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        if run.predictor == "adam":
            return _or_base(adam(run, base, known), base), []
        value, s = square(run, base, known)
    # A square that is not finite counts as zero where its exponent is asked for.
    return _or_base(value, base), [bits_of(abs(one)) if np.isfinite(one) else 0 for one in s]


def adam(run: Run, b: Floats, known: Known) -> Floats:
    decay, step, correction, eps = (np.float32(p) for p in run.parameters)
    return b * decay + (step * known.moment1) / (np.sqrt(known.moment2) / correction + eps)


def square(run: Run, b: Floats, known: Known) -> tuple[Floats, Floats]:
    _, beta2, weight1, weight2 = (np.float32(p) for p in run.parameters)
    m, m0 = known.moment1, known.moment1_base
    g = m0 + (m - m0) / weight1
    s = weight2 * g * g
    return b * beta2 + s, s


def factor_levels(data: bytes, shapes: list[tuple[int, int]]) -> list[int | None]:
    """The levels that stored factors predict, None where dead."""
    matrices, rows = len(shapes), sum(r for r, _ in shapes)
    centers = np.frombuffer(data, "<i4", matrices).tolist()
    row_factors = np.frombuffer(data, "i1", rows, 4 * matrices).tolist()
    column_factors = np.frombuffer(data, "i1", offset=4 * matrices + rows).tolist()
    out: list[int | None] = []
    for center, (r, c) in zip(centers, shapes, strict=True):
        for row in row_factors[:r]:
            out += [
                None if -128 in (row, column) else toward_zero(center + row + column) for column in column_factors[:c]
            ]
        del row_factors[:r], column_factors[:c]
    assert not row_factors and not column_factors
    return out


def factors_size(shapes: list[tuple[int, int]]) -> int:
    return sum(4 + r + c for r, c in shapes)


def toward_zero(n: int) -> int:
    """Half of `n`."""
    return n // 2 if n >= 0 else -(-n // 2)


def _or_base(value: Floats, base: Floats) -> list[int]:
    return np.where(np.isfinite(value), value.view(np.uint32), base.view(np.uint32)).tolist()
