"""Strict parsing of untrusted JSON: duplicate keys, NaN, wrong types and excessive nesting are errors."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from reprlib import Repr
from typing import NoReturn, TypeVar

from shrinkpoint.errors import RESTORE_ADVICE, CorruptError
from shrinkpoint.tensors.info import JSON

MAX_JSON_DEPTH = 256
"""Largest nesting depth of lists and objects in a header; CPython parses it from any reasonable call depth."""

MAX_NESTS = 1 << 20  # Number of lists and objects that a text of any length may contain
MIN_NEST_BYTES = 8  # Fewest bytes per list or object of a text with more than `MAX_NESTS` of them

SIZE_LIMIT = 1 << 63  # Exclusive upper bound of every size, dimension and offset of a file

T = TypeVar("T")
_NAMES: dict[type, str] = {dict: "object", list: "array", str: "string", int: "whole number"}
_DIGEST_PATTERN = re.compile("[0-9a-f]{32}")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_NEST_TYPES = (dict, list, tuple)
_MAX_MESSAGE = 400  # characters from a file in a message

_brief = Repr()
_brief.maxstring = _brief.maxother = 60


def corrupt_error(where: str, found: str, expected: str, do: str = RESTORE_ADVICE) -> CorruptError:
    """Return the error for bytes that violate the format."""
    return CorruptError(where, found=shorten(found), expected=shorten(expected), do=do)


def shorten(text: str) -> str:
    """Return the text, cut to the length that a message should have."""
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def expect_type(value: JSON, kind: type[T], where: str, what: str) -> T:
    """Return `value` if its type is exactly `kind`, not a subtype: true is not 1.

    Raises:
        CorruptError: it is of another type.
    """
    if type(value) is not kind:
        raise corrupt_error(where, f"{_brief.repr(value)} for {what}", f"a JSON {_NAMES[kind]}")
    return value


def expect_numbers(value: JSON, begin: int, end: int, where: str, what: str) -> list[int]:
    """Return `value` if it is a list of whole numbers from `begin` to `end` - 1; else raise a CorruptError."""
    numbers = expect_type(value, list, where, what)
    if {*map(type, numbers)} <= {int} and (not numbers or (begin <= min(numbers) and max(numbers) < end)):
        return numbers
    for number in numbers:
        if not begin <= expect_type(number, int, where, what) < end:
            raise corrupt_error(where, f"{number} in {what}", f"a number from {begin} to {end - 1}")
    return numbers


def expect_unique(names: Sequence[str], where: str, what: str) -> None:
    """Raise a CorruptError if a name occurs twice."""
    if len(set(names)) < len(names):
        (name, _), *_ = Counter(names).most_common(1)
        raise corrupt_error(where, f"two {what} named {name!r}", "one")


def expect_hexdigest(value: JSON, where: str, what: str) -> str:
    """Return `value` if it is a digest in hex; else raise a CorruptError."""
    digest = expect_type(value, str, where, what)
    if not _DIGEST_PATTERN.fullmatch(digest):
        raise corrupt_error(where, f"{digest[:40]!r} for {what}", "32 hex digits")
    return digest


def nbytes_of(shape: Sequence[int], itemsize: int) -> int | None:
    """Return the bytes of a tensor; None if a product of its dimensions on the way exceeds `SIZE_LIMIT`."""
    size = itemsize
    for dim in shape:
        size *= dim
        if not size:
            return 0
        if size >= SIZE_LIMIT:  # early, since many dims could make a number of megabytes
            return None
    return size


def load_json(data: str | bytes, where: str, what: str) -> JSON:
    """Parse JSON in UTF-8 without duplicate keys, NaN, infinities or excessive nesting.

    Raises:
        CorruptError: it is anything else.
    """
    check_nests(data, where, what)
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise corrupt_error(where, f"{what} that cannot be read ({reason})", "JSON in UTF-8") from error
    if json_depth(value) > MAX_JSON_DEPTH:
        raise corrupt_error(where, f"{what}, nested too deeply", f"at most {MAX_JSON_DEPTH} levels")
    return value


def check_nests(data: str | bytes, where: str, what: str) -> None:
    """Refuse a text with too many lists and objects before it is parsed: an empty list takes 3 bytes but 60 of memory.

    Raises:
        CorruptError: it has more lists and objects than it may.
    """
    count, limit = count_nests(data)
    if count > limit:
        raise corrupt_error(where, f"{what} of {count} lists and objects", f"at most {limit}")


def count_nests(data: str | bytes) -> tuple[int, int]:
    """Count the lists and objects of a JSON text; returns the count, and how many a text of its length may have."""
    text = data.encode("utf-8", "replace") if isinstance(data, str) else data
    limit = max(MAX_NESTS, len(text) // MIN_NEST_BYTES)
    if (count := text.count(b"[") + text.count(b"{")) <= limit:
        return count, limit  # brackets in strings are counted too, which does no harm here
    bare = _STRING.sub(b"", text)
    return bare.count(b"[") + bare.count(b"{"), limit


def json_depth(value: JSON) -> int:
    """Return the nesting depth of lists and objects, without recursion."""
    level, levels = [value], 0
    while level := [item for item in level if isinstance(item, _NEST_TYPES)]:
        level = [*chain.from_iterable([nest.values() if isinstance(nest, dict) else nest for nest in level])]
        levels += 1
    return levels


def _reject_duplicate_keys(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {name[:60]!r}")
    return result


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
