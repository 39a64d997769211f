"""What code of the user's may change in its objects besides weights: counts, lists of outputs, nested dicts of them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

_KINDS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
_SOME = 64
"""A longer list is one of many equal things, such as data; what is in them is not looked at."""


class Attributes:
    """The attributes of objects, which can be put back: what they are bound to, and what is in the nests they hold.

    No copies of tensors. An attribute that did not exist is left.

    Args:
        owners: objects with a `__dict__`.
        without: names of attributes that are left alone.
    """

    def __init__(self, owners: Iterable[Any], *, without: Iterable[str] = ()) -> None:
        skipped = {*without}
        self._bound = [(vars(one), {k: v for k, v in vars(one).items() if k not in skipped}) for one in owners]
        self._nests: dict[int, tuple[Any, Any]] = {}
        for _, attributes in self._bound:
            for value in attributes.values():
                self._keep(value)

    def put_back(self) -> None:
        """Can be repeated."""
        for now, before in self._bound:
            now.update({name: value for name, value in before.items() if now.get(name, self) is not value})
        for nest, before in self._nests.values():
            if not _alike(nest, before):
                nest.clear()
                (nest.extend if isinstance(nest, list | deque) else nest.update)(before)

    def _keep(self, value: Any) -> None:
        if type(value) not in (*_KINDS, tuple) or id(value) in self._nests:
            return
        if type(value) is not tuple:
            self._nests[id(value)] = (value, value.copy())
        if isinstance(value, dict) or len(value) <= _SOME:
            for part in value.values() if isinstance(value, dict) else value:
                self._keep(part)


def _alike(nest: Any, before: Any) -> bool:
    """Whether the same objects are in it, in the same order."""
    return len(nest) == len(before) and all(x is y for x, y in zip(_parts(nest), _parts(before), strict=True))


def _parts(nest: Any) -> Iterator[Any]:
    if not isinstance(nest, dict):
        return iter(nest)
    return (part for pair in nest.items() for part in pair)
