"""Schemes by name, and from texts such as "fisher(relative_error=0.3)"."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from shrinkpoint import schemes, validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme

_REGISTRY = {
    "lossless": "Lossless",
    "inshrinkerator": "Inshrinkerator",
    "fisher": "Fisher",
    "lc-checkpoint": "LCCheckpoint",
    "scar": "SCAR",
    "topn": "TOPN",
}
"""Id -> class in `shrinkpoint.schemes`, which imports a module when a class of it is asked for."""
_LABORATORY = ("qd", "cnr", "gobo", "excp")  # Ids of schemes that the package shrinkpoint-lab adds, if it is installed

_OBJECT_SETTINGS = ("activations", "calibrate", "evaluate", "gradients", "group", "progress", "space")
"""Settings that cannot be written as text."""
MAX_TEXT = 4096  # Maximum number of characters of a text: deeper nesting could overflow Python's parser
_FIXED_LOSS_SETTINGS = frozenset({"config", "nats", "ratio", "relative_error"})
"""Settings that decide what a scheme quantizes, so that it needs no `evaluate`."""
_PATTERN = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_MEASURED = "sp.Fisher(evaluate=sp.RecentBatches(loss_of_batch))"
_UNMEASURED = '"fisher(relative_error=0.3)"'
_EXPECTED = 'a scheme such as shrinkpoint.Fisher(relative_error=0.3), or its text such as "fisher(relative_error=0.3)"'


def get_scheme(scheme: object) -> Scheme:
    """Return a scheme from its text (see `scheme_factory`); a scheme itself is returned unchanged.

    Raises:
        PolicyError: it is neither a scheme nor a valid text, or the text promises a rise that nothing measures.
    """
    if isinstance(scheme, str):
        factory = scheme_factory(scheme)
        if lacks_evaluation(factory) and "terms" not in factory.keywords:
            do = f"pass {_MEASURED}, or {_UNMEASURED}, which measures nothing"
            raise PolicyError(f'scheme "{scheme}"', found="nothing that measures the loss", expected="evaluate=", do=do)
        parsed: Scheme = factory()
        return parsed
    if scheme is None:
        do = 'leave scheme= out, or pass "lossless", for exact values'
        raise PolicyError("scheme", found="None", expected=_EXPECTED, do=do)
    if isinstance(scheme, type) and hasattr(scheme, "id"):
        found, do = validate.describe_value(scheme), f"pass {scheme.__name__}(...)"
        raise PolicyError("scheme", found=found, expected="an instance of it", do=do)
    has_methods = all(callable(getattr(scheme, method, None)) for method in ("quantize", "encode"))
    if isinstance(scheme, type) or not has_methods:
        raise validate.argument_error("scheme", scheme, _EXPECTED, "pass a scheme, or its text")
    return cast(Scheme, scheme)


def scheme_factory(text: str) -> partial[Scheme]:
    """Return the factory of the scheme that a text names: a name, or a name with settings, as `repr` prints it.

    Settings are written as in Python, with plain values only; nothing is executed. Settings without a plain value, such
    as `evaluate`, can be passed to the factory.

    Raises:
        PolicyError: the text has another form, or an unknown name, setting or value.

    >>> scheme_factory("fisher(relative_error=0.3)")(), scheme_factory("inshrinkerator")(threshold="1%", evaluate=len)
    (fisher(relative_error=0.3), inshrinkerator(threshold=0.01, evaluate=<len>))
    """
    match = _PATTERN.fullmatch(text) if len(text) <= MAX_TEXT else None
    if match is None:
        expected = 'a name, or a name with settings: "fisher(relative_error=0.3)"'
        raise validate.argument_error("scheme", text, expected, "pass such a text")
    scheme_class = _find_class(match[1], text)
    return partial(scheme_class, **_parse_settings(text, scheme_class, match[2] or ""))


def _find_class(name: str, text: str) -> Callable[..., Scheme]:
    if name in _REGISTRY:
        return cast(Callable[..., Scheme], getattr(schemes, _REGISTRY[name]))
    added = schemes.added_schemes()
    if name in added:
        return cast(Callable[..., Scheme], added[name].load())
    known = dict.fromkeys((*_REGISTRY, *(entry.name for entry in added.values())))
    do = "choose one of them"
    if name in _LABORATORY:
        do = f"install the laboratory, which has {name!r}: pip install ./lab, in a checkout of shrinkpoint"
    raise validate.argument_error("scheme", text, f"one of {', '.join(map(repr, known))}", do)


def needs_evaluation(text: str) -> bool:
    """Return whether the scheme of a text cannot be made without `evaluate`.

    Raises:
        PolicyError: the text is not valid.
    """
    from shrinkpoint.schemes.fisher.scheme import Fisher
    from shrinkpoint.schemes.search.scheme import SearchScheme

    factory = scheme_factory(text)
    can_evaluate = isinstance(factory.func, type) and issubclass(factory.func, SearchScheme | Fisher)
    return can_evaluate and not _FIXED_LOSS_SETTINGS & factory.keywords.keys()


def lacks_evaluation(factory: Callable[..., Any]) -> bool:
    """Return whether a class, or a partial of it, makes a `Fisher` that measures a loss, without `evaluate`.

    Nothing is imported for it: every manager asks, and most of them are lossless.
    """
    scheme_class = factory.func if isinstance(factory, partial) else factory
    settings = factory.keywords if isinstance(factory, partial) else {}
    given = {name for name, value in settings.items() if value is not None}
    is_fisher: bool = getattr(scheme_class, "counts_terms", False)
    return is_fisher and not given & {*_FIXED_LOSS_SETTINGS, "evaluate"}


def make_scheme(
    text: str,
    *,
    evaluate: Callable[[Any], Any] | None = None,
    threshold: float = 0.01,
    higher_is_better: bool = False,
    calibrate: Callable[[Any], Any] | None = None,
) -> Scheme:
    """Return the scheme of a text; settings that the text does not give are taken from the arguments.

    Args:
        evaluate: function of a state that returns its loss or score; used by schemes that need one.
        threshold: largest rise of the loss, or fall of the score, for schemes that evaluate; 0.01 is 1%.
        higher_is_better: `evaluate` returns a score, not a loss.
        calibrate: runs the model of a state, for schemes that round with error feedback.

    Raises:
        PolicyError: the text is not valid, or the scheme needs `evaluate` and there is none, or takes no `calibrate`.
    """
    factory = scheme_factory(text)
    if calibrate is not None:
        if "calibrate" not in inspect.signature(factory.func).parameters:
            raise PolicyError(text, found="calibrate", expected="the scheme fisher", do="leave calibrate out")
        factory = partial(factory, calibrate=calibrate)
    if not needs_evaluation(text):
        return factory()
    if evaluate is None:
        expected, do = "a function of the state that returns a loss", "pass --evaluate module:function"
        raise PolicyError(text, found="nothing to evaluate", expected=expected, do=do)
    from shrinkpoint.schemes.fisher.scheme import Fisher

    limit: dict[str, Any] = {"threshold": threshold}
    if isinstance(factory.func, type) and issubclass(factory.func, Fisher):
        limit = {"budget": f"{100 * threshold:g}%"}
    settings = {**limit, "higher_is_better": higher_is_better, **factory.keywords}
    return factory.func(**settings, evaluate=evaluate)


def _parse_settings(text: str, scheme_class: Callable[..., Scheme], settings_text: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's parser warns of unknown escapes
            call = ast.parse(f"f({settings_text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("settings without a name")
        keywords = [keyword for keyword in call.keywords if keyword.arg is not None]
        settings = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
        if len(settings) != len(call.keywords):
            raise ValueError("settings in a mapping")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        do = 'write name=value with plain values, such as threshold="1%"; pass functions and objects from Python'
        found = validate.describe_value(text)
        raise PolicyError("scheme", found=found, expected="settings as plain values", do=do) from error
    names = [name for name in inspect.signature(scheme_class).parameters if name not in _OBJECT_SETTINGS]
    for name in settings:
        if name not in names:
            advice = "choose one of them"
            if name in _OBJECT_SETTINGS:
                advice = f"{name} is no plain value: make the scheme in Python, or use the option of a command"
            found = f"{name}= in {validate.describe_value(text)}"
            raise PolicyError("scheme", found=found, expected=f"one of {', '.join(names)}", do=advice)
    return settings
