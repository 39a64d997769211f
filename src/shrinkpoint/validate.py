"""Checks of arguments, with the same messages everywhere. No torch."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from shrinkpoint.errors import PolicyError

MAX_VALUE_CHARS = 80  # Characters of a wrong argument that a message repeats
MAX_THREADS = 1 << 16
LEAVE_OUT = "leave it out for the default"
_PERCENT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*%\s*")
_TEXT = TypeVar("_TEXT", bound=str)


def check_int(where: str, value: Any, *, minimum: int = 1, maximum: int | None = None, do: str = LEAVE_OUT) -> int:
    """Return a whole number within bounds as an int; bools and floats are refused.

    Raises:
        PolicyError: it is not a whole number, or out of bounds.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = operator.index(value)
        if number >= minimum and (maximum is None or number <= maximum):
            return number
    bounds = f"from {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    raise argument_error(where, value, f"a whole number {bounds}", do)


def check_optional_int(
    where: str, value: Any, *, minimum: int = 1, maximum: int | None = None, none_meaning: str = "for no bound"
) -> int | None:
    """Return a whole number within bounds as an int, or None.

    Args:
        none_meaning: what None means, for messages.

    Raises:
        PolicyError: it is neither.
    """
    if value is None:
        return None
    try:
        return check_int(where, value, minimum=minimum, maximum=maximum)
    except PolicyError as error:
        raise argument_error(where, value, f"{error.expected}, or None {none_meaning}", LEAVE_OUT) from None


def check_threads(value: Any) -> int | None:
    """Return a number of native threads: a whole number from 1, or None; raises PolicyError if it is something else."""
    return check_optional_int("threads", value, maximum=MAX_THREADS, none_meaning="for every core")


def check_keyframe_every(value: Any) -> int | None:
    """Return the maximum number of checkpoints in a chain: a whole number from 1, or None.

    Raises:
        PolicyError: it is something else.
    """
    return check_optional_int("keyframe_every", value, none_meaning="for one chain without end")


def check_float(
    where: str,
    value: Any,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    exclusive: bool = True,
    do: str = LEAVE_OUT,
) -> float:
    """Return a finite number within bounds as a float.

    Args:
        exclusive: `minimum` itself is out of bounds.

    Raises:
        PolicyError: it is not a finite number, or out of bounds.
    """
    number = _float_or_nan(value)
    if math.isfinite(number) and minimum <= number <= maximum and not (exclusive and number == minimum):
        return number
    bound = "" if maximum == math.inf else f", at most {maximum:g}"
    raise argument_error(where, value, f"a number {'above' if exclusive else 'from'} {minimum:g}{bound}", do)


def check_fraction(where: str, value: Any, *, allow_zero: bool = False, maximum: float = 1.0) -> float:
    """Return a fraction: 0.01 for 0.01, and for the text "1%".

    Args:
        allow_zero: accept 0.
        maximum: the largest value.

    Raises:
        PolicyError: it is not a fraction, is negative, or more than `maximum`.
    """
    expected = f'a share {"from 0" if allow_zero else "above 0"}, at most {maximum:.4g} or "{100 * maximum:.4g}%"'
    fraction = _float_or_nan(parse_percent(value) if isinstance(value, str) else value)
    if not 0 <= fraction <= maximum or (fraction == 0 and not allow_zero):
        do = "pass less" if fraction > maximum else 'pass "1%" or 0.01 for one per cent'
        if maximum < fraction <= 100 * maximum and not isinstance(value, str):
            do = f'pass "{fraction:.6g}%" or {fraction / 100:.6g} for {fraction:.6g} per cent'
        raise argument_error(where, value, expected, do)
    return fraction


def parse_percent(text: str) -> float | None:
    """The value of a text such as "1%", 0.01; None for any other text.

    >>> parse_percent("1%"), parse_percent(" .5 %"), parse_percent("1"), parse_percent("nan%")
    (0.01, 0.005, None, None)
    """
    match = _PERCENT.fullmatch(text) if len(text) <= MAX_VALUE_CHARS else None
    if match is None:
        return None
    mantissa, _, exponent = match[1].lower().partition("e")
    return float(f"{mantissa}e{int(exponent or 0) - 2}")  # by way of text: the float next to what was written


