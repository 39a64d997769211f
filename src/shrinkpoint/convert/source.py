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
    """Reads the training step from a file name; an epoch counts if the name has nothing else. None: it has no step.

    >>> names = "checkpoint-500", "epoch=0-step=10.ckpt", "model_epoch_8.pth", "step_000100.pt", "ck100"
    >>> [step_from_name(name) for name in names]
    [500, 10, 8, 100, None]
    >>> names = "global_step7", "model-00001-of-00002.safetensors", "iter=0040", "12", "last.ckpt"
    >>> [step_from_name(name) for name in names]
    [7, None, 40, 12, None]
    """
    if name.isdecimal():
        return int(name) if len(name) <= 15 else None
    numbers = [(label.lower(), int(digits)) for label, digits in _STEP_PATTERN.findall(name)]
    steps = [number for label, number in numbers if label not in _EPOCH_LABELS]
    epochs = [number for label, number in numbers if label in _EPOCH_LABELS]
    return next(iter([*steps, *epochs]), None)


SOURCE_KEY, STATE_KEY = "source", "state"
"""The two keys of the state of a converted checkpoint: its origin, and its content."""


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint that is a file or a directory which others wrote; nothing of it has been read yet.

    Attributes:
        step: the training step, by which the checkpoints of a run are ordered.
        path: the file or the directory.
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
        """Bytes that it takes on the disk."""
        return disk_bytes(directory.list_files(self.path) if self.path.is_dir() else [self.path])

    def read(self, *, opaque: bool = False) -> dict[str, Any]:
        """Reads the checkpoint as {"source": its origin, "state": its content}.

        Tensors are views of mapped files where that is possible.

        Args:
            opaque: take files that cannot be read without running them as their bytes, however large.

        Raises:
            StateError: it holds something that is neither a tensor nor a plain value. Nothing has been run.
            NotFoundError: a part of it is missing.
            FormatError: a file is damaged.
            StorageError: reading failed.
        """
        part = directory.read(self.path, opaque=opaque) if self.path.is_dir() else _read_file(self.path)
        return {SOURCE_KEY: {"name": self.name, **part.description}, STATE_KEY: part.content}


@dataclass(frozen=True)
class BrokenCheckpoint(SourceCheckpoint):
    """A checkpoint whose damage is known before it is read; reading it raises `error`, reading others of its run works.

    Attributes:
        error: what is wrong with it.
    """

    error: ShrinkpointError

    def read(self, *, opaque: bool = False) -> Any:
        raise self.error


def origin_info(state: Any) -> dict[str, Any] | None:
    """The origin of a converted state: its form, its name and what the form needs. None: it was not converted."""
    if not isinstance(state, dict) or state.keys() != {SOURCE_KEY, STATE_KEY}:
        return None
    info = state[SOURCE_KEY]
    return info if isinstance(info, dict) and {"form", "name"} <= info.keys() else None


def disk_bytes(files: Iterable[Path]) -> int:
    """Bytes of files; a file with several names (hard links) counts once."""
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(os.stat, files)}
    return sum(sizes.values())


def _read_file(path: Path) -> Part:
    if path.suffix == ".safetensors":
        return safetensors_file.read(path)
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin") or torch_file.is_torch_file(path):
        return torch_file.read(path)
    expected = "a torch file (.pt, .pth, .bin, .ckpt) or a safetensors file"
    raise PolicyError(str(path), found="a file of another kind", expected=expected, do="name a checkpoint")
