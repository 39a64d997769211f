"""One file of a checkpoint that others wrote, or several that belong together, once it has been read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shrinkpoint.errors import CorruptError, StorageError
from shrinkpoint.storage import storage_error

TENSOR_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
"""How files of tensors end."""
_SEPARATORS = "\0\\:" if os.name == "nt" else "\0"


@dataclass(frozen=True)
class Part:
    """What was read, and what its form needs beside that to write it again.

    Attributes:
        form: "torch", "safetensors", "sharded", "dcp", "bytes" or "folder"; see docs/convert.md.
        content: any nest that a state may hold.
        info: plain data.
    """

    form: str
    content: Any = field(repr=False)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> dict[str, Any]:
        """The form and the facts as one piece of plain data."""
        return {"form": self.form, **self.info}


def safe_join(directory: Path, name: object, where: str) -> Path:
    """The path of a file that a document names, which has to lie in `directory`: documents come from anybody.

    Raises:
        CorruptError: the name is absolute, leads out of the folder, or is no name at all.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or not all(_is_file_name(part) for part in parts):
        expected, do = "a relative path that stays in the directory", "do not use this checkpoint"
        raise CorruptError(where, found=f"the file name {name!r:.120}", expected=expected, do=do)
    return directory.joinpath(*parts)


def _is_file_name(name: str) -> bool:
    """Whether it is the name of something in a directory, for this operating system."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and not any(sign in name for sign in _SEPARATORS)


def read_bytes(path: Path) -> bytes:
    """All bytes of a file.

    Raises:
        StorageError: reading failed.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error


def read_error(path: Path, error: OSError) -> StorageError:
    return storage_error(str(path), "reading", error)


def write_error(path: Path, error: BaseException | None) -> StorageError | None:
    """What the disk said while torch wrote, which says something of its own then; None: it was not the disk."""
    while error is not None:
        if isinstance(error, OSError):
            return storage_error(str(path), "writing", error)
        error = error.__cause__ or error.__context__
    return None
