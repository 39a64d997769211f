"""The tensors of a file as a tree: by role, then by the parts of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shrinkpoint.report.files import TensorRow

_MAX_LEAVES = 1500
"""More tensors than a page shows boxes for: the smallest of each role become one."""
_SEPARATOR = re.compile(r"[/.]")
ROLE_NAMES = {
    "parameter": "weights",
    "moment1": "first moments",
    "moment2": "second moments",
    "master": "master weights",
    "buffer": "buffers",
    "gradient": "gradients",
    "activation": "activations",
    "other": "other",
}


@dataclass
class Node:
    """A box of the map; boxes lie within that of their parent.

    Attributes:
        id: the path of names from the role on; "" is the whole file.
        label: the last of them.
        parent: the id of the parent.
        raw_bytes, stored_bytes: of all tensors in it.
    """

    id: str
    label: str
    parent: str
    raw_bytes: int = 0
    stored_bytes: int = 0


def tensor_tree(rows: Sequence[TensorRow]) -> list[Node]:
    """The boxes of all tensors with any bytes; parents come before their children."""
    largest = sorted((row for row in rows if row.raw_bytes), key=lambda row: -row.raw_bytes)
    nodes: dict[str, Node] = {"": Node("", "all", "")}
    for index, row in enumerate(largest):
        names = _SEPARATOR.split(row.name) if index < _MAX_LEAVES else ["smaller tensors"]
        for node in _path(nodes, [ROLE_NAMES.get(row.role, row.role), *filter(None, names)]):
            node.raw_bytes += row.raw_bytes
            node.stored_bytes += row.stored_bytes
    return [*nodes.values()]


def _path(nodes: dict[str, Node], names: Iterable[str]) -> Iterable[Node]:
    """The boxes from the whole file to that of a tensor; those that are missing are added."""
    yield nodes[""]
    parent = ""
    for name in names:
        id = f"{parent}/{name}"
        if id not in nodes:
            nodes[id] = Node(id, name, parent)
        yield nodes[id]
        parent = id
