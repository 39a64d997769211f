"""Formats sizes, ratios, ages and counts for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")
_AGES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_MAX_NAMES = 6  # Names that a message lists of many


def size(count: int) -> str:
    """Bytes as text in decimal units, with three digits.

    >>> [size(n) for n in (0, 999, 1000, 41_203_000, 999_999, 5_000_000_000)]
    ['0 B', '999 B', '1.00 kB', '41.2 MB', '1.00 MB', '5.00 GB']
    """
    if abs(count) < 1000:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1000
        if abs(value) < 999.5 or unit == _UNITS[-1]:
            break
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"


def ratio(raw: int, stored: int) -> str:
    """Raw bytes for each stored byte, as text.

    >>> ratio(300, 200), ratio(1_000_000, 100), ratio(0, 10), ratio(10, 0)
    ('1.50x', '10000x', '-', '-')
    """
    if not raw or not stored:
        return "-"
    value = raw / stored
    return f"{value:.2f}x" if value < 99.995 else f"{value:.0f}x"


def sizes(raw: int, stored: int) -> str:
    """Bytes of a state, and those it takes.

    >>> sizes(2_200_000, 100_000)
    '100 kB of 2.20 MB (22.00x)'
    """
    return f"{size(stored)} of {size(raw)} ({ratio(raw, stored)})"


def age(created: str, now: datetime | None = None) -> str:
    """Time since an ISO 8601 time, as text in its largest unit.

    >>> now = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
    >>> [age(t, now) for t in ("2026-11-21T11:59:18+00:00", "2026-11-20T10:00:00Z", "2026-11-21T13:00:00Z", "soon")]
    ['42 s', '26 h', 'now', '?']
    """
    try:
        then = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        return "?"
    if then.tzinfo is None:
        then = then.replace(tzinfo=timezone.utc)
    seconds = ((now or datetime.now(timezone.utc)) - then).total_seconds()
    for unit, letter in _AGES:
        if seconds >= unit * (2 if unit > 1 else 1):  # "26 h" is more precise than "1 d"
            return f"{int(seconds // unit)} {letter}"
    return "now"


def duration(seconds: float) -> str:
    """Seconds as text in the largest unit of which there are two; less than one in tenths.

    >>> [duration(s) for s in (0.04, 7.4, 119, 125, 7300, 200_000)]
    ['0.0 s', '7 s', '119 s', '2 min', '2 h', '2 d']
    """
    if seconds < 1:
        return f"{seconds:.1f} s"
    unit, letter = next((unit, letter) for unit, letter in _AGES[1:] if seconds >= 2 * unit or unit == 1)
    return f"{int(seconds // unit)} {letter}"


def number(value: float) -> str:
    """A metric in at most five digits.

    >>> [number(v) for v in (1.7123456, 3.0, 1e-9, float("nan"), 1234567.0)]
    ['1.7123', '3', '1e-09', 'nan', '1.2346e+06']
    """
    return f"{value:.5g}"


def count(amount: int, noun: str) -> str:
    """A number with its noun, in the plural where it needs one.

    >>> count(1, "checkpoint"), count(2, "checkpoint")
    ('1 checkpoint', '2 checkpoints')
    """
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def names(items: Sequence[str]) -> str:
    """The first few of several names, and how many there are beside them.

    >>> names(["a", "b"]), names([f"layers.{i}.weight" for i in range(9)])[-26:]
    ('a, b', 'layers.5.weight and 3 more')
    """
    shown, rest = ", ".join(items[:_MAX_NAMES]), len(items) - _MAX_NAMES
    return f"{shown} and {rest:,} more" if rest > 0 else shown


def printable(text: str) -> str:
    """Escapes characters that would control a terminal: names come from untrusted files.

    >>> printable("a\\x1b[2Jb\\n\\ud800 é")
    'a\\\\x1b[2Jb\\\\n\\\\ud800 é'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
