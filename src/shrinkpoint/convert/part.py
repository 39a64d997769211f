"""Content of one file of a foreign checkpoint, or of several that belong together; paths and errors of such files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shrinkpoint.errors import CorruptError, StorageError
from shrinkpoint.storage import storage_error

TENSOR_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")  # Suffixes of files of tensors
SOURCE_KEY, STATE_KEY = "source", "state"
"""The two keys of the state of a converted checkpoint: its origin, and its content."""
_SEPARATORS = "\0\\:" if os.name == "nt" else "\0"


def tensor_suffix(name: str) -> str:
    """The suffix of a name that files of tensors have; "" if it has none of these.

    >>> tensor_suffix("step-1.ckpt"), tensor_suffix("v1.0")
    ('.ckpt', '')
    """
    return next((suffix for suffix in TENSOR_SUFFIXES if name.endswith(suffix)), "")


@dataclass(frozen=True)
class Part:
    """The content of a file or a directory, and what its form needs besides to write it again."""

    form: str  # "torch", "safetensors", "sharded", "dcp", "bytes" or "folder"; docs/convert.md explains each
    content: Any = field(repr=False)  # any nest that a state may hold
    # Plain data that goes with the form, such as the metadata of a safetensors file.
    info: dict[str, Any] = field(default_factory=dict)
    # Names of its files whose format has no checksum, so that damage in them is not found.
    unchecked: tuple[str, ...] = ()

    @property
    def description(self) -> dict[str, Any]:
        """The form and its info as one dict of plain data, as it is stored."""
        return {"form": self.form, **self.info}

    def to_state(self, name: str) -> dict[str, Any]:
        """The state of a converted checkpoint: the origin, with the checkpoint's name, and the content."""
        return {SOURCE_KEY: {"name": name, **self.description}, STATE_KEY: self.content}


def origin_info(state: Any) -> dict[str, Any] | None:
    """The origin of a converted state: its form, its name and what the form needs. None: it was not converted."""
    if not isinstance(state, dict) or state.keys() != {SOURCE_KEY, STATE_KEY}:
        return None
    info = state[SOURCE_KEY]
    return info if isinstance(info, dict) and {"form", "name"} <= info.keys() else None


def safe_join(directory: Path, name: object, where: str) -> Path:
    """The path of a file in `directory` that an untrusted document names.

    Raises:
        CorruptError: the name is absolute, leads out of the directory, or is no name at all.
    """
    segments = name.split("/") if isinstance(name, str) else []
    if not segments or not all(_is_file_name(segment) for segment in segments):
        expected, do = "a relative path that stays in the directory", "do not use this checkpoint"
        raise CorruptError(where, found=f"the file name {name!r:.120}", expected=expected, do=do)
    return directory.joinpath(*segments)


def _is_file_name(name: str) -> bool:
    """True if this operating system takes `name` as that of an entry of a directory."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and not any(sign in name for sign in _SEPARATORS)


def read_bytes(path: Path) -> bytes:
    """Reads a whole file; raises `StorageError` if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise storage_error(str(path), "reading", error) from error


def write_error(path: Path, error: BaseException | None) -> StorageError | None:
    """The operating system's error among the causes of an error of torch while writing; None: there is none."""
    while error is not None:
        if isinstance(error, OSError):
            return storage_error(str(path), "writing", error)
        error = error.__cause__ or error.__context__
    return None
