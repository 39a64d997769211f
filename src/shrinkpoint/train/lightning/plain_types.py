"""Converts values that a Lightning checkpoint may hold, and a state may not, to plain forms and back.

A form is a dict with one key that begins with "shrinkpoint:"; a user's dict that looks like one gets a second colon.
Reading forms builds only values of the types below: nothing is imported, and only members of enums and classes of
callbacks are looked up in modules that are imported already. Containers of OmegaConf become dicts and lists, for good.
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
from shrinkpoint.tensors.tree import map_nest

_PREFIX = "shrinkpoint:"
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
"""Name of a form -> type, conversion to plain values, conversion from plain values."""

_NAME_BY_TYPE = {value_type: name for name, (value_type, _, _) in _PLAIN_TYPES.items()}
_DICT_TYPES: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict}
"""Name -> type of dict; dicts with a key that has a form are stored as pairs of key and value."""
_NAME_BY_DICT_TYPE = {dict_type: name for name, dict_type in _DICT_TYPES.items()}


def to_plain(value: Any) -> Any:
    """Return a nest with a plain form in place of every value that has one; other values are unchanged."""
    return map_nest(value, _to_plain)


def from_plain(value: Any) -> Any:
    """Return the nest from which `to_plain` made a nest.

    Raises:
        MismatchError: the class of an enum is not imported, or lacks the member.
        FormatError: an unknown form, or values that do not fit it.
    """
    return map_nest(value, _from_plain)


def _to_plain(value: Any, depth: int) -> Any:
    omegaconf = sys.modules.get("omegaconf")  # whoever has a config has imported it
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return map_nest(omegaconf.OmegaConf.to_container(value, resolve=False), _to_plain, depth + 1)
    if type(value) in _NAME_BY_DICT_TYPE and any(_has_form(key) for key in value):  # the values are converted already
        pairs = [[map_nest(key, _to_plain, depth + 1), item] for key, item in value.items()]
        return {_PREFIX + _NAME_BY_DICT_TYPE[type(value)]: pairs}
    name = _NAME_BY_TYPE.get(type(value))
    if name is not None:
        return {_PREFIX + name: map_nest(_PLAIN_TYPES[name][1](value), _to_plain, depth + 1)}
    if isinstance(value, Enum) and _enum_member(_enum_path(value)) is value:
        return {f"{_PREFIX}enum": _enum_path(value)}
    if isinstance(value, type) and issubclass(value, Callback):
        return {f"{_PREFIX}callback": [value.__module__, value.__qualname__]}
    name = _form_name(value)
    if name is not None:  # a user's dict that looks like a form
        return {f"{_PREFIX}:{name}": item for item in value.values()}
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
        do = "load it with the release that wrote it, or a newer one"
        raise FormatError("checkpoint", found=f"a value of the form {name!r}", expected=expected, do=do)
    try:
        return _dict_from_pairs(_DICT_TYPES[name], form) if name in _DICT_TYPES else _PLAIN_TYPES[name][2](form)
    except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise _bad_form(name, form) from error


def _form_name(value: Any) -> str | None:
    """The name of a form; None if the value is no form."""
    if type(value) is not dict or len(value) != 1:
        return None
    (key,) = value
    return key.removeprefix(_PREFIX) if type(key) is str and key.startswith(_PREFIX) else None


def _has_form(key: Any) -> bool:
    """Whether a key of a dict has a plain form, such as a class of callbacks: older ones are keys of their states."""
    return type(key) is not str and map_nest(key, _to_plain) is not key


def _dict_from_pairs(dict_type: type[dict[Any, Any]], form: Any) -> dict[Any, Any]:
    result = dict_type((key, value) for key, value in form)
    if len(result) != len(form):
        raise ValueError("a key twice")
    return result


def _bad_form(name: str, form: Any) -> FormatError:
    return CorruptError(
        "checkpoint", found=f"{form!r:.80} as a {name}", expected="what a save writes", do="restore another checkpoint"
    )


def _find_callback(qualified_name: Any) -> type | str:
    """The class of callbacks with a name, the last one that was defined; the name itself if there is none."""
    if type(qualified_name) is not list or [type(item) for item in qualified_name] != [str, str]:
        raise _bad_form("callback", qualified_name)
    # Lightning looks up its callbacks among the result, and warns of states that no callback asks for.
    classes = _iter_subclasses(Callback)
    matches = [cls for cls in classes if [cls.__module__, cls.__qualname__] == qualified_name]
    return matches[-1] if matches else ".".join(qualified_name)


def _iter_subclasses(cls: type[Callback]) -> Iterator[type[Callback]]:
    """Yield a class and all classes that derive from it."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from _iter_subclasses(subclass)


def _enum_path(value: Enum) -> list[str]:
    return [type(value).__module__, type(value).__qualname__, value.name]


def _enum_member(enum_path: Any) -> Enum | None:
    """The member of an enum that is imported already; None if there is none."""
    module, qualified_name, member = enum_path
    obj: Any = sys.modules.get(module)
    for name in qualified_name.split("."):  # in `__dict__` only, so that no code of a module runs
        obj = vars(obj).get(name) if hasattr(obj, "__dict__") else None
    return obj.__members__.get(member) if isinstance(obj, type) and issubclass(obj, Enum) else None


def _require_enum_member(enum_path: Any) -> Enum:
    if type(enum_path) is not list or [type(item) for item in enum_path] != [str] * 3:
        raise _bad_form("enum", enum_path)
    member = _enum_member(enum_path)
    if member is None:
        module, qualified_name, name = enum_path
        found, do = f"{qualified_name}.{name} of {module}", f"import {module} before loading, or save plain values"
        raise MismatchError("checkpoint", found=found, expected="an enum that is imported", do=do)
    return member


def _parse_dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        do = "load it with the torch that wrote it, or a newer one"
        raise FormatError("checkpoint", found=f"the dtype {name!r}", expected="one that this torch has", do=do)
    return dtype
