"""Walks and maps the tensors of a nest of mappings, lists and tuples: a batch, a module's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def iter_tensors(nest: Any) -> Iterator[Tensor]:
    """All tensors of a nest, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping | list | tuple):
        for item in nest.values() if isinstance(nest, Mapping) else nest:
            yield from iter_tensors(item)


def map_nested_tensors(nest: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The nest with `function` of each tensor in its place, in order; other values stay as they are."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return _as_type_of(nest, {key: map_nested_tensors(item, function) for key, item in nest.items()})
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_nested_tensors(item, function) for item in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map_nested_tensors(item, function) for item in nest)
    return nest


def _as_type_of(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Items in a mapping of the type of another one; a dict, if that type takes none."""
    kind: Any = type(mapping)
    if kind is dict:
        return items
    try:
        return kind(**items)  # as transformers' ModelOutput
    except TypeError:
        try:
            return kind(items)  # as its BatchEncoding
        except TypeError:
            return items
