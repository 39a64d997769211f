"""Walks over the tensors of any nest, such as a batch, a model's output or several models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def iter_tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping | list | tuple):
        for item in nest.values() if isinstance(nest, Mapping) else nest:
            yield from iter_tensors(item)


def map_nested_tensors(nest: Any, function: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The nest with `function` of each tensor, or value of another `kind`, in its place; other values stay."""
    if isinstance(nest, kind):
        return function(nest)
    if isinstance(nest, Mapping):
        items = {key: map_nested_tensors(item, function, kind) for key, item in nest.items()}
        nest_type: Any = type(nest)
        if nest_type is dict:
            return items
        try:
            return nest_type(**items)  # as transformers' ModelOutput
        except TypeError:
            try:
                return nest_type(items)  # as its BatchEncoding
            except TypeError:
                return items
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_nested_tensors(item, function, kind) for item in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map_nested_tensors(item, function, kind) for item in nest)
    return nest
