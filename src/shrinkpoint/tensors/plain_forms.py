"""Gives values that are neither tensors nor JSON a form that a file can hold: a name, and a plain value.

Configurations and states have such values: paths, enums, sets, dates, namespaces. Reading a form builds only values of
the types below. It imports nothing and runs no code of others: an enum, a class of callbacks or a dict of Lightning is
looked up in modules that are imported already.
"""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import torch

PlainForm: TypeAlias = tuple[str, Any]
"""The name of a form, perhaps with a parameter behind a colon, and what is stored."""
_MAX_TEXT_WIDTH = 64
"""Letters of a numpy text that are kept free for longer ones; an array with wider ones is as wide as its longest."""
_MAX_SAME_HASH = 64  # Largest number of keys of one dict with equal hashes; each is compared with all others
_FACTORIES: dict[str, type | None] = {"": None, **{kind.__name__: kind for kind in (list, dict, set, int, float, str)}}
_CALLBACK = ("lightning.pytorch.callbacks.callback", "Callback")
_CONFIG_TYPES = {
    "DictConfig": ("omegaconf.dictconfig", "DictConfig"),
    "ListConfig": ("omegaconf.listconfig", "ListConfig"),
}
"""Classes that a checkpoint of Lightning names, so that hyperparameters become what they were."""
_LIGHTNING_DICTS = {
    "attributes": ("lightning.fabric.utilities.data", "AttributeDict"),
    "parsed": ("lightning.pytorch.utilities.parsing", "AttributeDict"),
}


class _Form(NamedTuple):
    value_type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


_FORMS: dict[str, _Form] = {
    "path": _Form(type(Path()), str, Path),
    "device": _Form(torch.device, str, torch.device),
    "dtype": _Form(torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: _find_dtype(name)),
    "timedelta": _Form(
        timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda x: timedelta(*x)
    ),
    "datetime": _Form(datetime, lambda value: _to_iso(value), lambda plain: _from_iso(datetime, plain)),
    "date": _Form(date, date.isoformat, date.fromisoformat),
    "time": _Form(time, lambda value: _to_iso(value), lambda plain: _from_iso(time, plain)),
    "set": _Form(set, list, lambda items: _unique(set, items)),
    "frozenset": _Form(frozenset, list, lambda items: _unique(frozenset, items)),
    "complex": _Form(complex, lambda value: [value.real, value.imag], lambda parts: complex(*map(_as_float, parts))),
    "range": _Form(range, lambda value: [value.start, value.stop, value.step], lambda ends: range(*ends)),
    "slice": _Form(slice, lambda value: [value.start, value.stop, value.step], lambda ends: slice(*ends)),
}
"""Forms of values without items, by name."""
_NAMES = {form.value_type: name for name, form in _FORMS.items()}


def plain_form(value: Any) -> PlainForm | None:
    """The form of a value without items; None if it has none."""
    name = _NAMES.get(type(value))
    if name is not None:
        return name, _FORMS[name].to_plain(value)
    if isinstance(value, Enum) and _find_member(path := [*_class_path(type(value)), str(value.name)]) is value:
        stored = value.value if type(value.value) in (str, int, float, bool) else None
        return "enum", [*path, stored]
    if isinstance(value, type) and (names := [key for key in _CONFIG_TYPES if value is _find(*_CONFIG_TYPES[key])]):
        return "config_type", names[0]
    if isinstance(value, type) and any(value is kind for kind in _subclasses(_find(*_CALLBACK))):
        return "callback", [value.__module__, value.__qualname__]
    if type(value) is np.ndarray and value.dtype.kind in "US":
        longest = max(map(len, value.ravel().tolist()), default=1)
        width = value.dtype.itemsize // np.dtype(f"{value.dtype.kind}1").itemsize
        width = width if width <= _MAX_TEXT_WIDTH else longest
        return "texts", [value.dtype.kind, width, [*value.shape], value.ravel().tolist()]
    return None


def nest_form(value: Any) -> PlainForm | None:
    """The form of a value whose items may be anything that a state may hold, in a list or a dict; None: none."""
    if type(value) is Namespace:
        return "namespace", dict(vars(value))
    if type(value) is deque:
        return "deque" if value.maxlen is None else f"deque:{value.maxlen}", [*value]
    if type(value) is BytesIO:
        return "buffer", [value.tell(), value.getvalue()]
    if type(value) is defaultdict:
        name = "" if value.default_factory is None else getattr(value.default_factory, "__name__", "?")
        return (f"defaultdict:{name}", dict(value)) if _FACTORIES.get(name, "") is value.default_factory else None
    names = [name for name, place in _LIGHTNING_DICTS.items() if type(value) is _find(*place)]
    return (names[0], dict(value)) if names else None


def ordinary_value(value: Any) -> Any:
    """The ordinary value that a file holds in place of one, for good; the value itself if there is none.

    A named tuple is a tuple, a dataclass and a container of OmegaConf are dicts and lists, a defaultdict with a
    function of the caller's is a dict, and text, numbers or flags of a subclass are text and numbers.
    """
    omegaconf = sys.modules.get("omegaconf")  # whoever has a config has imported it
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return omegaconf.OmegaConf.to_container(value, resolve=False)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "state_dict"):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value) is defaultdict:
        return dict(value)
    kinds: tuple[Any, ...] = (str, bytes, int, float)
    for kind in kinds:
        if isinstance(value, kind) and (isinstance(value, Enum) or not getattr(value, "__dict__", None)):
            return kind(value.value if isinstance(value, Enum) else value)
    return value


