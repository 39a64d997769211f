"""A checkpoint of many ranks as one state dict, without a model and without other processes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.errors import CorruptError
from shrinkpoint.state import empty, torch_dtype
from shrinkpoint.state.dtypes import raw
from shrinkpoint.storage import local_path
from shrinkpoint.train.dcp.contents import Whole, check_kinds
from shrinkpoint.train.dcp.description import Chunk, Item
from shrinkpoint.train.dcp.reader import opened


@torch.no_grad()
def load(folder: str | Path, *, nested: bool = True, threads: int | None = None) -> dict[str, Any]:
    """The state dict that was saved, every tensor whole, on the CPU.

    Memory: the state, and one payload with what it stands on.

    Args:
        nested: False: by fully qualified name, as torch stores it.
        threads: native threads for decoding; None: every core.

    Raises:
        NotFoundError: there is no checkpoint of ours.
        MismatchError: it is another framework's to read.
        ChainError, FormatError: bytes are at fault.
        StorageError: reading failed.
    """
    root = local_path(folder, "folder").absolute()
    manifest, description = opened(root)
    flat: dict[str, Any] = {}
    owned: dict[int, list[tuple[Item, Chunk]]] = {}
    for item in description.items.values():
        for chunk in item.chunks:
            owned.setdefault(chunk.payload, []).append((item, chunk))
    for at, mine in sorted(owned.items()):  # before there is memory for what a manifest claims
        check_kinds(root, manifest, at, [(item, chunk) for item, chunk in mine if item.is_tensor])
    for item in description.items.values():
        flat[item.fqn] = _room(item, root) if item.is_tensor else None
    for at, mine in sorted(owned.items()):
        with Whole(root, manifest, at, threads) as contents:
            for item, chunk in mine:
                if not item.is_tensor:
                    flat[item.fqn] = contents.value(item.fqn)
                else:
                    _put(flat[item.fqn], chunk, contents.box(item, chunk, (0,) * len(chunk.sizes), chunk.sizes))
    return _nest(flat, description.items) if nested else flat


def _room(item: Item, root: Path) -> Tensor:
    """Memory for a tensor, once it is sure that its boxes fill it."""
    filled = sum(item.nbytes(chunk.sizes) for chunk in item.chunks)
    if filled != item.nbytes(item.size):
        found, expected = f"boxes of {filled} bytes", f"{item.nbytes(item.size)}, all of the tensor"
        raise CorruptError(f"{root}: {item.fqn!r}", found=found, expected=expected, do="restore another checkpoint")
    return empty(item.size, torch_dtype(item.dtype))


def _put(whole: Tensor, chunk: Chunk, values: Tensor) -> None:
    box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    raw(whole)[box].copy_(raw(values))


def _nest(flat: dict[str, Any], items: Any) -> dict[str, Any]:
    nest: dict[str, Any] = {}
    for fqn, value in flat.items():
        path = items[fqn].path or (fqn,)
        level: Any = nest
        for key, below in pairwise(path):
            level = _slot(level, key, [] if isinstance(below, int) else {})
        _slot(level, path[-1], None)
        level[path[-1]] = value
    return nest


def _slot(level: Any, key: str | int, fresh: Any) -> Any:
    """What stands there already, else `fresh`."""
    if isinstance(level, list) and isinstance(key, int):
        level.extend([None] * (key + 1 - len(level)))
        level[key] = fresh if level[key] is None else level[key]
    elif isinstance(level, dict) and isinstance(key, str):
        level.setdefault(key, fresh)
    else:
        do = "restore another checkpoint"
        raise CorruptError("path", found=f"{key!r} in a {type(level).__name__}", expected="a nest", do=do)
    return level[key]
