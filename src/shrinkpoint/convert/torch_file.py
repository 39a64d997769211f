"""Files of `torch.save`, read without running anything that is in them."""

from __future__ import annotations

import errno
import os
import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch

from shrinkpoint.convert import numpy_values
from shrinkpoint.convert.part import Part, read_error, write_error
from shrinkpoint.errors import CorruptError, FormatError, StateError, TruncatedError

_MAX_EXTRA_VALUES = 1 << 20
"""Values that a file may have beyond one for each of its bytes: it may refer to a small list many times."""
_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_GLOBAL_PATTERN = re.compile(r"(?:GLOBAL|instance of class|class) `?([\w.]+)")
_REASON_PATTERN = re.compile(r"WeightsUnpickler error:\s*(\S.*)")
_EXPECTED = "tensors, numpy values and plain Python values, as torch.load(weights_only=True) takes them"
_ADVICE = (
    "if you trust it, load it with the code that wrote it and save its state_dict() again; "
    "--opaque takes such files of a directory along as they are"
)


def is_torch_file(path: Path) -> bool:
    """Whether a file begins like one of `torch.save`: a zip file, or the format from before torch 1.6."""
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        return False
    if head.startswith(_ZIP_MAGIC):
        return b"/data.pkl" in head[30 : 30 + int.from_bytes(head[26:28], "little")] or b"/data.pkl" in head
    return head.startswith(_LEGACY_MAGIC)


def read(path: Path) -> Part:
    """Reads a torch file; its tensors are on the CPU, as views of the mapped file.

    Raises:
        StateError: it needs something that is neither a tensor nor a plain value. Nothing of it has been run.
        FormatError: it is cut, damaged, or no file of `torch.save`.
        StorageError: reading failed.
    """
    return Part("torch", load_plain(path, str(path)))


def load_plain(file: Path | IO[bytes], where: str) -> Any:
    """Calls `torch.load(weights_only=True)`, which here also takes numpy values; raises as `read` does."""
    try:
        mapped = isinstance(file, Path) and _is_zip(file)
        with warnings.catch_warnings(), numpy_values.allow_numpy_stubs():
            warnings.simplefilter("ignore")  # of complex32, of files of old releases
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        return numpy_values.replace_stubs(content, _MAX_EXTRA_VALUES + _size(file))
    except Exception as error:  # torch raises errors of many types for damaged bytes
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise read_error(Path(where), error) from error
        raise _load_error(file, where, error) from error


def write(path: Path, content: Any) -> None:
    """Writes a file with `torch.save`.

    Raises:
        StorageError: writing failed.
    """
    try:
        with warnings.catch_warnings(), path.open("wb") as file:  # given a path, torch does not report a full disk
            warnings.simplefilter("ignore")
            torch.save(content, file)
    except (RuntimeError, OSError) as error:
        disk_error = write_error(path, error)
        if disk_error is None:
            raise
        raise disk_error from error


def _size(file: Path | IO[bytes]) -> int:
    return file.stat().st_size if isinstance(file, Path) else file.seek(0, os.SEEK_END)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _ZIP_MAGIC


def _load_error(file: Path | IO[bytes], where: str, error: Exception) -> StateError | FormatError:
    text = str(error)
    globals_ = _refused_globals(file, text)
    if globals_:
        found = f"a pickle that needs {', '.join(globals_)}, and reading it would run that"
        return StateError(where, found=found, expected=_EXPECTED, do=_ADVICE)
    if "TorchScript archive" in text:
        return StateError(where, found="a TorchScript archive, which is a program", expected=_EXPECTED, do=_ADVICE)
    if isinstance(error, numpy_values.TooManyValuesError) or (
        isinstance(error, ValueError) and text.startswith("a numpy")
    ):
        return StateError(where, found=text, expected=_EXPECTED, do=_ADVICE)
    if "central directory" in text or isinstance(error, EOFError):
        return TruncatedError(where, found="a torch file that is cut", expected="all of it", do="fetch it again")
    reason = _REASON_PATTERN.search(text)
    message = reason[1] if reason else text.splitlines()[0] if text else type(error).__name__
    found = f"no torch file that can be read ({message:.160})"
    return CorruptError(where, found=found, expected="a file of torch.save", do="fetch it again")


def _refused_globals(file: Path | IO[bytes], text: str) -> list[str]:
    """The globals that `weights_only` refuses: up to eight where torch can list them, else the first."""
    if "weights_only" not in text.lower() and "weights only" not in text.lower() and "GLOBAL" not in text:
        return []
    try:
        if not isinstance(file, Path):
            file.seek(0)
        with numpy_values.allow_numpy_stubs():
            names = [*dict.fromkeys(torch.serialization.get_unsafe_globals_in_checkpoint(file))]
    except Exception:  # not a zip file, or a damaged one
        names = []
    return names[:8] or _GLOBAL_PATTERN.findall(text)[:1]
