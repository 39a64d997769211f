"""Values that a Lightning checkpoint may hold and a state does not: written in a plain form, and made again from it.

A form is a dict with one key, which begins with "shrinkpoint:"; a dict that only looks like one gets a second colon.
Reading one builds values of the types below and of no other: nothing is imported, and of what is imported only members
of enums and classes of callbacks are looked up.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import AttributeDict as PrintedDict

from shrinkpoint.errors import CorruptError, FormatError, MismatchError

_PREFIX = "shrinkpoint:"
_MAX_DEPTH = 64
"""Deeper nests than a state may have are left as they are, for the state to refuse; also those without an end."""

_PLAIN_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attributes": (AttributeDict, dict, AttributeDict),
    "parsed": (PrintedDict, dict, PrintedDict),
    "namespace": (Namespace, lambda value: dict(vars(value)), lambda form: Namespace(**form)),
    "path": (type(Path()), str, Path),
    "device": (torch.device, str, torch.device),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda form: _parse_dtype(form)),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda f: timedelta(*f)),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "complex": (complex, lambda value: [value.real, value.imag], lambda form: complex(*form)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda form: range(*form)),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], lambda form: slice(*form)),
}
"""Name -> type, its plain form, and how it is made again."""

_NAME_BY_TYPE = {kind: name for name, (kind, _, _) in _PLAIN_TYPES.items()}
_DICT_TYPES: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict}
"""Name -> kind of dict, for those of which a key has a form: pairs of key and value."""
_NAME_BY_DICT_TYPE = {kind: name for name, kind in _DICT_TYPES.items()}


def to_plain(value: Any) -> Any:
    """The same nest with a plain form for every value that has one; what cannot be stored stays as it is."""
    return _map_nest(value, _to_plain, 0)


def from_plain(value: Any) -> Any:
    """The inverse of `plain`.

    Raises:
        MismatchError: the class of an enum is not imported, or lacks the member.
        FormatError: a form that this release does not know, or does not write so.
    """
    return _map_nest(value, _from_plain, 0)


def _map_nest(value: Any, convert: Callable[[Any, int], Any], depth: int) -> Any:
    """`convert` of a value whose parts are mapped; a container of which nothing changes is the same object."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        return value
    if kind in (dict, OrderedDict):
        return convert(_map_dict(value, convert, depth), depth)
    if kind in (list, tuple):
        parts = [_map_nest(part, convert, depth + 1) for part in value]
        changed = any(new is not old for new, old in zip(parts, value, strict=True))
        return kind(parts) if changed else value
    return convert(value, depth)


def _map_dict(value: dict[Any, Any], convert: Callable[[Any, int], Any], depth: int) -> dict[Any, Any]:
    parts = {key: _map_nest(part, convert, depth + 1) for key, part in value.items()}
    if all(parts[key] is part for key, part in value.items()):
        return value
    made = type(value)(parts)
    if hasattr(value, "_metadata"):  # of a module's state_dict
        made._metadata = value._metadata  # type: ignore[attr-defined]
    return made


def _to_plain(value: Any, depth: int) -> Any:
    if type(value) in _NAME_BY_DICT_TYPE and any(_has_form(key) for key in value):  # the values are mapped already
        pairs = [[_map_nest(key, _to_plain, depth + 1), part] for key, part in value.items()]
        return {_PREFIX + _NAME_BY_DICT_TYPE[type(value)]: pairs}
    name = _NAME_BY_TYPE.get(type(value))
    if name is not None:
        return {_PREFIX + name: _map_nest(_PLAIN_TYPES[name][1](value), _to_plain, depth + 1)}
    if isinstance(value, Enum) and _enum_member(_enum_path(value)) is value:
        return {f"{_PREFIX}enum": _enum_path(value)}
    if isinstance(value, type) and issubclass(value, Callback):
        return {f"{_PREFIX}callback": [value.__module__, value.__qualname__]}
    name = _form_name(value)
    if name is not None:  # no form, only called like one
        return {f"{_PREFIX}:{name}": part for part in value.values()}
    return value


def _from_plain(value: Any, depth: int) -> Any:
    name = _form_name(value)
    if name is None:
        return value
    (form,) = value.values()
    if name.startswith(":"):
        return {_PREFIX + name[1:]: form}
    if name == "enum":
        return _require_enum_member(form)
    if name == "callback":
        return _find_callback(form)
    if name not in _PLAIN_TYPES and name not in _DICT_TYPES:
        expected = ", ".join([*_PLAIN_TYPES, *_DICT_TYPES])
        raise FormatError("checkpoint", found=f"a value of the form {name!r}", expected=expected)
    try:
        return _dict_from_pairs(_DICT_TYPES[name], form) if name in _DICT_TYPES else _PLAIN_TYPES[name][2](form)
    except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise _bad_form(name, form) from error


def _form_name(value: Any) -> str | None:
    if type(value) is not dict or len(value) != 1:
        return None
    (key,) = value
    return key.removeprefix(_PREFIX) if type(key) is str and key.startswith(_PREFIX) else None


def _has_form(key: Any) -> bool:
    """Whether a key of a dict has one, such as the types by which older callbacks tell Lightning their states."""
    return type(key) is not str and _map_nest(key, _to_plain, 0) is not key


def _dict_from_pairs(kind: type[dict[Any, Any]], form: Any) -> dict[Any, Any]:
    made = kind((key, part) for key, part in form)
    if len(made) != len(form):
        raise ValueError("a key twice")
    return made


def _bad_form(name: str, form: Any) -> FormatError:
    do = "restore another checkpoint"
    return CorruptError("checkpoint", found=f"{form!r:.80} as a {name}", expected="what a save writes", do=do)


def _find_callback(qualified_name: Any) -> type | str:
    """The class of callbacks of that name, the last one that was defined; where there is none, its name.

    Lightning looks for its callbacks among what is found, and warns of what nobody asks for.
    """
    if type(qualified_name) is not list or [type(part) for part in qualified_name] != [str, str]:
        raise _bad_form("callback", qualified_name)
    found = [one for one in _iter_subclasses(Callback) if [one.__module__, one.__qualname__] == qualified_name]
    return found[-1] if found else ".".join(qualified_name)


def _iter_subclasses(kind: type[Callback]) -> Iterator[type[Callback]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _iter_subclasses(below)


def _enum_path(value: Enum) -> list[str]:
    return [type(value).__module__, type(value).__qualname__, value.name]


def _enum_member(enum_path: Any) -> Enum | None:
    """The member of an enum that is imported already; no attribute is asked for, so no code of a module runs."""
    module, path, name = enum_path
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found.__members__.get(name) if isinstance(found, type) and issubclass(found, Enum) else None


def _require_enum_member(enum_path: Any) -> Enum:
    if type(enum_path) is not list or [type(part) for part in enum_path] != [str] * 3:
        raise _bad_form("enum", enum_path)
    found = _enum_member(enum_path)
    if found is None:
        module, path, name = enum_path
        do = f"import {module} before loading, or save plain values"
        raise MismatchError(
            "checkpoint", found=f"{path}.{name} of {module}", expected="an enum that is imported", do=do
        )
    return found


def _parse_dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise FormatError("checkpoint", found=f"the dtype {name!r}", expected="one that this torch has")
    return found
