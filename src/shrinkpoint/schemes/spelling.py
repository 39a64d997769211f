"""How a scheme is written: `fisher(relative_error=0.3)`, which `repr` prints and `names.parse` reads."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from shrinkpoint import arguments

MAX_SEED = (1 << 32) - 1


class Spelled:
    """A scheme whose `repr` is its name with the settings that differ from their defaults.

    What is no plain value, such as `evaluate`, stands between < and >: it has no spelling that could be read again.
    """

    id: ClassVar[str]

    @property
    def arguments(self) -> Mapping[str, object]:
        """What it was made with, by the names of its constructor; without what changes nothing that is written."""
        raise NotImplementedError

    def __repr__(self) -> str:
        known = inspect.signature(type(self)).parameters
        mine = {name: value for name, value in self.arguments.items() if name in known}  # a subclass may take others
        said = {name: value for name, value in mine.items() if not _same(value, known[name].default)}
        settings = ", ".join(f"{name}={written(value)}" for name, value in said.items())
        return f"{self.id}({settings})" if settings else self.id


def written(value: object) -> str:
    """A setting as it is read again, or what it is between < and >.

    >>> written("1%"), written({"bins": 8}), written(len), written(object())
    ('"1%"', '{"bins": 8}', '<len>', '<object>')
    """
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{written(key)}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    name = getattr(value, "__name__", None)
    return f"<{name if isinstance(name, str) else type(value).__name__}>"


def seeded(seed: Any) -> int:
    """A seed as generators take it.

    Raises:
        PolicyError: it is none.
    """
    return arguments.whole("seed", seed, least=0, most=MAX_SEED, do="take 0")


def recorder(where: str, value: Any, what: str) -> Any:
    """A recorder of gradients, or None.

    Args:
        what: the attribute that is read of it.

    Raises:
        PolicyError: it is something else.
    """
    if value is None or not (isinstance(value, type) or callable(getattr(value, what, len))):
        return value
    raise arguments.wrong(where, value, "a recorder such as shrinkpoint.Gradients(model)", "make one, and attach it")


def _same(value: object, default: object) -> bool:
    """Whether nothing was said; never `==` of objects that may give anything, such as tensors."""
    plain = str | bool | int | float
    if isinstance(value, plain) and isinstance(default, plain):
        return type(value) is type(default) and value == default
    return value is default
