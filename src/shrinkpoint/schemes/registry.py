"""Schemes by the names and texts that users write."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme

_REGISTRY = {
    "lossless": ("schemes.lossless", "Lossless"),
    "inshrinkerator": ("schemes.inshrinkerator.scheme", "Inshrinkerator"),
    "qd": ("baselines.qd", "QD"),
    "cnr": ("baselines.cnr", "CNR"),
    "gobo": ("baselines.gobo", "GOBO"),
    "fisher": ("schemes.fisher.scheme", "Fisher"),
    "lc-checkpoint": ("baselines.lc_checkpoint", "LCCheckpoint"),
    "scar": ("baselines.sparse_update", "SCAR"),
    "topn": ("baselines.sparse_update", "TOPN"),
    "excp": ("baselines.excp", "ExCP"),
}
"""The module, below `shrinkpoint`, and the class of each scheme's id. Modules are imported when a text names them."""

_OBJECT_SETTINGS = ("evaluate", "gradients", "group", "progress", "space")
"""Settings that have no plain value."""
MAX_TEXT = 4096
"""Characters of a scheme's text: what is nested deeper than this can say overflows Python's own parser."""
_FIXED_LOSS_SETTINGS = frozenset({"config", "nats", "ratio", "relative_error"})
"""Settings of a scheme that measures, with which it need not: what is lost is decided by them."""
_PATTERN = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_EXPECTED = 'a scheme such as shrinkpoint.Fisher(relative_error=.3), or its text such as "fisher(relative_error=.3)"'


def get_scheme(scheme: object) -> Scheme:
    """A scheme from its text; a scheme itself stays as it is. `scheme_factory` says what a text may be.

    Raises:
        PolicyError: it is neither.
    """
    if isinstance(scheme, str):
        made: Scheme = scheme_factory(scheme)()
        return made
    if scheme is None:
        do = 'leave scheme= out, or say "lossless", to lose nothing'
        raise PolicyError("scheme", found="None", expected=_EXPECTED, do=do)
    if isinstance(scheme, type) and getattr(scheme, "id", None) in _REGISTRY:
        do = f"make one: {scheme.__name__}(...)"
        raise PolicyError("scheme", found=validate.describe_value(scheme), expected="one that is made", do=do)
    if isinstance(scheme, type) or not all(callable(getattr(scheme, part, None)) for part in ("quantize", "encode")):
        raise validate.argument_error("scheme", scheme, _EXPECTED, "make a scheme, or name one")
    return cast(Scheme, scheme)


def scheme_factory(text: str) -> partial[Scheme]:
    """What makes the scheme of a text: a name, or a name with settings, as `repr` prints it.

    Settings are written as in Python, with plain values only; nothing is executed. What has no plain value, such as
    `evaluate`, can be passed to what is returned.

    Raises:
        PolicyError: a name or a setting nobody knows, a value that is none, or no such text at all.

    >>> scheme_factory("fisher(relative_error=.3)")(), scheme_factory("inshrinkerator")(threshold="1%", evaluate=len)
    (fisher(relative_error=0.3), inshrinkerator(threshold=0.01, evaluate=<len>))
    """
    match = _PATTERN.fullmatch(text) if len(text) <= MAX_TEXT else None
    if match is None:
        raise validate.argument_error(
            "scheme", text, 'a name, or a name with settings: "fisher(relative_error=.3)"', "write it so"
        )
    if match[1] not in _REGISTRY:
        raise validate.argument_error("scheme", text, " or ".join(map(repr, _REGISTRY)), "name a known one")
    module, name = _REGISTRY[match[1]]
    scheme_class = getattr(importlib.import_module(f"shrinkpoint.{module}"), name)
    return partial(scheme_class, **_parse_settings(text, scheme_class, match[2] or ""))


def needs_evaluation(text: str) -> bool:
    """Whether the scheme of a text decides by a quality function, so that it cannot be made without `evaluate`.

    Raises:
        PolicyError: as `scheme_factory` does.
    """
    from shrinkpoint.schemes.fisher.scheme import Fisher
    from shrinkpoint.schemes.search.scheme import SearchScheme

    factory = scheme_factory(text)
    measures = isinstance(factory.func, type) and issubclass(factory.func, SearchScheme | Fisher)
    return measures and not _FIXED_LOSS_SETTINGS & factory.keywords.keys()


def make_scheme(
    text: str,
    *,
    evaluate: Callable[[Any], Any] | None = None,
    threshold: float = 0.01,
    higher_is_better: bool = False,
) -> Scheme:
    """Makes the scheme of a text; what its text leaves open is taken from the arguments.

    Args:
        evaluate: the quality function of a state; used by schemes that need one.
        threshold: how much worse a checkpoint may be, as a share, for schemes that measure.
        higher_is_better: `evaluate` returns a score, not a loss.

    Raises:
        PolicyError: there is no such scheme, or it needs a quality function and there is none.
    """
    factory = scheme_factory(text)
    if not needs_evaluation(text):
        return factory()
    if evaluate is None:
        expected = "a function of the state that returns a loss"
        raise PolicyError(text, found="nothing to evaluate", expected=expected, do="pass --evaluate module:function")
    from shrinkpoint.schemes.fisher.scheme import Fisher

    limit: dict[str, Any] = {"threshold": threshold}
    if isinstance(factory.func, type) and issubclass(factory.func, Fisher):
        limit = {"budget": f"{100 * threshold:g}%"}
    settings = {**limit, "higher_is_better": higher_is_better, **factory.keywords}
    return factory.func(**settings, evaluate=evaluate)


def _parse_settings(text: str, scheme_class: Callable[..., Scheme], settings_text: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python's parser thinks of an escape in a text
            call = ast.parse(f"f({settings_text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("settings without a name")
        given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
        if len(given) != len(call.keywords):
            raise ValueError("settings in a mapping")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        do = 'write name=value with plain values, such as threshold="1%"; pass functions and objects from Python'
        raise PolicyError(
            "scheme", found=validate.describe_value(text), expected="settings as plain values", do=do
        ) from error
    known = [name for name in inspect.signature(scheme_class).parameters if name not in _OBJECT_SETTINGS]
    for name in given:
        if name not in known:
            found, do = f"{name}= in {validate.describe_value(text)}", "choose one of these"
            if name in _OBJECT_SETTINGS:
                do = "that is no plain value: make the scheme in Python, or pass it on the command line"
            raise PolicyError("scheme", found=found, expected=", ".join(known), do=do)
    return given
