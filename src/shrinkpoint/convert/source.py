"""A checkpoint that can be converted, before it is read, and the training step that its name states."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.convert import directory, safetensors_file, torch_file
from shrinkpoint.convert.part import Part
from shrinkpoint.errors import PolicyError, ShrinkpointError

_STEP_PATTERN = re.compile(
    r"(?:^|[^a-z])(?:global[-_]?)?(step|checkpoint|ckpt|iteration|iter|it|update|epoch|ep)s?[-_=.]?0*(\d{1,15})(?!\d)",
    re.IGNORECASE,
)
_EPOCH_LABELS = ("epoch", "ep")


def step_from_name(name: str) -> int | None:
    """The step that a name says; an epoch counts where nothing else does.

    >>> [step_from_name(n) for n in ("checkpoint-500", "epoch=0-step=10.ckpt", "model_epoch_8.pth", "step_000100.pt", "ck100")]
    [500, 10, 8, 100, None]
    >>> [step_from_name(n) for n in ("global_step7", "model-00001-of-00002.safetensors", "iter=0040", "12", "last.ckpt")]
    [7, None, 40, 12, None]
    """
    if name.isdecimal():
        return int(name) if len(name) <= 15 else None
    found = [(label.lower(), int(digits)) for label, digits in _STEP_PATTERN.findall(name)]
    steps = [number for label, number in found if label not in _EPOCH_LABELS]
    epochs = [number for label, number in found if label in _EPOCH_LABELS]
    return next(iter([*steps, *epochs]), None)


SOURCE_KEY, STATE_KEY = "source", "state"
"""The two keys of the state of a converted checkpoint: what it was, and what was in it."""


@dataclass(frozen=True)
class SourceCheckpoint:
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
    def nbytes(self) -> int:
        """Room that it takes on the disk."""
        return disk_bytes(directory.list_files(self.path) if self.path.is_dir() else [self.path])

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
        part = directory.read(self.path, opaque=opaque) if self.path.is_dir() else _read_file(self.path)
        return {SOURCE_KEY: {"name": self.name, **part.description}, STATE_KEY: part.content}


@dataclass(frozen=True)
class BrokenCheckpoint(SourceCheckpoint):
    """One that is seen to be damaged before it is read; reading it raises `error`, choosing others does not."""

    error: ShrinkpointError

    def read(self, *, opaque: bool = False) -> Any:
        raise self.error


def origin_info(state: Any) -> dict[str, Any] | None:
    """What a state was before it was converted; None: it never was."""
    if not isinstance(state, dict) or state.keys() != {SOURCE_KEY, STATE_KEY}:
        return None
    said = state[SOURCE_KEY]
    return said if isinstance(said, dict) and {"form", "name"} <= said.keys() else None


def disk_bytes(files: Iterable[Path]) -> int:
    """Bytes of files, each once however many names it has."""
    found = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(os.stat, files)}
    return sum(found.values())


def _read_file(path: Path) -> Part:
    if path.suffix == ".safetensors":
        return safetensors_file.read(path)
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin") or torch_file.is_torch_file(path):
        return torch_file.read(path)
    expected = "a torch file (.pt, .pth, .bin, .ckpt) or a safetensors file"
    raise PolicyError(str(path), found="a file of another kind", expected=expected, do="name a checkpoint")