def from_form(name: str, plain: Any, spend: Callable[[int], None]) -> Any:
    """The value of a form, which need not be trusted.

    Args:
        spend: is told of memory that is about to be taken; it may refuse.

    Raises:
        LookupError: no form has this name.
        TypeError, ValueError, AttributeError, OverflowError, RuntimeError: what is stored is no such value.
    """
    kind, _, parameter = name.partition(":")
    if name == "texts":
        kind, width, shape, texts = _typed(plain, (str, int, list, list))
        item_type, item_bytes = {"U": (str, 4), "S": (bytes, 1)}[kind]
        longest = max((len(_expect(item_type, text)) for text in texts), default=0)
        if not 0 <= width <= max(_MAX_TEXT_WIDTH, longest) or any(_expect(int, size) < 0 for size in shape):
            raise ValueError("a width that no text has, or a negative size")
        spend(len(texts) * width * item_bytes)
        return np.array(texts, f"{kind}{width}").reshape(shape)
    if name in _READERS:
        return _READERS[name](plain)
    if kind == "deque":
        items = deque(_expect(list, plain), int(parameter) if parameter else None)
        if len(items) != len(plain):
            raise ValueError("a deque with more items than it may have")
        return items
    if kind == "defaultdict":
        return defaultdict(_FACTORIES[parameter], _expect(dict, plain))
    return (_find(*_LIGHTNING_DICTS[name]) or dict)(_expect(dict, plain))


def _enum(plain: Any) -> Any:
    *path, stored = _typed(plain, (str, str, str, object))
    member = _find_member(path)
    return stored if member is None else member


def _callback(plain: Any) -> type | str:
    path = tuple(_typed(plain, (str, str)))
    matches = [cls for cls in _subclasses(_find(*_CALLBACK)) if _class_path(cls) == path]
    return matches[-1] if matches else ".".join(path)  # the class that was defined last


def _config_type(plain: Any) -> type | str:
    return _find(*_CONFIG_TYPES[_expect(str, plain)]) or str(plain)


def _buffer(plain: Any) -> BytesIO:
    position, data = _typed(plain, (int, bytes))
    buffer = BytesIO(data)
    buffer.seek(position)
    return buffer


def _namespace(plain: Any) -> Namespace:
    made = Namespace()
    vars(made).update({_expect(str, key): item for key, item in _expect(dict, plain).items()})  # no attribute is set
    return made


def form_items(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """The (key, item) pairs of a value with a form that has items and that is no dict; None for others."""
    if type(value) is Namespace:
        return iter(vars(value).items())
    if type(value) is deque:
        return enumerate(value)
    return enumerate((value.tell(), value.getvalue())) if type(value) is BytesIO else None


def _find(module: str, qualified_name: str) -> type | None:
    """A class in a module that is imported; None if there is none. No code runs: only `__dict__` is looked at."""
    found: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def _subclasses(cls: type | None) -> Iterator[type]:
    if cls is not None:
        yield cls
        subclasses: list[type] = type.__subclasses__(cls)
        for subclass in subclasses:
            yield from _subclasses(subclass)


def _class_path(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _find_member(path: list[str]) -> Enum | None:
    """The member of an enum that is imported; None if there is none."""
    module, qualified_name, name = path
    found = _find(module, qualified_name)
    return found.__members__.get(name) if found is not None and issubclass(found, Enum) else None


def _find_dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(_expect(str, name))
    return _expect(torch.dtype, dtype)  # type: ignore[no-any-return]


def _to_iso(value: datetime | time) -> Any:
    key = value.tzinfo.key if type(value.tzinfo) is ZoneInfo else None
    return [value.isoformat(), value.fold, *([key] if key else [])] if value.fold or key else value.isoformat()


def _from_iso(kind: type[datetime] | type[time], plain: Any) -> datetime | time:
    text, fold, *keys = plain if type(plain) is list and 2 <= len(plain) <= 3 else (plain, 0)
    made = kind.fromisoformat(text).replace(fold=_expect(int, fold))
    with suppress(ZoneInfoNotFoundError, OSError):  # where this machine lacks the zone, the offset stays
        for key in keys:
            made = made.replace(tzinfo=ZoneInfo(_expect(str, key)))
    return made


def _unique(kind: type, items: Any) -> Any:
    if has_colliding_keys(_expect(list, items)):
        raise ValueError("items made to collide")
    made = kind(items)
    if len(made) != len(items):
        raise ValueError("an item twice")
    return made


def has_colliding_keys(keys: Iterable[Any]) -> bool:
    """True if so many keys have one hash that to make a dict or a set of them would take long."""
    return max(Counter(map(hash, keys)).values(), default=0) > _MAX_SAME_HASH


def _as_float(value: Any) -> float:
    return _expect(float, value)  # type: ignore[no-any-return]


def _typed(values: Any, kinds: tuple[type, ...]) -> list[Any]:
    if len(_expect(list, values)) != len(kinds):
        raise ValueError(f"{len(values)} items")
    return [value if kind is object else _expect(kind, value) for kind, value in zip(kinds, values, strict=True)]


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: form.from_plain for name, form in _FORMS.items()},
    "enum": _enum,
    "callback": _callback,
    "config_type": _config_type,
    "buffer": _buffer,
    "namespace": _namespace,
}
"""By the name of a form without a parameter."""
