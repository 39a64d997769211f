"""The tensors of a file as a tree: by role, then by the parts of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shrinkpoint import humanize
from shrinkpoint.report.files import TensorRow

_MAX_LEAVES = 1500
"""More tensors than a page shows boxes for: the smallest of each role become one."""
_MIN_SHARE = 4e-4
"""Of the map: a smaller box is not drawn; its parent's bytes contain it."""
_WIDTH, _HEIGHT, _LABEL = 1000, 480, 26
"""Of a map and of the label above the boxes in a box, in the units of its layout."""
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


@dataclass
class Box:
    """A box as the page draws it.

    Attributes:
        label: its name.
        tip: its path and its bytes.
        style: its place and size in its parent, in percent, as CSS.
        role: number of its role, which is its color.
        boxes: in it.
    """

    label: str
    tip: str
    style: str
    role: int
    boxes: list[Box] = field(default_factory=list)


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


def tensor_boxes(rows: Sequence[TensorRow]) -> list[Box]:
    """The boxes of roles, whose areas are stored bytes, with those of layers and tensors in them."""
    nodes = tensor_tree(rows)
    children: dict[str, list[Node]] = {}
    for node in nodes[1:]:
        children.setdefault(node.parent, []).append(node)
    return _boxes("", children, _WIDTH, _HEIGHT, nodes[0].stored_bytes * _MIN_SHARE)


def _boxes(parent: str, children: dict[str, list[Node]], width: float, height: float, least: float) -> list[Box]:
    nodes = sorted((node for node in children.get(parent, ()) if node.stored_bytes > least), key=_by_size)
    boxes = []
    for node, (x, y, w, h) in zip(nodes, squarify([node.stored_bytes for node in nodes], width, height), strict=True):
        places = zip(("left", "top", "width", "height"), (x / width, y / height, w / width, h / height), strict=True)
        style = ";".join(f"{name}:{100 * share:.2f}%" for name, share in places)
        roles = [*ROLE_NAMES.values()]
        role = node.id.split("/")[1]
        label = node.label
        while len(only := children.get(node.id, [])) == 1:
            node, label = only[0], f"{label}/{only[0].label}"
        tip = f"{node.id.strip('/')}\n{humanize.sizes(node.raw_bytes, node.stored_bytes)}"
        box = Box(label, tip, style, roles.index(role) if role in roles else len(roles) - 1)
        if h > 2 * _LABEL:
            box.boxes = _boxes(node.id, children, w, h - _LABEL, least)
        boxes.append(box)
    return boxes


def _by_size(node: Node) -> tuple[int, str]:
    return -node.stored_bytes, node.label


def squarify(values: Sequence[float], width: float, height: float) -> list[tuple[float, float, float, float]]:
    """Rectangles (x, y, width, height) of areas in proportion to falling values, which fill one and are nearly squares.

    Bruls, Huizing, van Wijk: Squarified Treemaps (2000).

    >>> squarify([2, 1, 1], 2, 2)
    [(0.0, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    rectangles: list[tuple[float, float, float, float]] = []
    x, y, total = 0.0, 0.0, sum(values)
    rest = [value * width * height / total for value in values]
    while rest:
        side, count = max(min(width, height), 1e-9), 1
        while count < len(rest) and _worst_aspect(rest[: count + 1], side) <= _worst_aspect(rest[:count], side):
            count += 1
        is_column, depth, at = width >= height, sum(rest[:count]) / side, 0.0
        for area in rest[:count]:
            length = area / depth
            rectangles.append((x, y + at, depth, length) if is_column else (x + at, y, length, depth))
            at += length
        if is_column:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
        rest = rest[count:]
    return rectangles


def _worst_aspect(areas: Sequence[float], side: float) -> float:
    """The longer side by the shorter one, of the longest of some rectangles side by side."""
    squared = (sum(areas) / side) ** 2
    return max(max(squared / area, area / squared) for area in areas)
