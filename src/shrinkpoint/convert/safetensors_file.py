"""Reads and writes safetensors files of others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shrinkpoint.convert.part import Part
from shrinkpoint.errors import CorruptError, PolicyError, TruncatedError
from shrinkpoint.storage import natural_key, storage_error

_OWN_KEY = "shrinkpoint"
_OS_ERROR_PATTERN = re.compile(r"\(os error (\d{1,5})\)")


def read(path: Path) -> Part:
    """Reads the tensors by name, as views of the mapped file, and the metadata.

    The tensors are sorted by name with numbers compared as numbers, which is close to the order of a model: safetensors
    keeps no order.

    Raises:
        FormatError: it is cut, damaged, or no safetensors file.
        StorageError: reading failed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = sorted(file.keys(), key=natural_key)
            tensors = {name: file.get_tensor(name) for name in names}
            return Part("safetensors", tensors, {"metadata": file.metadata()}, unchecked=(path.name,))
    except OSError as error:
        raise storage_error(str(path), "reading", error) from error
    except (SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        where, text = str(path), str(error)
        do = "give it a name of valid UTF-8" if text.startswith("Path ") else "fetch it again"
        if "incomplete" in text.lower() or path.stat().st_size < 8:
            found = f"a safetensors file that is cut ({text:.80})"
            raise TruncatedError(where, found=found, expected="all of it", do=do) from error
        found = f"no safetensors file that can be read ({text:.160})"
        raise CorruptError(where, found=found, expected="a safetensors file", do=do) from error


def is_ours(path: Path) -> bool:
    """True if a safetensors file is one that this library wrote; False where its header cannot be read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return _OWN_KEY in (file.metadata() or {})
    except (OSError, SafetensorError, RuntimeError, ValueError):
        return False


def write(path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
    """Writes tensors with the metadata of `info`.

    Raises:
        PolicyError: safetensors cannot hold the state.
        StorageError: writing failed.
    """
    rows: dict[str, torch.Tensor] = {}
    storage_pointers: set[int] = set()
    for name, tensor in tensors.items():
        if type(name) is not str or not isinstance(tensor, torch.Tensor):
            found, do = f"{type(tensor).__name__} under the key {name!r:.80}", "write a torch file"
            raise PolicyError(str(path), found=found, expected="tensors by name", do=do)
        # safetensors shares no memory: a tensor is copied unless it is contiguous, and alone in its memory
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        fills_storage = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
        is_alone = fills_storage and storage.data_ptr() not in storage_pointers
        storage_pointers.add(storage.data_ptr())
        rows[name] = tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
    try:
        save_file(rows, path, info.get("metadata"))
    except OSError as error:
        raise storage_error(str(path), "writing", error) from error
    except (SafetensorError, RuntimeError, ValueError, TypeError, KeyError) as error:
        number = _OS_ERROR_PATTERN.search(str(error))
        if number:
            disk_error = OSError(int(number[1]), os.strerror(int(number[1])))
            raise storage_error(str(path), "writing", disk_error) from error
        found = f"a state that safetensors does not take ({error})"
        raise PolicyError(str(path), found=found, expected="its dtypes", do="write a torch file") from error
