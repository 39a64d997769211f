"""A state as plain text: what golden files are compared by, without anything of the library."""

from __future__ import annotations

import hashlib
import struct
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.strategies import bits


def fingerprint(state: Any) -> dict[str, str]:
    """Every leaf and nest of a state by its path: its type, and all that tells it from others of that type."""
    return dict(_lines("", state))


def _lines(path: str, value: Any) -> Iterator[tuple[str, str]]:
    kind = type(value).__name__
    if isinstance(value, dict):
        yield path, f"{kind} of {len(value)} {getattr(value, '_metadata', '')}".strip()
        for i, (key, item) in enumerate(value.items()):
            yield from _lines(f"{path}/{i}:{key!r}", item)
    elif isinstance(value, Namespace | BytesIO):
        yield path, f"{kind} at {value.tell() if isinstance(value, BytesIO) else ''}"
        yield from _lines(f"{path}/", vars(value) if isinstance(value, Namespace) else value.getvalue())
    elif isinstance(value, list | tuple | deque):
        yield path, f"{kind} of {len(value)}" + (f" {value.maxlen}" if isinstance(value, deque) else "")
        for i, item in enumerate(value):
            yield from _lines(f"{path}/{i}", item)
    else:
        yield path, f"{kind} {_leaf(value)}"


def _leaf(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {value.requires_grad} {_sha(bits(value))}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype.str} {list(value.shape)} {_sha(value.tobytes())}"
    return struct.pack(">d", value).hex() if isinstance(value, float) else ascii(value)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digests(root: Path) -> dict[str, str]:
    """Every file below a directory by its path in it."""
    return {
        path.relative_to(root).as_posix(): _sha(path.read_bytes()) for path in sorted(root.rglob("*")) if path.is_file()
    }
