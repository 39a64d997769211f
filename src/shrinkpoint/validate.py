"""Checks of arguments: a wrong one is refused where it is given, in the same words everywhere. No torch."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any, TypeVar

from shrinkpoint.errors import PolicyError

MAX_VALUE_CHARS = 80
"""Characters of a wrong argument that a message repeats."""
MAX_THREADS = 1 << 16
_PERCENT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*%\s*")
_TEXT = TypeVar("_TEXT", bound=str)


def check_int(
    where: str, value: Any, *, minimum: int = 1, maximum: int | None = None, do: str = "take the default"
) -> int:
    """A whole number within bounds, such as numpy's too; neither a bool nor a float is one.

    Raises:
        PolicyError: it is none, or out of bounds.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = operator.index(value)
        if number >= minimum and (maximum is None or number <= maximum):
            return number
    raise argument_error(where, value, f"a whole number {_describe_bounds(minimum, maximum)}", do)


def check_optional_int(
    where: str, value: Any, *, minimum: int = 1, maximum: int | None = None, none_meaning: str = "for no bound"
) -> int | None:
    """The same, or None.

    Args:
        none_meaning: what None stands for.
    """
    if value is None:
        return None
    try:
        return check_int(where, value, minimum=minimum, maximum=maximum)
    except PolicyError as error:
        raise argument_error(
            where, value, f"{error.expected}, or None {none_meaning}", "leave it out for the default"
        ) from None


def check_threads(value: Any) -> int | None:
    """Native threads: a whole number from 1, or None.

    Raises:
        PolicyError: it is something else.
    """
    return check_optional_int("threads", value, maximum=MAX_THREADS, none_meaning="for every core")


def check_keyframe_every(value: Any) -> int | None:
    """How many checkpoints a chain has at most: a whole number from 1, or None.

    Raises:
        PolicyError: it is something else.
    """
    return check_optional_int("keyframe_every", value, none_meaning="for one chain without an end")


def check_float(
    where: str,
    value: Any,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    exclusive: bool = True,
    do: str = "take the default",
) -> float:
    """A finite number from `minimum`, or above it, to `maximum`.

    Raises:
        PolicyError: it is none, or out of bounds.
    """
    found = _float_or_nan(value)
    if math.isfinite(found) and minimum <= found <= maximum and not (exclusive and found == minimum):
        return found
    bound = "" if maximum == math.inf else f", at most {maximum:g}"
    raise argument_error(where, value, f"a number {'above' if exclusive else 'from'} {minimum:g}{bound}", do)


def check_fraction(where: str, value: Any, *, allow_zero: bool = False, maximum: float = 1.0) -> float:
    """A share of something, as a fraction: 0.01 of 0.01, and of the text "1%".

    Args:
        allow_zero: whether nothing is a share, too.
        maximum: the largest.

    Raises:
        PolicyError: it is none, negative, or more than `maximum`.
    """
    expected = f'a share {"from 0" if allow_zero else "above 0"}, at most {maximum:.4g} or "{100 * maximum:.4g}%"'
    fraction = _float_or_nan(parse_percent(value) if isinstance(value, str) else value)
    if not 0 <= fraction <= maximum or (fraction == 0 and not allow_zero):
        meant = maximum < fraction <= 100 * maximum and not isinstance(value, str)
        do = f'write "{fraction:.6g}%" or {fraction / 100:.6g} for {fraction:.6g} per cent' if meant else "take less"
        raise argument_error(
            where, value, expected, do if fraction > maximum else 'write "1%" or 0.01 for one per cent'
        )
    return fraction


def parse_percent(text: str) -> float | None:
    """What "1%" stands for, 0.01; None where a text is no such thing.

    >>> percent("1%"), percent(" .5 %"), percent("1"), percent("nan%")
    (0.01, 0.005, None, None)
    """
    match = _PERCENT.fullmatch(text) if len(text) <= MAX_VALUE_CHARS else None
    if match is None:
        return None
    mantissa, _, exponent = match[1].lower().partition("e")
    return float(f"{mantissa}e{int(exponent or 0) - 2}")  # by way of text: the float next to what was written


def check_bool(where: str, value: Any) -> bool:
    """True or False.

    Raises:
        PolicyError: it is something else.
    """
    if isinstance(value, bool):
        return value
    raise argument_error(where, value, "True or False", "pass one of them")


def check_choice(where: str, value: Any, choices: Collection[_TEXT]) -> _TEXT:
    """One of a few texts.

    Raises:
        PolicyError: it is none of them.
    """
    for known in choices:
        if isinstance(value, str) and value == known:
            return known
    raise argument_error(where, value, " or ".join(map(repr, choices)), "choose one of them")


def check_str(where: str, value: Any, *, do: str = "pass a text") -> str:
    """A text.

    Raises:
        PolicyError: it is something else.
    """
    if isinstance(value, str):
        return value
    raise argument_error(where, value, "a text", do)


def check_optional_callable(where: str, value: Any, *, expected: str = "a function of what is saved") -> Any:
    """Something that can be called, or None.

    Raises:
        PolicyError: it cannot be.
    """
    if value is None or callable(value):
        return value
    raise argument_error(where, value, expected, "pass the function itself, not what it returned")


def check_instance(
    where: str, value: Any, classes: type | tuple[type, ...], *, expected: str, do: str, allow_none: bool = False
) -> Any:
    """An instance of one of some classes.

    Args:
        allow_none: whether None is allowed, too.

    Raises:
        PolicyError: it is none.
    """
    if (allow_none and value is None) or isinstance(value, classes):
        return value
    raise argument_error(where, value, expected, do)


def argument_error(where: str, value: Any, expected: str, do: str) -> PolicyError:
    """The error that says what was found in place of what was expected."""
    return PolicyError(where, found=describe_value(value), expected=expected, do=do)


def describe_value(value: Any) -> str:
    """A wrong argument in a message: plain values as they are, of everything else what it is."""
    if value is None or isinstance(value, str | bool | int | float):
        said = repr(value[:MAX_VALUE_CHARS] if isinstance(value, str) else _bounded_int(value))
        return said if not isinstance(value, str) or len(value) <= MAX_VALUE_CHARS else f"{said}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _float_or_nan(value: Any) -> float:
    """Of a number; nan of anything else, and of a number that no float is near."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _bounded_int(value: Any) -> Any:
    """Python refuses to write out an integer of thousands of digits."""
    huge = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256
    return math.copysign(math.inf, 1 if value > 0 else -1) if huge else value


def _describe_bounds(minimum: int, maximum: int | None) -> str:
    return f"from {minimum}" if maximum is None else f"from {minimum} to {maximum}"
