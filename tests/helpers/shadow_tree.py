"""Power cuts, simulated: every change that a program made below a directory, and what a disk may hold after each.

A program runs with `shadow_tree.cpp` preloaded, which records writes, fsyncs, renames, links and removals in order.
`ShadowTree` replays them. After a power cut a disk holds what was flushed, and any part of the rest:

* "flushed": nothing else. Names are those of their directory's last fsync, contents those of the file's.
* "names": all names, and contents as they were flushed; other bytes are zero (a file system that journals names only).
* "random": a random prefix of the unflushed changes of each directory, and some of the unflushed writes of each file.
* "all": everything, as after SIGKILL.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from helpers.paths import TESTS

SOURCE = TESTS / "helpers" / "shadow_tree.cpp"
MODES = ("flushed", "names", "random", "all")


@cache
def library() -> Path:
    """The compiled recorder."""
    path = Path(mkdtemp()) / "shadow_tree.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(path), "-ldl"]
    subprocess.run(command, check=True)
    return path


def missing() -> str | None:
    """Says why nothing can be recorded here, or None."""
    if not sys.platform.startswith("linux"):
        return "only Linux preloads libraries this way"
    return None if shutil.which("g++") else "there is no g++"


def environment(root: Path, log: Path) -> dict[str, str]:
    """What a process needs in its environment to be recorded."""
    return {"LD_PRELOAD": str(library()), "SHADOW_ROOT": str(root), "SHADOW_LOG": str(log)}


@dataclass
class File:
    """A file's bytes now, those that were flushed, and the writes in between as (offset, data)."""

    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        _patch(self.data, offset, data)
        self.pending.append((offset, data))

    def truncate(self, length: int) -> None:
        self.data = self.data[:length] + bytes(max(0, length - len(self.data)))
        self.pending.append((length, b""))

    def sync(self) -> None:
        self.flushed, self.pending = bytes(self.data), []

    def after_cut(self, mode: str, chance: random.Random) -> bytes:
        if mode == "all":
            return bytes(self.data)
        if mode == "flushed":
            return self.flushed
        kept = bytearray(self.flushed)
        if mode == "random":
            for offset, data in self.pending:
                if chance.random() < 0.5:
                    _patch(kept, offset, data[: chance.randint(0, len(data))])
        return bytes(kept[: len(self.data)]) + bytes(max(0, len(self.data) - len(kept)))


@dataclass
class Directory:
    """Names now, and those that were flushed; each change in between as (name, what it names or None)."""

    names: dict[str, Any] = field(default_factory=dict)
    flushed: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)

    def change(self, names: dict[str, Any]) -> None:
        """Apply changes that one call makes at once; None removes a name."""
        _apply(self.names, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.flushed, self.pending = dict(self.names), []

    def after_cut(self, mode: str, chance: random.Random) -> dict[str, Any]:
        if mode in ("all", "names"):
            return self.names
        kept = dict(self.flushed)
        if mode == "random":
            for names in self.pending[: chance.randint(0, len(self.pending))]:
                _apply(kept, names)
        return kept


def _apply(names: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            names.pop(name, None)
        else:
            names[name] = value


def _patch(data: bytearray, offset: int, more: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(more)] = more


class ShadowTree:
    """Replays the records of one program.

    Attributes:
        marks: lines that the program itself has put among the records.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._top = Directory()
        self._inodes: dict[str, File | Directory] = {}
        self.marks: list[str] = []

    def replay(self, log: Path) -> Iterator[str]:
        """Apply one record after another; yields what each one was."""
        for head, data in _records(log):
            self._apply(head, data)
            yield " ".join(head)

    def _apply(self, head: list[str], data: bytes) -> None:
        kind, *rest = head
        match kind:
            case "mark":
                self.marks.append(rest[0])
            case "open":
                path, inode, truncate = rest
                directory, name = self._place(path)
                if not isinstance(directory.names.get(name), File):
                    directory.change({name: File()})
                self._inodes[inode] = file = directory.names[name]
                if truncate and file.data:
                    file.truncate(0)
            case "write":
                self._file(rest[0]).write(int(rest[1]), data)
            case "truncate":
                self._file(rest[0]).truncate(int(rest[1]))
            case "sync":
                found = self._inodes.get(rest[0])
                (self._top if found is None else found).sync()
            case "mkdir" if rest[0] == self._root:
                self._inodes[rest[1]] = self._top
            case "mkdir":
                directory, name = self._place(rest[0])
                self._inodes[rest[1]] = made = Directory()
                directory.change({name: made})
            case "unlink":
                directory, name = self._place(rest[0])
                directory.change({name: None})
            case "link":
                directory, name = self._place(rest[1])
                directory.change({name: self._find(rest[0])})
            case "symlink":
                directory, name = self._place(rest[1])
                directory.change({name: rest[0]})
            case "rename":
                self._rename(*rest)
            case _:
                raise AssertionError(f"a record of another kind: {head}")

    def _rename(self, old: str, new: str) -> None:
        moved = self._find(old)
        (source, name), (target, new_name) = self._place(old), self._place(new)
        if source is target:
            source.change({name: None, new_name: moved})
        else:
            target.change({new_name: moved})
            source.change({name: None})

    def _file(self, inode: str) -> File:
        found = self._inodes[inode]
        assert isinstance(found, File)
        return found

    def _place(self, path: str) -> tuple[Directory, str]:
        parent, name = os.path.split(os.path.normpath(path))
        found = self._find(parent)
        assert isinstance(found, Directory)
        return found, name

    def _find(self, path: str) -> Any:
        found: Any = self._top
        relative = os.path.relpath(os.path.normpath(path), self._root)
        for part in () if relative == "." else relative.split("/"):
            found = found.names[part]
        return found

    def image(self, mode: str, chance: random.Random) -> Image:
        """What a disk may hold if the power is cut now."""
        found: Image = {}

        def visit(directory: Directory, at: str) -> None:
            for name, value in directory.after_cut(mode, chance).items():
                path = f"{at}{name}"
                if isinstance(value, Directory):
                    found[path] = None
                    visit(value, path + "/")
                else:
                    found[path] = value if isinstance(value, str) else (id(value), value.after_cut(mode, chance))

        visit(self._top, "")
        return found


Image = dict[str, Any]
"""By path: None of a directory, the target of a symbolic link, or a file's number and bytes."""


def write_image(image: Image, folder: Path) -> None:
    """Write an image into a new directory; files keep their hard links."""
    written: dict[int, Path] = {}
    folder.mkdir()
    for name, value in image.items():
        path = folder / name
        if value is None:
            path.mkdir()
        elif isinstance(value, str):
            path.symlink_to(value)
        elif value[0] in written:
            os.link(written[value[0]], path)
        else:
            path.write_bytes(value[1])
            written[value[0]] = path


def _records(log: Path) -> Iterator[tuple[list[str], bytes]]:
    data, at = log.read_bytes(), 0
    while at < len(data):
        head_length, length = struct.unpack_from("<IQ", data, at)
        head = data[at + 12 : at + 12 + head_length].decode().split("\x1f")
        at += 12 + head_length + length
        yield head, data[at - length : at]
