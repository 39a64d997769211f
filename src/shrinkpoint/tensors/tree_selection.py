"""Selects leaves of a state's tree by their paths, so that only their tensors need be decoded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from typing import Any, NamedTuple, TypeAlias

from shrinkpoint.tensors.info import JSON, is_nest_form
from shrinkpoint.tensors.names import StatePath, format_key, tensor_name, unique_name
from shrinkpoint.tensors.tree import MAX_DEPTH
from shrinkpoint.tensors.tree_decoder import TreeDecoder

MatchPath: TypeAlias = Callable[[StatePath], bool]
_REFERENCE_TAGS = ("$t", "$p", "$q", "$B")
_ARRAY_TAGS = ("$t", "$p", "$q", "$n")
_DICT_TAGS, _ITEM_TAGS = ("$o", "$c"), ("$u", "$z")
_ABSENT: Any = object()


class SelectedLeaves(NamedTuple):
    """The leaves of a tree that were selected."""

    tree: JSON  # the tree without all others. Containers that lose all their leaves are gone; items of lists move up.
    tensors: frozenset[str]  # names of the stored tensors that the leaves refer to
    names: tuple[str, ...]  # of every leaf of the whole tree, selected or not, as `tensor_name` gives them
    is_empty: bool  # nothing was selected


def match_patterns(patterns: Sequence[str]) -> MatchPath:
    """A function that says whether a path matches one of several patterns, as of `fnmatch`.

    A pattern is compared with the keys joined by "." and with the tensor's name, in which they are joined by "/".

    >>> matches = match_patterns(["model.*.bias", "optimizer/state/0"])
    >>> [matches(path) for path in (("model", "head.bias"), ("optimizer", "state", 0), ("model",))]
    [True, True, False]
    """
    regex = re.compile("|".join(translate(pattern) for pattern in patterns))

    def matches(path: StatePath) -> bool:
        return bool(regex.match(".".join(map(format_key, path))) or regex.match(tensor_name(path)))

    return matches


def is_selected(path: StatePath, matches: MatchPath) -> bool:
    """True if a path, or that of a container that it is in, is selected."""
    return any(matches(path[:length]) for length in range(1, len(path) + 1))


def select_leaves(tree: JSON, matches: MatchPath, where: str) -> SelectedLeaves:
    """Select leaves of a tree, which need not be trusted.

    Args:
        matches: True if a path is selected; that of a dict, list or tuple selects everything in it.
        where: the file, for messages.

    Raises:
        CorruptError: a key is invalid. (What else is wrong, decoding the result says.)
    """
    selector = _Selector(matches, where)
    selected = selector.select(tree, (), False)
    is_empty = selected is _ABSENT
    return SelectedLeaves({} if is_empty else selected, frozenset(selector.tensors), tuple(selector.names), is_empty)


class TreeLeaf(NamedTuple):
    """One leaf of a tree."""

    tree: JSON  # of the leaf alone; a reference in it has the name of its tensor
    tensor: str  # the name of the stored tensor that it refers to; "" for a plain value
    is_array: bool  # it is a tensor or an array, and no plain value


def list_leaves(tree: JSON, where: str) -> dict[str, TreeLeaf]:
    """The leaves of a tree, which need not be trusted, by the names that `named_leaves` gives to its state's.

    Raises:
        CorruptError: a key is invalid. (What else is wrong, decoding says.)
    """
    lister = _LeafLister(lambda path: True, where)
    lister.select(tree, (), True)
    return lister.leaves


class _Selector:
    def __init__(self, matches: MatchPath, where: str) -> None:
        self._matches, self._decoder = matches, TreeDecoder({}, tie=False, where=where)
        self.tensors: set[str] = set()
        self.names: list[str] = []

    def select(self, tree: JSON, path: StatePath, is_chosen: bool) -> Any:
        """The selected part of a subtree; `_ABSENT` if it has none."""
        is_chosen = is_chosen or (bool(path) and self._matches(path))
        if len(path) > MAX_DEPTH:
            return tree  # decoding it raises
        if type(tree) is list:
            return self._items(tree, path, is_chosen)
        if type(tree) is not dict:
            return self._leaf(tree, path, is_chosen)
        tag = next(iter(tree), "")
        body = tree[tag] if len(tree) == 1 and tag.startswith("$") else None
        if body is None or tag == "$d":
            return self._dict(tree, path, is_chosen)
        if tag in _DICT_TAGS and type(body) is dict:
            return _tagged(tag, self._dict(body, path, is_chosen))
        if tag == "$m" and type(body) is list and len(body) == 2 and type(body[0]) is dict:
            ordered = self._dict(body[0], path, is_chosen)
            return _ABSENT if ordered is _ABSENT else {tag: [ordered, body[1]]}
        if tag in _ITEM_TAGS and type(body) is list:
            return _tagged(tag, self._items(body, path, is_chosen))
        if tag == "$x" and is_nest_form(body):
            if body[0] == "buffer":  # all of it, or nothing
                is_chosen = is_chosen or any(self._matches((*path, index)) for index in (0, 1))
            selected = self.select(body[1], path, is_chosen)
            return _ABSENT if selected is _ABSENT else {tag: [body[0], selected]}
        return self._leaf(tree, path, is_chosen, tag, body)

    def _leaf(self, tree: JSON, path: StatePath, is_chosen: bool, tag: str = "", body: JSON = None) -> Any:
        self.names.append(tensor_name(path))
        if not is_chosen and (path or not self._matches(path)):
            return _ABSENT
        if tag in _REFERENCE_TAGS:
            return {tag: self._reference(body, path)}
        if tag == "$n" and type(body) is list and len(body) == 2:
            return {tag: [body[0], self._reference(body[1], path)]}
        return tree

    def _reference(self, reference: JSON, path: StatePath) -> JSON:
        """A reference with the name of its tensor, which the path no longer tells where items of lists move up."""
        if type(reference) is not list:
            return reference
        name = reference[0] if reference else tensor_name(path)
        if type(name) is str:
            self.tensors.add(name)
        return reference or [name]

    def _items(self, items: list[JSON], path: StatePath, is_chosen: bool) -> Any:
        selected = [self.select(item, (*path, index), is_chosen) for index, item in enumerate(items)]
        selected = [item for item in selected if item is not _ABSENT]
        return selected if selected or is_chosen else _ABSENT

    def _dict(self, tree: dict[str, JSON], path: StatePath, is_chosen: bool) -> Any:
        if list(tree) == ["$d"]:
            return self._pairs(tree["$d"], path, is_chosen)
        selected = {key: self.select(item, (*path, key), is_chosen) for key, item in tree.items()}
        selected = {key: item for key, item in selected.items() if item is not _ABSENT}
        return selected if selected or is_chosen else _ABSENT

    def _pairs(self, pairs: JSON, path: StatePath, is_chosen: bool) -> Any:
        if type(pairs) is not list or not all(type(pair) is list and len(pair) == 2 for pair in pairs):
            return {"$d": pairs}  # decoding it raises
        selected = [
            [key, self.select(item, (*path, self._decoder.decode_key(key, path)), is_chosen)] for key, item in pairs
        ]
        selected = [pair for pair in selected if pair[1] is not _ABSENT]
        return {"$d": selected} if selected or is_chosen else _ABSENT


class _LeafLister(_Selector):
    def __init__(self, matches: MatchPath, where: str) -> None:
        super().__init__(matches, where)
        self.leaves: dict[str, TreeLeaf] = {}

    def _leaf(self, tree: JSON, path: StatePath, is_chosen: bool, tag: str = "", body: JSON = None) -> Any:
        selected = super()._leaf(tree, path, True, tag, body)
        reference = selected[tag] if tag in _REFERENCE_TAGS else None
        if tag == "$n" and type(selected[tag]) is list and len(selected[tag]) == 2:
            reference = selected[tag][1]
        name = reference[0] if type(reference) is list and reference else ""
        leaf = TreeLeaf(selected, name if type(name) is str else "", bool(tag) and tag in _ARRAY_TAGS)
        self.leaves[unique_name(tensor_name(path), self.leaves)] = leaf
        return selected


def _tagged(tag: str, selected: Any) -> Any:
    return _ABSENT if selected is _ABSENT else {tag: selected}
