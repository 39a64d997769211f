"""One checkpoint that can be converted, before it is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.foreign import folder, safetensors_file, torch_file
from shrinkpoint.foreign.part import Part

SOURCE, STATE = "source", "state"
"""The two keys of the state of a converted checkpoint: what it was, and what was in it."""


@dataclass(frozen=True)
class Checkpoint:
    """A file or a directory that others wrote.

    Attributes:
        step: its place in a run.
        path: of the file or the directory.
    """

    step: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_ours(self) -> bool:
        return False

    @property
    def bytes(self) -> int:
        """Room that it takes on the disk."""
        return disk_bytes(folder.files(self.path) if self.path.is_dir() else [self.path])

    def read(self, *, opaque: bool = False) -> dict[str, Any]:
        """{"source": what it was, "state": what is in it}; tensors are views of mapped files where that is possible.

        Args:
            opaque: see `folder.read`.

        Raises:
            StateError: something in it is neither a tensor nor a plain value. Nothing has been run.
            NotFoundError: a part of it is missing.
            FormatError: a file is damaged.
            StorageError: reading failed.
        """
        part = folder.read(self.path, opaque=opaque) if self.path.is_dir() else _file(self.path)
        return {SOURCE: {"name": self.name, **part.said}, STATE: part.content}


@dataclass(frozen=True)
class Broken(Checkpoint):
    """One that is seen to be damaged before it is read; reading it raises `error`, choosing others does not."""

    error: ShrinkpointError

    def read(self, *, opaque: bool = False) -> Any:
        raise self.error


def source_of(state: Any) -> dict[str, Any] | None:
    """What a state was before it was converted; None: it never was."""
    if not isinstance(state, dict) or state.keys() != {SOURCE, STATE}:
        return None
    said = state[SOURCE]
    return said if isinstance(said, dict) and {"form", "name"} <= said.keys() else None


def disk_bytes(files: Iterable[Path]) -> int:
    """Bytes of files, each once however many names it has."""
    found = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(os.stat, files)}
    return sum(found.values())


def _file(path: Path) -> Part:
    if path.suffix == ".safetensors":
        return safetensors_file.read(path)
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin") or torch_file.is_torch(path):
        return torch_file.read(path)
    expected = "a torch file (.pt, .pth, .bin, .ckpt) or a safetensors file"
    raise PolicyError(str(path), found="a file of another kind", expected=expected, do="name a checkpoint")
