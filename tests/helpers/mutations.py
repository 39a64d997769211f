"""JSON that was changed with malice: what a document of ours could say, and no writer of ours would."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

POWERS = [power + more for power in (2**31, 2**53, 2**60, 2**62, 2**63, 2**64) for more in (-1, 0, 1)]
NUMBERS = [
    *range(-2, 5),
    28,
    255,
    256,
    2**16,
    2**20,
    2**26,
    2**40,
    2**50,
    10**30,
    10**400,
    -(10**30),
    -(2**63),
    *POWERS,
]
FLOATS = [0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, 1.0, 2.0**63]
WORDS = """/ ~ - 0 nan inf 1e9 ~pad/0 __metadata__ F32 BF16 U8 I64 F8_E8M0 F4_X2 C128 parameter moment2 plain same copy
coded quantized gridded level delta planes codes base tap adam square log relative <f4 >i8 |u1 ../x"""
TEXTS = [
    *WORDS.split(),
    *["", "\0", "\u00e9", "\ud800", "x" * 5000, "f" * 5000, "0" * 32, "f" * 16, "7ff0000000000000"],
    *["2026-01-01T00:00:00+00:00", "0001-01-01T00:00:00+23:59", "rank-00000.safetensors"],
]
TAGS = ["$t", "$p", "$q", "$n", "$g", "$u", "$z", "$i", "$f", "$s", "$b", "$B", "$d", "$o", "$m", "$c", "$", "$x"]


def everywhere(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all nodes of a JSON value."""
    out, todo = [], [(path, value)]
    while todo:
        here, node = todo.pop()
        out.append(here)
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        todo += [((*here, key), inner) for key, inner in pairs]
    return out


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


class Mutator:
    """Changes documents; the same seed makes the same changes."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)

    def mutate(self, document: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Change a document in one to three places; where."""
        changed = []
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            paths = everywhere(document)[1:]
            if not paths:
                return changed
            roots: dict[Any, list[tuple[Any, ...]]] = {}
            for path in paths:  # each part of the document as often as the others, however many nodes it has
                roots.setdefault(path[0], []).append(path)
            path = self.random.choice(roots[self.random.choice(sorted(roots, key=str))])
            if self._change(document, path):
                changed.append(path)
        return changed

    def _change(self, document: Any, path: tuple[Any, ...]) -> bool:
        holder, key = at(document, path[:-1]), path[-1]
        ways = [self._replace, self._replace, self._transplant, self._drop, self._near, self._near]
        if isinstance(holder[key], list | dict):
            ways += [self._within, self._within]
        ways += [self._tag, self._tag] if path[0] == "tree" else []
        self.random.choice(ways)(document, holder, key)
        return True

    def junk(self) -> Any:
        kind = self.random.randrange(8)
        if kind < 3:
            return self.random.choice(NUMBERS)
        if kind == 3:
            return self.random.choice(FLOATS)
        if kind == 4:
            return self.random.choice(TEXTS)
        if kind == 5:
            return [self.random.choice(NUMBERS) for _ in range(self.random.randrange(5))]
        if kind == 6:
            return self.random.choice([None, True, False, [], {}, [[]], [{}], {"": 0}])
        return self.view()

    def view(self, names: list[str] | None = None) -> Any:
        """A reference to a part of a tensor, as views have it."""
        rank = self.random.randrange(4)
        shape = [self.random.choice([0, 1, 2, 3, 2**20, 2**30, 2**50, 2**62 - 1]) for _ in range(rank)]
        strides = [self.random.choice([0, 0, 1, 1, 2, 4, 2**40]) for _ in range(rank)]
        name = self.random.choice(names) if names else "w"
        rest = [self.random.choice(["F64", "U8", "C64", "BF16"])] if self.random.random() < 0.2 else []
        return self.random.choice([[], [name], [name, self.random.choice([0, 0, 1, 2**62 - 1]), shape, strides, *rest]])

    def _replace(self, document: Any, holder: Any, key: Any) -> None:
        holder[key] = self.junk()

    def _transplant(self, document: Any, holder: Any, key: Any) -> None:
        holder[key] = copy.deepcopy(at(document, self.random.choice(everywhere(document)[1:])))

    def _drop(self, document: Any, holder: Any, key: Any) -> None:
        del holder[key]

    def _near(self, document: Any, holder: Any, key: Any) -> None:
        """A value close to the one there."""
        value = holder[key]
        if type(value) is bool:
            holder[key] = not value
        elif type(value) is int:
            holder[key] = self.random.choice([value + 1, value - 1, 2 * value, value // 2, -value, value + 2**32])
        elif isinstance(value, str) and value:
            place = self.random.randrange(len(value))
            holder[key] = self.random.choice([value[:place], value[:place] + "0" + value[place + 1 :], value * 2])
        elif isinstance(value, list) and value:
            self.random.shuffle(value)
        else:
            holder[key] = self.junk()

    def _within(self, document: Any, holder: Any, key: Any) -> None:
        """A list or an object with something in it twice, more of it, or at another place."""
        value = holder[key]
        if isinstance(value, list):
            what = self.random.randrange(4)
            if what == 0 and value:
                value.append(copy.deepcopy(self.random.choice(value)))
            elif what == 1:
                value.insert(self.random.randrange(len(value) + 1), self.junk())
            elif what == 2:
                value *= self.random.choice([2, 3, 50])
            else:
                holder[key] = [value]
        else:
            name = self.random.choice([*TEXTS, *value, *TAGS])
            value[name] = self.junk()

    def _tag(self, document: Any, holder: Any, key: Any) -> None:
        """A tag with something in it that tags have, over any tensor of the file."""
        records = document.get("records")  # which a mutation before may have made anything
        names = [row[0] for record in records for row in _rows(record)] if isinstance(records, list) else []
        names = names or ["w"]
        body = self.random.choice([self.view(names), self.view(names), self.junk(), holder[key]])
        if self.random.random() < 0.4:
            body = [self.random.choice(["<f4", "<i8", "|u1", "<c16", ">f8"]), body]
        if self.random.random() < 0.2:
            body = [[body, self.junk()]] * self.random.choice([1, 2])
        holder[key] = {self.random.choice(TAGS): body}


def _rows(record: Any) -> list[Any]:
    rows = record[4] if isinstance(record, list) and len(record) > 4 else []
    return (
        [row for row in rows if isinstance(row, list) and row and isinstance(row[0], str)]
        if rows and isinstance(rows, list)
        else []
    )


def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
