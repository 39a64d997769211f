"""What was measured of one system on one series, as plain data and as cells of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class ResultRow:
    """One checkpoint.

    Attributes:
        raw, stored: bytes of all of the state's tensors, and of what was written.
        values: how many numbers there are of W, m and v.
        bits: stored bits for each of them; what a system does not tell apart is missing.
        errors: relative errors of W, m, v and of Adam's "update".
        exact: everything came back bit by bit.
        quality, returned: of the state as it was given, and as it came back; None: not evaluated.
        rise: by how much the second is worse, relative to the first.
        encode, decode, searched: seconds; those of the user's evaluation apart.
        peak: bytes by which memory rose while it was encoded.
        retention: of the weights' progress since the checkpoint before.
        choice: what a search chose.
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
    """All checkpoints of a series through one system; `failure` says why there are none."""

    name: str
    rows: Sequence[ResultRow] = field(repr=False, default=())
    failure: str = ""

    @property
    def deltas(self) -> Sequence[ResultRow]:
        """Those that are no keyframes; of a system that has only these, all."""
        return [row for row in self.rows if not row.keyframe] or self.rows

    @property
    def ratio(self) -> float:
        """Over the whole run: raw bytes for each stored byte, keyframes included."""
        return _ratio(sum(row.raw for row in self.rows), sum(row.stored for row in self.rows))

    @property
    def delta_ratio(self) -> float:
        return _ratio(sum(row.raw for row in self.deltas), sum(row.stored for row in self.deltas))

    @property
    def encode_speed(self) -> float:
        """GB of raw bytes a second, without the user's evaluation."""
        return _ratio(sum(row.raw for row in self.rows), 1e9 * sum(row.encode for row in self.rows))

    @property
    def decode_speed(self) -> float:
        return _ratio(sum(row.raw for row in self.rows), 1e9 * sum(row.decode for row in self.rows))

    @property
    def peak(self) -> float | None:
        """The largest rise of memory, in sizes of the state."""
        known = [row.peak / row.raw for row in self.rows if row.peak is not None and row.raw]
        return max(known, default=None)

    def median(self, key: Callable[[ResultRow], float | None]) -> float | None:
        """Over the deltas for which it is known."""
        known = [value for value in map(key, self.deltas) if value is not None]
        return statistics.median(known) if known else None

    def worst(self, key: Callable[[ResultRow], float | None], *, smallest: bool = False) -> float | None:
        """The largest, or the least, over all rows."""
        known = [value for value in map(key, self.rows) if value is not None]
        return (min if smallest else max)(known, default=None)

    def to_json(self) -> dict[str, Any]:
        """Rows in full, and what tables show of them."""
        shown = {
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
        return {"name": self.name, **shown, "rows": [asdict(row) for row in self.rows]}

    @property
    def min_retention(self) -> float | None:
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
    """One row for each outcome that has any."""
    return [_table_row(one) for one in results if one.rows]


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
