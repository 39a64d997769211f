"""Parameters of tests: each value of several axes, and not each combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def each_value(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of parameters, as many as the longest axis has values; each value of each axis is in at least one row.

    A shorter axis begins again from another place, so that two axes of the same length are not always in step.
    """
    values = [list(axis) for axis in axes]
    length = max(map(len, values))
    return [
        tuple(axis[(row + place * (row // len(axis))) % len(axis)] for place, axis in enumerate(values))
        for row in range(length)
    ]
