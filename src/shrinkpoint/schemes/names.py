"""Schemes by the names that users give them."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from shrinkpoint import arguments
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.cnr import CNR
from shrinkpoint.schemes.excp import ExCP
from shrinkpoint.schemes.fisher import Fisher
from shrinkpoint.schemes.gobo import GOBO
from shrinkpoint.schemes.inshrinkerator import Inshrinkerator
from shrinkpoint.schemes.lc_checkpoint import LCCheckpoint
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.partial import SCAR, TOPN
from shrinkpoint.schemes.qd import QD

_SCHEMES: dict[str, Callable[..., Scheme]] = {
    Lossless.id: Lossless, Inshrinkerator.id: Inshrinkerator, QD.id: QD, CNR.id: CNR, GOBO.id: GOBO,
    Fisher.id: Fisher, LCCheckpoint.id: LCCheckpoint, SCAR.id: SCAR, TOPN.id: TOPN, ExCP.id: ExCP,
}  # fmt: skip
"""A scheme that has a bound for what it loses raises, by its name alone, what it needs; the others take their authors'
settings."""


_OBJECTS = ("evaluate", "gradients", "group", "progress", "space")
"""Settings that have no plain value."""
MAX_TEXT = 4096
"""Characters of a scheme's text: what is nested deeper than this can say overflows Python's own parser."""
_FORM = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_EXPECTED = 'a scheme such as shrinkpoint.Fisher(relative_error=.3), or its text such as "fisher(relative_error=.3)"'


def named(scheme: object) -> Scheme:
    """A scheme from its text; a scheme itself stays as it is. See `maker` for what a text may say.

    Raises:
        PolicyError: it is neither.
    """
    if isinstance(scheme, str):
        made: Scheme = maker(scheme)()
        return made
    if scheme is None:
        do = 'leave scheme= out, or say "lossless", to lose nothing'
        raise PolicyError("scheme", found="None", expected=_EXPECTED, do=do)
    if isinstance(scheme, type) and getattr(scheme, "id", None) in _SCHEMES:
        do = f"make one: {scheme.__name__}(...)"
        raise PolicyError("scheme", found=arguments.shown(scheme), expected="one that is made", do=do)
    if isinstance(scheme, type) or not all(callable(getattr(scheme, part, None)) for part in ("quantize", "encode")):
        raise arguments.wrong("scheme", scheme, _EXPECTED, "make a scheme, or name one")
    return cast(Scheme, scheme)


def maker(text: str) -> partial[Scheme]:
    """What makes the scheme of a text: a name, or a name with settings, as `repr` prints it.

    Settings are written as in Python, with plain values only; nothing is executed. What has no plain value, such as
    `evaluate`, can be passed to what is returned.

    Raises:
        PolicyError: a name or a setting nobody knows, a value that is none, or no such text at all.

    >>> maker("fisher(relative_error=.3)")(), maker("inshrinkerator")(threshold="1%", evaluate=len)
    (fisher(relative_error=0.3), inshrinkerator(threshold=0.01, evaluate=<len>))
    """
    match = _FORM.fullmatch(text) if len(text) <= MAX_TEXT else None
    if match is None:
        raise arguments.wrong(
            "scheme", text, 'a name, or a name with settings: "fisher(relative_error=.3)"', "write it so"
        )
    kind = _SCHEMES.get(match[1])
    if kind is None:
        raise arguments.wrong("scheme", text, " or ".join(map(repr, _SCHEMES)), "name a known one")
    return partial(kind, **_settings(text, kind, match[2] or ""))


def _settings(text: str, kind: Callable[..., Scheme], inside: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python's parser thinks of an escape in a text
            call = ast.parse(f"f({inside}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("settings without a name")
        given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
        if len(given) != len(call.keywords):
            raise ValueError("settings in a mapping")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        do = 'write name=value with plain values, such as threshold="1%"; pass functions and objects from Python'
        raise PolicyError("scheme", found=arguments.shown(text), expected="settings as plain values", do=do) from error
    known = [name for name in inspect.signature(kind).parameters if name not in _OBJECTS]
    for name in given:
        if name not in known:
            found, do = f"{name}= in {arguments.shown(text)}", "choose one of these"
            if name in _OBJECTS:
                do = "that is no plain value: make the scheme in Python, or pass it on the command line"
            raise PolicyError("scheme", found=found, expected=", ".join(known), do=do)
    return given
