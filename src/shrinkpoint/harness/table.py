"""Outcomes as cells of a table: rate, distortion, loss, speed."""

from __future__ import annotations

from collections.abc import Sequence

from shrinkpoint.harness.outcome import Outcome

HEAD = (
    "scheme", "W bits", "m bits", "v bits", "delta x", "run x", "W error", "update error", "rise %", "worst %",
    "retention", "enc GB/s", "dec GB/s", "memory",
)  # fmt: skip
"""Bits a value and errors are medians over the deltas; ratios are of the whole state; memory is the largest rise during
a save, in sizes of the state."""


def cells(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One row for each outcome that has any."""
    return [_row(one) for one in outcomes if one.rows]


def _row(one: Outcome) -> list[str]:
    bits = [_number(one.median(lambda row, kind=kind: row.bits.get(kind)), ".3f") for kind in "Wmv"]  # type: ignore[misc]
    errors = [one.median(lambda row, kind=kind: row.errors.get(kind)) for kind in ("W", "update")]  # type: ignore[misc]
    rise, worst = one.median(lambda row: row.rise), one.worst(lambda row: row.rise)
    return [
        one.name,
        *bits,
        f"{one.delta_ratio:.2f}",
        f"{one.ratio:.2f}",
        *(_number(error, ".2e") if error else _number(error, ".0f") for error in errors),
        *(_number(None if value is None else 100 * value, "+.3f") for value in (rise, worst)),
        _number(one.retention, ".2f"),
        f"{one.encode_speed:.3f}",
        f"{one.decode_speed:.3f}",
        _number(one.peak, ".2f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
