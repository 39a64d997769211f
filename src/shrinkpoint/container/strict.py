"""JSON from strangers: what is read is exactly what was meant, or an error of our tree."""

from __future__ import annotations

import json
from reprlib import Repr
from typing import NoReturn, TypeVar

from shrinkpoint.errors import CorruptError
from shrinkpoint.record import JSON

DEPTH = 256
"""How deep lists and objects of a header may nest; CPython reads so deep from any reasonable depth of calls."""

T = TypeVar("T")
_NAMES: dict[type, str] = {dict: "object", list: "array", str: "string", int: "whole number"}
_LONGEST = 400  # letters of a message that come from a file

_brief = Repr()
_brief.maxstring = _brief.maxother = 60


def refuse(where: str, found: str, expected: str, do: str = "") -> CorruptError:
    """The error for bytes that are not what the format says."""
    do = do or "restore another checkpoint, or fetch an intact copy of this file"
    return CorruptError(where, found=shorten(found), expected=shorten(expected), do=do)


def shorten(text: str) -> str:
    """`text`, or as much of it as a message should hold."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def exact(value: JSON, kind: type[T], where: str, what: str) -> T:
    """`value`, when its type is `kind` and no subtype: true is not 1.

    Raises:
        CorruptError: it is of another type.
    """
    if type(value) is not kind:
        raise refuse(where, f"{_brief.repr(value)} for {what}", f"a JSON {_NAMES[kind]}")
    return value


def load(data: str | bytes, where: str, what: str) -> JSON:
    """Parse JSON, in UTF-8, without duplicate keys, NaN or infinities, and not too deep.

    Raises:
        CorruptError: it is anything else.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise refuse(where, f"{what} that cannot be read ({reason})", "JSON in UTF-8") from error
    if depth(value) > DEPTH:
        raise refuse(where, f"{what}, nested too deeply", f"at most {DEPTH} levels")
    return value


def depth(value: JSON) -> int:
    """How many lists and objects stand inside one another; without recursion."""
    level, levels = [value], 0
    while level := [one for one in level if isinstance(one, dict | list | tuple)]:
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        levels += 1
    return levels


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)[:60]!r}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
