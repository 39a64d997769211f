"""Checks of arguments: a wrong one is refused where it is given, in the same words everywhere. No torch."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any, TypeVar

from shrinkpoint.errors import PolicyError

MAX_SHOWN = 80
"""Characters of a wrong argument that a message repeats."""
MAX_THREADS = 1 << 16
_PERCENT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*%\s*")
_TEXT = TypeVar("_TEXT", bound=str)


def whole(where: str, value: Any, *, least: int = 1, most: int | None = None, do: str = "take the default") -> int:
    """A whole number within bounds, such as numpy's too; neither a bool nor a float is one.

    Raises:
        PolicyError: it is none, or out of bounds.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = operator.index(value)
        if number >= least and (most is None or number <= most):
            return number
    raise wrong(where, value, f"a whole number {_bounds(least, most)}", do)


def whole_or_none(
    where: str, value: Any, *, least: int = 1, most: int | None = None, none: str = "for no bound"
) -> int | None:
    """The same, or None.

    Args:
        none: what None stands for.
    """
    if value is None:
        return None
    try:
        return whole(where, value, least=least, most=most)
    except PolicyError as error:
        raise wrong(where, value, f"{error.expected}, or None {none}", "leave it out for the default") from None


def threads(value: Any) -> int | None:
    """Native threads: a whole number from 1, or None.

    Raises:
        PolicyError: it is something else.
    """
    return whole_or_none("threads", value, most=MAX_THREADS, none="for every core")


def keyframe_every(value: Any) -> int | None:
    """How many checkpoints a chain has at most: a whole number from 1, or None.

    Raises:
        PolicyError: it is something else.
    """
    return whole_or_none("keyframe_every", value, none="for one chain without an end")


def number(
    where: str, value: Any, *, least: float = 0.0, most: float = math.inf, above: bool = True,
    do: str = "take the default",
) -> float:  # fmt: skip
    """A finite number from `least`, or above it, to `most`.

    Raises:
        PolicyError: it is none, or out of bounds.
    """
    found = _float(value)
    if math.isfinite(found) and least <= found <= most and not (above and found == least):
        return found
    bound = "" if most == math.inf else f", at most {most:g}"
    raise wrong(where, value, f"a number {'above' if above else 'from'} {least:g}{bound}", do)


def share(where: str, value: Any, *, zero: bool = False, most: float = 1.0) -> float:
    """A share of something, as a fraction: 0.01 of 0.01, and of the text "1%".

    Args:
        zero: whether nothing is a share, too.
        most: the largest.

    Raises:
        PolicyError: it is none, negative, or more than `most`.
    """
    expected = f'a share {"from 0" if zero else "above 0"}, at most {most:.4g} or "{100 * most:.4g}%"'
    fraction = _float(percent(value) if isinstance(value, str) else value)
    if not 0 <= fraction <= most or (fraction == 0 and not zero):
        meant = most < fraction <= 100 * most and not isinstance(value, str)
        do = f'write "{fraction:.6g}%" or {fraction / 100:.6g} for {fraction:.6g} per cent' if meant else "take less"
        raise wrong(where, value, expected, do if fraction > most else 'write "1%" or 0.01 for one per cent')
    return fraction


def percent(text: str) -> float | None:
    """What "1%" stands for, 0.01; None where a text is no such thing.

    >>> percent("1%"), percent(" .5 %"), percent("1"), percent("nan%")
    (0.01, 0.005, None, None)
    """
    match = _PERCENT.fullmatch(text) if len(text) <= MAX_SHOWN else None
    if match is None:
        return None
    mantissa, _, exponent = match[1].lower().partition("e")
    return float(f"{mantissa}e{int(exponent or 0) - 2}")  # by way of text: the float next to what was written


def flag(where: str, value: Any) -> bool:
    """True or False.

    Raises:
        PolicyError: it is something else.
    """
    if isinstance(value, bool):
        return value
    raise wrong(where, value, "True or False", "pass one of them")


def choice(where: str, value: Any, choices: Collection[_TEXT]) -> _TEXT:
    """One of a few texts.

    Raises:
        PolicyError: it is none of them.
    """
    for known in choices:
        if isinstance(value, str) and value == known:
            return known
    raise wrong(where, value, " or ".join(map(repr, choices)), "choose one of them")


def text(where: str, value: Any, *, do: str = "pass a text") -> str:
    """A text.

    Raises:
        PolicyError: it is something else.
    """
    if isinstance(value, str):
        return value
    raise wrong(where, value, "a text", do)


def function_or_none(where: str, value: Any, *, expected: str = "a function of what is saved") -> Any:
    """Something that can be called, or None.

    Raises:
        PolicyError: it cannot be.
    """
    if value is None or callable(value):
        return value
    raise wrong(where, value, expected, "pass the function itself, not what it returned")


def kind(
    where: str, value: Any, classes: type | tuple[type, ...], *, expected: str, do: str, none: bool = False
) -> Any:
    """An instance of one of some classes.

    Args:
        none: whether None is allowed, too.

    Raises:
        PolicyError: it is none.
    """
    if (none and value is None) or isinstance(value, classes):
        return value
    raise wrong(where, value, expected, do)


def wrong(where: str, value: Any, expected: str, do: str) -> PolicyError:
    """The error that says what was found in place of what was expected."""
    return PolicyError(where, found=shown(value), expected=expected, do=do)


def shown(value: Any) -> str:
    """A wrong argument in a message: plain values as they are, of everything else what it is."""
    if value is None or isinstance(value, str | bool | int | float):
        said = repr(value[:MAX_SHOWN] if isinstance(value, str) else _bounded(value))
        return said if not isinstance(value, str) or len(value) <= MAX_SHOWN else f"{said}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _float(value: Any) -> float:
    """Of a number; nan of anything else, and of a number that no float is near."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _bounded(value: Any) -> Any:
    """Python refuses to write out an integer of thousands of digits."""
    huge = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256
    return math.copysign(math.inf, 1 if value > 0 else -1) if huge else value


def _bounds(least: int, most: int | None) -> str:
    return f"from {least}" if most is None else f"from {least} to {most}"
