"""What code of the user's may change in its objects besides weights: counts, lists of outputs, nested dicts of them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

_CONTAINER_TYPES = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
_MAX_NESTED = 64
"""A longer list is one of many equal things, such as data; what is in them is not looked at."""


class AttributeSnapshot:
    """The attributes of objects, which can be put back: what they are bound to, and what is in the nests they hold.

    No copies of tensors. An attribute that did not exist is left.

    Args:
        owners: objects with a `__dict__`.
        exclude: names of attributes that are left alone.
    """

    def __init__(self, owners: Iterable[Any], *, exclude: Iterable[str] = ()) -> None:
        skipped = {*exclude}
        self._attributes = [(vars(one), {k: v for k, v in vars(one).items() if k not in skipped}) for one in owners]
        self._containers: dict[int, tuple[Any, Any]] = {}
        for _, attributes in self._attributes:
            for value in attributes.values():
                self._record_containers(value)

    def restore(self) -> None:
        """Can be repeated."""
        for now, before in self._attributes:
            now.update({name: value for name, value in before.items() if now.get(name, self) is not value})
        for nest, before in self._containers.values():
            if not _has_same_items(nest, before):
                nest.clear()
                (nest.extend if isinstance(nest, list | deque) else nest.update)(before)

    def _record_containers(self, obj: Any) -> None:
        if type(obj) not in (*_CONTAINER_TYPES, tuple) or id(obj) in self._containers:
            return
        if type(obj) is not tuple:
            self._containers[id(obj)] = (obj, obj.copy())
        if isinstance(obj, dict) or len(obj) <= _MAX_NESTED:
            for part in obj.values() if isinstance(obj, dict) else obj:
                self._record_containers(part)


def _has_same_items(container: Any, copy: Any) -> bool:
    """Whether the same objects are in it, in the same order."""
    return len(container) == len(copy) and all(
        x is y for x, y in zip(_iter_items(container), _iter_items(copy), strict=True)
    )


def _iter_items(container: Any) -> Iterator[Any]:
    if not isinstance(container, dict):
        return iter(container)
    return (part for pair in container.items() for part in pair)