def as_floats(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics as floats; tensors, also on devices, are converted.

    Raises:
        PolicyError: a metric is not a number, or is larger than a float can be.
    """
    try:
        items = (metrics or {}).items()
        # torch warns where float() takes a loss that requires grad
        return {str(name): float(value.detach() if hasattr(value, "detach") else value) for name, value in items}
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        found = describe_value(metrics)
        if isinstance(metrics, Mapping):
            found = ", ".join(f"{name!r:.80}: {describe_value(value)}" for name, value in metrics.items())
        raise PolicyError("metrics", found=found[:200], expected="a number for each name", do="pass floats") from error


MAX_BYTES_VARIABLE = "SHRINKPOINT_MAX_BYTES"
"""The environment variable that limits what a file may decode to where a caller gives no limit."""


def read_byte_variable(name: str) -> int | None:
    """The number of bytes that an environment variable says; None if it is empty or not set.

    Raises:
        PolicyError: it is not a whole number from 1.
    """
    text = os.environ.get(name, "")
    if not text:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 20 and int(text):
        return int(text)
    raise PolicyError(name, found=repr(text[:40]), expected="a whole number of bytes", do="correct it, or unset it")


def check_bool(where: str, value: Any) -> bool:
    """Return True or False; raises PolicyError if it is something else."""
    if isinstance(value, bool):
        return value
    raise argument_error(where, value, "True or False", "pass one of them")


def check_choice(where: str, value: Any, choices: Collection[_TEXT]) -> _TEXT:
    """Return `value` if it is one of `choices`; raises PolicyError if it is none of them."""
    for choice in choices:
        if isinstance(value, str) and value == choice:
            return choice
    raise argument_error(where, value, f"one of {', '.join(map(repr, choices))}", "pass one of them")


def check_str(where: str, value: Any, *, do: str = "pass a string") -> str:
    """Return a string; raises PolicyError if it is something else."""
    if isinstance(value, str):
        return value
    raise argument_error(where, value, "a string", do)


def check_optional_callable(where: str, value: Any, *, expected: str = "a function of what is saved") -> Any:
    """Return something that can be called, or None; raises PolicyError if it cannot be."""
    if value is None or callable(value):
        return value
    raise argument_error(where, value, expected, "pass the function itself, not what it returned")


def check_instance(
    where: str, value: Any, classes: type | tuple[type, ...], *, expected: str, do: str, allow_none: bool = False
) -> Any:
    """Return an instance of one of some classes.

    Args:
        allow_none: accept None, too.

    Raises:
        PolicyError: it is not an instance of them.
    """
    if (allow_none and value is None) or isinstance(value, classes):
        return value
    raise argument_error(where, value, expected, do)


def argument_error(where: str, value: Any, expected: str, do: str) -> PolicyError:
    """The error for a wrong argument, with its description."""
    return PolicyError(where, found=describe_value(value), expected=expected, do=do)


def type_name(value: object) -> str:
    """The name of a value's type with its article.

    >>> type_name(1), type_name("x")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def describe_value(value: Any) -> str:
    """Describe a wrong argument for a message: the value if it is a plain one, else its type."""
    if value is None or isinstance(value, str | bool | int | float):
        text = repr(value[:MAX_VALUE_CHARS] if isinstance(value, str) else _bounded_int(value))
        return text if not isinstance(value, str) or len(value) <= MAX_VALUE_CHARS else f"{text}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return type_name(value)


def _float_or_nan(value: Any) -> float:
    """A number as a float; nan for anything else, and for a number that is too large."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _bounded_int(value: Any) -> Any:
    """An integer that Python can print; infinity for a huge one."""
    huge = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256
    return math.copysign(math.inf, 1 if value > 0 else -1) if huge else value
