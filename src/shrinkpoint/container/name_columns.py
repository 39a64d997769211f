"""Tensor names as columns: a pattern, and the numbers in it as differences to the name of this pattern before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import add, sub

from shrinkpoint.container.header import SIZE_LIMIT
from shrinkpoint.container.strict_json import corrupt_error, expect_type
from shrinkpoint.tensors.info import JSON

NUMBER_MARK = "\n"
"""Stands for a number in a pattern."""
_MAX_DIGITS = 19
"""Digits of the largest number."""
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,14})(?![0-9])")


class NameColumns:
    """Collects names.

    Attributes:
        patterns: text with a `NUMBER_MARK` for each number, or a list of one text, which is a name itself.
        indexes: of its pattern, for each name.
        numbers: for each name, each number less the one at its place in the last name of the same pattern, or less 0.
    """

    def __init__(self) -> None:
        self.patterns: list[str | list[str]] = []
        self.indexes: list[int] = []
        self.numbers: list[int] = []
        self._last: dict[str, tuple[int, list[int]]] = {}  # by pattern its index, and the numbers in its last name

    def extend(self, names: Iterable[str]) -> None:
        """Append names; the same name twice is no error."""
        split, last = _NUMBER.split, self._last
        for name in names:
            pieces = split(name)
            if NUMBER_MARK in name:
                self.indexes.append(len(self.patterns))
                self.patterns.append([name])
                continue
            pattern = NUMBER_MARK.join(pieces[::2])
            values = [*map(int, pieces[1::2])]
            if pattern in last:
                index, previous = last[pattern]
                self.numbers += map(sub, values, previous)
            else:
                index = len(self.patterns)
                self.numbers += values
                self.patterns.append(pattern)
            last[pattern] = index, values
            self.indexes.append(index)


def name_chars(patterns: Sequence[JSON], indexes: Sequence[int]) -> int:
    """Return an upper bound of the number of characters of all names."""
    sizes = [len(pattern[0] if type(pattern) is list else pattern) for pattern in patterns]
    marks = [_count_numbers(pattern) for pattern in patterns]
    return sum((sizes[i] + _MAX_DIGITS * marks[i]) * times for i, times in Counter(indexes).items())


def check_patterns(value: JSON, where: str) -> list[JSON]:
    """Return `value` if it is a list of patterns; else raise a CorruptError."""
    patterns = expect_type(value, list, where, "the patterns of names")
    for pattern in patterns:
        if type(pattern) is list and len(pattern) == 1:
            expect_type(pattern[0], str, where, "a name")
        else:
            expect_type(pattern, str, where, "a pattern of names")
    return patterns


def join_names(patterns: Sequence[JSON], indexes: Sequence[int], numbers: Sequence[int], where: str) -> list[str]:
    """Return the names.

    Args:
        patterns: as `check_patterns` returns them.
        indexes: each below `len(patterns)`.
        numbers: whole numbers between -2^63 and 2^63.

    Raises:
        CorruptError: numbers are too many or too few, or one of a name is not within 0 to 2^63 - 1.
    """
    marks = [_count_numbers(pattern) for pattern in patterns]
    count = sum(marks[index] for index in indexes)
    if count != len(numbers):
        raise corrupt_error(where, f"{len(numbers)} numbers in names", f"{count}, as their patterns say")
    formats = [_format(pattern) for pattern in patterns]
    values: list[tuple[int, ...]] = [(0,) * mark for mark in marks]
    names, begin = [], 0
    for index in indexes:
        if not (mark := marks[index]):
            names.append(formats[index])
            continue
        if mark == 1:
            current = (values[index][0] + numbers[begin],)
        else:
            current = tuple(map(add, values[index], numbers[begin : begin + mark]))
        if min(current) < 0 or max(current) >= SIZE_LIMIT:
            raise corrupt_error(where, f"the numbers {current[:4]} in a name", "numbers from 0 to 2^63 - 1")
        values[index] = current
        names.append(formats[index] % current)
        begin += mark
    return names


def _count_numbers(pattern: JSON) -> int:
    return 0 if type(pattern) is list else pattern.count(NUMBER_MARK)


def _format(pattern: JSON) -> str:
    """A `%` format with as many numbers as the pattern; the name itself if there are none."""
    if not _count_numbers(pattern):
        return str(pattern[0] if type(pattern) is list else pattern)
    return str(pattern).replace("%", "%%").replace(NUMBER_MARK, "%d")
