"""JSON from strangers: what is read is exactly what was meant, or an error of our tree."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import chain
from reprlib import Repr
from typing import NoReturn, TypeVar

from shrinkpoint.errors import CorruptError
from shrinkpoint.tensors.info import JSON

MAX_JSON_DEPTH = 256
"""How deep lists and objects of a header may nest; CPython reads so deep from any reasonable depth of calls."""

MAX_NESTS = 1 << 20
"""Lists and objects that a text may hold whatever its length; see `nests`."""
MIN_NEST_BYTES = 8
"""Bytes that a text with more than `MAX_NESTS` lists and objects has for each of them at least."""

T = TypeVar("T")
_NAMES: dict[type, str] = {dict: "object", list: "array", str: "string", int: "whole number"}
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_NEST_TYPES = (dict, list, tuple)
_MAX_MESSAGE = 400  # letters of a message that come from a file

_brief = Repr()
_brief.maxstring = _brief.maxother = 60


def corrupt_error(where: str, found: str, expected: str, do: str = "") -> CorruptError:
    """The error for bytes that are not what the format says."""
    do = do or "restore another checkpoint, or fetch an intact copy of this file"
    return CorruptError(where, found=shorten(found), expected=shorten(expected), do=do)


def shorten(text: str) -> str:
    """`text`, or as much of it as a message should hold."""
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def expect_type(value: JSON, kind: type[T], where: str, what: str) -> T:
    """`value`, when its type is `kind` and no subtype: true is not 1.

    Raises:
        CorruptError: it is of another type.
    """
    if type(value) is not kind:
        raise corrupt_error(where, f"{_brief.repr(value)} for {what}", f"a JSON {_NAMES[kind]}")
    return value


def load_json(data: str | bytes, where: str, what: str) -> JSON:
    """Parse JSON, in UTF-8, without duplicate keys, NaN or infinities, and not too deep.

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
    """An empty list takes three bytes of JSON and sixty of memory: refuse a text of many, before it is parsed.

    Raises:
        CorruptError: it holds more lists and objects than `max_nests` says.
    """
    if (count := count_nests(data)) > max_nests(len(data)):
        raise corrupt_error(where, f"{what} of {count} lists and objects", f"at most {max_nests(len(data))}")


def count_nests(data: str | bytes) -> int:
    """How many lists and objects a JSON text holds."""
    text = data.encode("utf-8", "replace") if isinstance(data, str) else data
    if (count := text.count(b"[") + text.count(b"{")) <= max_nests(len(text)):
        return count  # perhaps some of them stand in strings; it does not matter
    bare = _STRING.sub(b"", text)
    return bare.count(b"[") + bare.count(b"{")


def max_nests(length: int) -> int:
    """How many of them a text of this length may hold."""
    return max(MAX_NESTS, length // MIN_NEST_BYTES)


def json_depth(value: JSON) -> int:
    """How many lists and objects stand inside one another; without recursion."""
    level, levels = [value], 0
    while level := [one for one in level if isinstance(one, _NEST_TYPES)]:
        level = [*chain.from_iterable([one.values() if isinstance(one, dict) else one for one in level])]
        levels += 1
    return levels


def _reject_duplicate_keys(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {name[:60]!r}")
    return found


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
