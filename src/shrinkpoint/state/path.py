"""Paths inside a state, and the tensor names made from them."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

Path: TypeAlias = tuple[Any, ...]
"""Keys of dicts and indices of lists, outermost first."""

_UNSAFE = re.compile("[/%\x00-\x1f\x7f\ud800-\udfff]")


def name_of(path: Path) -> str:
    """The tensor name of a path: its keys joined with "/", "/" and "%" and unprintable characters %-escaped.

    Names never begin with "~" and are never "__metadata__": the container has other uses for both. Different paths
    may give one name (keys 1 and "1"); the writer then picks another and writes it down.

    >>> name_of(("optimizer", "state", 0, "exp_avg"))
    'optimizer/state/0/exp_avg'
    >>> name_of(("a/b", "", "100%"))
    'a%2Fb/%/100%25'
    """
    name = "/".join(_segment(key) for key in path) or "state"
    if name.startswith("~") or name == "__metadata__":
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return name


def _segment(key: Any) -> str:
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", str(key)) or "%"


def where_of(path: Path) -> str:
    """A path as it is shown to people in error messages.

    >>> where_of(("optimizer", "state", 0, "exp_avg"))
    "state['optimizer']['state'][0]['exp_avg']"
    """
    return "state" + "".join(f"[{key!r}]" for key in path)
