"""Results of one system on one series, as plain data and as cells of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class ResultRow:
    """Measurements of one checkpoint.

    Attributes:
        step: its step in the series.
        keyframe: it needs no other checkpoint.
        raw: bytes of all tensors of the state.
        stored: bytes that were written.
        values: number of values of W, m and v.
        bits: stored bits for each value of W, m and v; groups that the system does not tell apart are missing.
        errors: relative errors of W, m, v and of Adam's "update".
        exact: every tensor came back bit for bit.
        encode: seconds, without the user's evaluation.
        decode: seconds.
        searched: seconds in the user's evaluation.
        quality: value of the original state; None: not evaluated.
        returned: value of the decoded state; None: not evaluated.
        rise: by how much `returned` is worse than `quality`, relative to it.
        peak: bytes by which memory rose while it was encoded; None: unknown.
        retention: share of the weights' progress since the previous checkpoint that was written; None: not measured.
        choice: the settings that a search chose.
    """

    step: int
    keyframe: bool
    raw: int
    stored: int
    values: Mapping[str, int]
    bits: Mapping[str, float]
    errors: Mapping[str, float]
    exact: bool
    encode: float
    decode: float
    searched: float = 0.0
    quality: float | None = None
    returned: float | None = None
    rise: float | None = None
    peak: int | None = None
    retention: float | None = None
    choice: JSON = None


@dataclass(frozen=True)
class BenchResult:
    """Results of one system on a series.

    Attributes:
        name: of the system.
        rows: one for each checkpoint.
        failure: why there are no rows; "" if there are.
    """

    name: str
    rows: Sequence[ResultRow] = field(repr=False, default=())
    failure: str = ""

    @property
    def deltas(self) -> Sequence[ResultRow]:
        """The rows of deltas; all rows if every checkpoint is a keyframe."""
        return [row for row in self.rows if not row.keyframe] or self.rows

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored byte over the whole series, keyframes included."""
        return _ratio(sum(row.raw for row in self.rows), sum(row.stored for row in self.rows))

    @property
    def delta_ratio(self) -> float:
        """Raw bytes for each stored byte over the deltas."""
        return _ratio(sum(row.raw for row in self.deltas), sum(row.stored for row in self.deltas))

    @property
    def encode_speed(self) -> float:
        """GB of raw bytes a second, the user's evaluation not counted."""
        return _ratio(sum(row.raw for row in self.rows), 1e9 * sum(row.encode for row in self.rows))

    @property
    def decode_speed(self) -> float:
        """GB of raw bytes a second."""
        return _ratio(sum(row.raw for row in self.rows), 1e9 * sum(row.decode for row in self.rows))

    @property
    def peak(self) -> float | None:
        """The largest rise of memory, in sizes of the state."""
        rises = [row.peak / row.raw for row in self.rows if row.peak is not None and row.raw]
        return max(rises, default=None)

    def median(self, key: Callable[[ResultRow], float | None]) -> float | None:
        """The median of a quantity over the deltas that have it."""
        values = [value for value in map(key, self.deltas) if value is not None]
        return statistics.median(values) if values else None

    def worst(self, key: Callable[[ResultRow], float | None], *, smallest: bool = False) -> float | None:
        """The largest value of a quantity over all rows, or the smallest."""
        values = [value for value in map(key, self.rows) if value is not None]
        return (min if smallest else max)(values, default=None)

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object: the figures of the table, and the rows."""
        summary = {
            "ratio": self.ratio,
            "delta_ratio": self.delta_ratio,
            "encode_gb_s": self.encode_speed,
            "decode_gb_s": self.decode_speed,
            "peak": self.peak,
            "rise": self.median(lambda row: row.rise),
            "worst_rise": self.worst(lambda row: row.rise),
            "least_retention": self.min_retention,
        }
        if self.failure:
            return {"name": self.name, "failure": self.failure}
        return {"name": self.name, **summary, "rows": [asdict(row) for row in self.rows]}

    @property
    def min_retention(self) -> float | None:
        """The smallest retention over all rows."""
        return self.worst(lambda row: row.retention, smallest=True)


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf")


TABLE_HEADER = (
    "scheme",
    "W bits",
    "m bits",
    "v bits",
    "delta x",
    "run x",
    "W error",
    "update error",
    "rise %",
    "worst %",
    "retention",
    "enc GB/s",
    "dec GB/s",
    "memory",
)
"""Bits a value and errors are medians over the deltas; ratios are of the whole state; memory is the largest rise during
a save, in sizes of the state."""


def table_rows(results: Sequence[BenchResult]) -> list[list[str]]:
    """Cells of one table row for each result that did not fail."""
    return [_table_row(result) for result in results if result.rows]


def _table_row(result: BenchResult) -> list[str]:
    bits = [_format_number(result.median(lambda row, kind=kind: row.bits.get(kind)), ".3f") for kind in "Wmv"]  # type: ignore[misc]
    errors = [result.median(lambda row, kind=kind: row.errors.get(kind)) for kind in ("W", "update")]  # type: ignore[misc]
    rise, worst = result.median(lambda row: row.rise), result.worst(lambda row: row.rise)
    return [
        result.name,
        *bits,
        f"{result.delta_ratio:.2f}",
        f"{result.ratio:.2f}",
        *(_format_number(error, ".2e") if error else _format_number(error, ".0f") for error in errors),
        *(_format_number(None if value is None else 100 * value, "+.3f") for value in (rise, worst)),
        _format_number(result.min_retention, ".2f"),
        f"{result.encode_speed:.3f}",
        f"{result.decode_speed:.3f}",
        _format_number(result.peak, ".2f"),
    ]


def _format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
