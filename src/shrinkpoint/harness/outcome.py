"""What was measured of one system on one series. Plain data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shrinkpoint.record import JSON


@dataclass(frozen=True)
class Row:
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
class Outcome:
    """All checkpoints of a series through one system; `failure` says why there are none."""

    name: str
    rows: Sequence[Row] = field(repr=False, default=())
    failure: str = ""

    @property
    def deltas(self) -> Sequence[Row]:
        """Those that are no keyframes; of a system that has only these, all."""
        return [row for row in self.rows if not row.keyframe] or self.rows

    @property
    def ratio(self) -> float:
        """Over the whole run: raw bytes for each stored byte, keyframes included."""
        return _over(sum(row.raw for row in self.rows), sum(row.stored for row in self.rows))

    @property
    def delta_ratio(self) -> float:
        return _over(sum(row.raw for row in self.deltas), sum(row.stored for row in self.deltas))

    @property
    def encode_speed(self) -> float:
        """GB of raw bytes a second, without the user's evaluation."""
        return _over(sum(row.raw for row in self.rows), 1e9 * sum(row.encode for row in self.rows))

    @property
    def decode_speed(self) -> float:
        return _over(sum(row.raw for row in self.rows), 1e9 * sum(row.decode for row in self.rows))

    @property
    def peak(self) -> float | None:
        """The largest rise of memory, in sizes of the state."""
        known = [row.peak / row.raw for row in self.rows if row.peak is not None and row.raw]
        return max(known, default=None)

    def median(self, of: Callable[[Row], float | None]) -> float | None:
        """Over the deltas for which it is known."""
        known = [value for value in map(of, self.deltas) if value is not None]
        return statistics.median(known) if known else None

    def worst(self, of: Callable[[Row], float | None], *, least: bool = False) -> float | None:
        """The largest, or the least, over all rows."""
        known = [value for value in map(of, self.rows) if value is not None]
        return (min if least else max)(known, default=None)

    def to_json(self) -> dict[str, Any]:
        """Rows in full, and what tables show of them."""
        shown = {
            "ratio": self.ratio, "delta_ratio": self.delta_ratio, "encode_gb_s": self.encode_speed,
            "decode_gb_s": self.decode_speed, "peak": self.peak, "rise": self.median(lambda row: row.rise),
            "worst_rise": self.worst(lambda row: row.rise), "least_retention": self.retention,
        }  # fmt: skip
        if self.failure:
            return {"name": self.name, "failure": self.failure}
        return {"name": self.name, **shown, "rows": [asdict(row) for row in self.rows]}

    @property
    def retention(self) -> float | None:
        return self.worst(lambda row: row.retention, least=True)


def _over(a: float, b: float) -> float:
    return a / b if b else float("inf")
