"""Files of `torch.save`, read without running anything that is in them.

`torch.load(weights_only=True)` reads them. It refuses numpy: instead of numpy's functions it gets stubs, each of which
checks its arguments, so that no state of an array or a dtype from a file reaches numpy unchecked.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from shrinkpoint.convert.inert_pickle import HostilePickleError, InertUnpickler
from shrinkpoint.convert.part import Part, write_error
from shrinkpoint.errors import CorruptError, FormatError, StateError, TruncatedError
from shrinkpoint.storage import storage_error
from shrinkpoint.storage.zip_records import check_zip_records
from shrinkpoint.tensors.dtypes import numpy_to_torch_dtype
from shrinkpoint.tensors.tree import is_unicode

_MAX_EXTRA_VALUES = 1 << 20
"""Values that a file may have beyond one for each of its bytes: it may refer to a small list many times."""
_MIN_SCANNED_BYTES = 1 << 15
"""Bytes from which a pickle is scanned before it is loaded: a smaller one costs seconds at worst."""
_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_GLOBAL_PATTERN = re.compile(r"(?:GLOBAL|instance of class|class) `?([\w.]+)")
_REASON_PATTERN = re.compile(r"WeightsUnpickler error:\s*(\S.*)")
_EXPECTED = "tensors, numpy values and plain Python values, as torch.load(weights_only=True) takes them"
_ADVICE = (
    "if you trust it, load it with the code that wrote it and save its state_dict() again; "
    "--opaque keeps such files of a directory as bytes"
)


def is_torch_file(path: Path) -> bool:
    """True if a file is one of `torch.save`: a zip file with a pickle, or the format from before torch 1.6.

    One whose beginning is damaged is still known by the directory at its end.
    """
    try:
        with path.open("rb") as file:
            head = file.read(256)
        if head.startswith(_LEGACY_MAGIC) or (head.startswith(_ZIP_MAGIC) and b"/data.pkl" in head):
            return True
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError):
        return False


def read(path: Path) -> Part:
    """Reads a torch file; its tensors are on the CPU, as views of the mapped file.

    Raises:
        StateError: it needs something that is neither a tensor nor a plain value. Nothing of it has been run.
        FormatError: it is cut, damaged, or no file of `torch.save`.
        StorageError: reading failed.
    """
    content, has_checksums = load_checked(path, str(path))
    return Part("torch", content, unchecked=() if has_checksums else (path.name,))


def load_checked(file: Path | IO[bytes], where: str) -> tuple[Any, bool]:
    """Loads a torch file whose CRC-32s are right, without running anything that is in it.

    Returns:
        The content, and whether each byte of it has a checksum.

    Raises:
        StateError, FormatError, StorageError: as `read`.
    """
    has_checksums = _check_records(file, where)
    _check_pickles(file, where)
    try:
        is_mapped = False
        if isinstance(file, Path):
            with file.open("rb") as opened:  # torch maps none whose name is not valid UTF-8
                is_mapped = is_unicode(str(file)) and opened.read(4) == _ZIP_MAGIC
        with warnings.catch_warnings(), torch.serialization.safe_globals(_STUBS):
            warnings.simplefilter("ignore")  # of complex32, of files of old releases
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
        size = file.stat().st_size if isinstance(file, Path) else file.seek(0, os.SEEK_END)
        return _StubReplacer(size).replace(content, frozenset()), has_checksums
    except Exception as error:  # torch raises errors of many types for damaged bytes
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise storage_error(where, "reading", error) from error
        raise _load_error(file, where, error) from error


def _check_records(file: Path | IO[bytes], where: str) -> bool:
    """Compares the CRC-32s of a zip file, which torch itself does not; False if the file has none."""
    try:
        if zipfile.is_zipfile(file):  # which raises what its reader does, for some damages
            return check_zip_records(file)
        with _opened(file) as stream:
            if stream.read(4) == _ZIP_MAGIC:
                raise TruncatedError(where, found="a torch file that is cut", expected="all of it", do="fetch it again")
        return False
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # that of a negative offset
            raise storage_error(where, "reading", error) from error
        found, expected = f"a damaged record ({error})", "the bytes that were written"
        do = "fetch it again; if it was compressed, load it with torch and save it again"
        raise CorruptError(where, found=found, expected=expected, do=do) from error


def _check_pickles(file: Path | IO[bytes], where: str) -> None:
    """Raises `StateError` for a pickle on which `torch.load` would spend far more time or memory than its size."""
    try:
        with _opened(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size <= _MIN_SCANNED_BYTES:
                return
            if not zipfile.is_zipfile(stream):
                stream.seek(0)
                for _ in range(4):  # the magic, the version, the system, the content
                    InertUnpickler(stream, size).load()
                return
            with zipfile.ZipFile(stream) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                for data in map(archive.read, names):
                    if len(data) > _MIN_SCANNED_BYTES:
                        InertUnpickler(io.BytesIO(data), len(data)).load()
    except OSError as error:
        raise storage_error(where, "reading", error) from error
    except HostilePickleError as error:
        raise StateError(where, found=f"{error}", expected=_EXPECTED, do=_ADVICE) from error
    except Exception as error:  # pickle raises errors of many types for damaged bytes
        found = f"no torch file that can be read ({type(error).__name__}: {error!s:.120})"
        raise CorruptError(where, found=found, expected="a file of torch.save", do="fetch it again") from error


@contextmanager
def _opened(file: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """The file from its beginning on; one that was given opened is at its beginning again at the end, too."""
    if isinstance(file, Path):
        with file.open("rb") as stream:
            yield stream
        return
    file.seek(0)
    try:
        yield file
    finally:
        file.seek(0)


def write(path: Path, content: Any) -> None:
    """Writes a file with `torch.save`; raises StorageError if writing failed."""
    try:
        with warnings.catch_warnings(), path.open("wb") as file:  # given a path, torch does not report a full disk
            warnings.simplefilter("ignore")
            torch.save(content, file)
    except (RuntimeError, OSError) as error:
        disk_error = write_error(path, error)
        if disk_error is None:
            raise
        raise disk_error from error


def _load_error(file: Path | IO[bytes], where: str, error: Exception) -> StateError | FormatError:
    text = str(error)
    refused_globals = _refused_globals(file, text)
    found = ""
    if refused_globals:
        found = f"a pickle that needs {', '.join(refused_globals)}, and reading it would run that"
    elif "TorchScript archive" in text:
        found = "a TorchScript archive, which is a program"
    elif isinstance(error, TooManyValuesError) or (isinstance(error, ValueError) and text.startswith("a numpy")):
        found = text
    if found:
        return StateError(where, found=found, expected=_EXPECTED, do=_ADVICE)
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
        with torch.serialization.safe_globals(_STUBS):
            names = [*dict.fromkeys(torch.serialization.get_unsafe_globals_in_checkpoint(file))]
    except Exception:  # not a zip file, or a damaged one
        names = []
    return names[:8] or _GLOBAL_PATTERN.findall(text)[:1]


class NumpyDtypeStub:
    """Stands for `numpy.dtype`, as a pickle calls it: a code such as "f8", then a byte order by way of its state."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        self._code, self._order = str(code), "="

    def __setstate__(self, state: Any) -> None:
        _, self._order, *rest = state
        if self._order not in ("<", ">", "|", "=") or any(item is not None for item in rest[:3]):
            raise ValueError(f"a numpy dtype of state {state!r:.80}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype; raises `ValueError` for one that cannot be stored: objects, text, dates, records."""
        dtype = np.dtype(self._code)
        if numpy_to_torch_dtype(dtype) is None:
            raise ValueError(f"a numpy dtype {self._code!r:.40}; known are bool, integers, floats and complex numbers")
        return dtype if self._order in ("|", "=") else dtype.newbyteorder(self._order)  # type: ignore[arg-type]


class NumpyArrayStub:
    """Stands for `numpy.ndarray` until the file has been read; then `value` is the array."""

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        is_shape = all(type(size) is int and size >= 0 for size in shape)
        if not is_shape or math.prod(shape) * dtype.dtype.itemsize != len(data):
            raise ValueError(f"a numpy array of shape {shape!r:.80} in {len(data)} bytes")
        self.value = np.frombuffer(bytearray(data), dtype.dtype).reshape(shape, order="F" if fortran else "C")


def reconstruct_array(array_type: Any, shape: Any, code: Any) -> NumpyArrayStub:
    """Stands for `numpy.core.multiarray._reconstruct`."""
    if array_type is not NumpyArrayStub:
        raise ValueError("a numpy array of a class of its own")
    return NumpyArrayStub()


def reconstruct_scalar(dtype: Any, data: Any) -> np.generic:
    """Stands for `numpy.core.multiarray.scalar`."""
    numpy_dtype = dtype.dtype
    if not isinstance(data, bytes) or len(data) != numpy_dtype.itemsize:
        raise ValueError(f"a numpy scalar of {numpy_dtype} in {data!r:.40}")
    value: np.generic = np.frombuffer(data, numpy_dtype)[0]
    return value


def empty_bytes(*args: Any) -> bytes:
    """Stands for `bytes`, which old pickles call for an empty one, such as that of an array without values."""
    if args:
        raise ValueError("bytes made of something else")
    return b""


_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_STUBS: list[Any] = [
    (NumpyDtypeStub, "numpy.dtype"),
    (NumpyArrayStub, "numpy.ndarray"),
    (empty_bytes, "builtins.bytes"),
    (empty_bytes, "__builtin__.bytes"),
    *((reconstruct_array, f"{module}._reconstruct") for module in _NUMPY_MODULES),
    *((reconstruct_scalar, f"{module}.scalar") for module in _NUMPY_MODULES),
]


class TooManyValuesError(ValueError):
    """A nest has too many values."""


class _StubReplacer:
    """Replaces the stubs in a nest by their arrays; a container without stubs stays the same object.

    Args:
        size: bytes of the file. The nest may have about as many values, and its tensors no more bytes: a list of
            references to one list, nested several times, is small in a file and takes exponential time to walk through.
    """

    def __init__(self, size: int) -> None:
        self._max_values, self._max_bytes = _MAX_EXTRA_VALUES + size, size
        self._storages: set[int] = set()

    def replace(self, value: Any, ancestor_ids: frozenset[int]) -> Any:
        self._max_values -= 1
        if self._max_values < 0:
            raise TooManyValuesError("a nest of more values than its file has bytes")
        if isinstance(value, NumpyArrayStub):
            return value.value
        if isinstance(value, torch.Tensor):
            self._count_storage(value)
        if id(value) in ancestor_ids:  # a nest that contains itself: `flatten` refuses it with a message
            return value
        if isinstance(value, dict | list):
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            for key, item in pairs:
                new = self.replace(item, ancestor_ids | {id(value)})
                if new is not item:
                    value[key] = new
        elif type(value) in (tuple, torch.Size):
            items = [self.replace(item, ancestor_ids | {id(value)}) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return tuple(items)
        return value

    def _count_storage(self, tensor: torch.Tensor) -> None:
        """Raises `TooManyValuesError` once tensors have more bytes than the file: a pickle may call for new ones."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages.add(storage.data_ptr())
            self._max_bytes -= storage.nbytes()
        if self._max_bytes < 0:
            raise TooManyValuesError("tensors of more bytes than their file")
