"""Checkpoints of this library as sources of a conversion back: stores, single files, directories of frameworks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.convert import framework_layouts, safetensors_file
from shrinkpoint.convert.directory import is_ours
from shrinkpoint.convert.source import (
    SOURCE_KEY,
    STATE_KEY,
    BrokenCheckpoint,
    SourceCheckpoint,
    disk_bytes,
    step_from_name,
)
from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.storage.base import RESERVED
from shrinkpoint.store import Store, directory
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.single_file import load
from shrinkpoint.tensors.flat_state import unflatten

_STEP_DIR_PATTERN = re.compile("step-[0-9]{9,15}")
_PAYLOAD_PATTERN = re.compile(r"rank-[0-9]{5}(\.[0-9]+)?\.safetensors")


@dataclass(frozen=True)
class StoreCheckpoint(SourceCheckpoint):
    """A checkpoint of a store; `path` is the store's."""

    @property
    def name(self) -> str:
        return f"{self.path.name}@{self.step}"

    @property
    def is_ours(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return Store(self.path).manifest(self.step).stored_bytes

    def read(self, *, opaque: bool = False) -> Any:
        return Store(self.path).load(self.step, keep=False)


@dataclass(frozen=True)
class BrokenNativeCheckpoint(BrokenCheckpoint):
    """A checkpoint of a store or of a framework's run whose manifest cannot be read."""

    @property
    def is_ours(self) -> bool:
        return True


@dataclass(frozen=True)
class NativeFile(SourceCheckpoint):
    """A single file that `shrinkpoint.save` or `convert` wrote."""

    @property
    def is_ours(self) -> bool:
        return True

    def read(self, *, opaque: bool = False) -> Any:
        return load(self.path)


@dataclass(frozen=True)
class NativeDirectory(SourceCheckpoint):
    """A directory that a framework's integration wrote, with the files of its chain in it."""

    @property
    def is_ours(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return disk_bytes(path for path in self.path.rglob("*") if path.is_file())

    def read(self, *, opaque: bool = False) -> Any:
        manifest = directory.read_directory_manifest(self.path)
        if framework_layouts.framework_of(manifest) == "dcp":
            from shrinkpoint.train.dcp import load as load_shards  # needs torch.distributed

            state: Any = load_shards(self.path)
        else:
            decoded = decode_directory(self.path)
            state = unflatten(
                decoded.tree, decoded.reference.tensors, where=str(self.path), max_bytes=decoded.max_copy_bytes
            )
        part = framework_layouts.to_framework_part(self.path, manifest, state, opaque=opaque)
        return state if part is None else {SOURCE_KEY: {"name": self.name, **part.description}, STATE_KEY: part.content}


def is_store(path: Path) -> bool:
    """Whether a directory holds a checkpoint of a store."""
    return any(
        _STEP_DIR_PATTERN.fullmatch(child.name) and (child / "manifest.json").is_file() for child in path.iterdir()
    )


def is_new_store(path: Path) -> bool:
    """Whether a directory is empty, or holds only what the first save of a store leaves when it is killed."""
    steps = [child for child in path.iterdir() if not child.name.startswith(RESERVED)]
    return all(_STEP_DIR_PATTERN.fullmatch(step.name) and step.is_dir() for step in steps) and all(
        file.name.startswith(RESERVED) or _PAYLOAD_PATTERN.fullmatch(file.name)
        for step in steps
        for file in step.iterdir()
    )


def store_checkpoints(path: Path) -> Iterator[SourceCheckpoint]:
    """Yields the checkpoints of a store, also those whose manifest cannot be read.

    Raises:
        NotFoundError: there is none, or all are forgotten.
    """
    listing = Store(path).scan()
    if not listing.visible and not listing.broken:
        raise NotFoundError(str(path), found="no checkpoint", expected="a store with some", do="save one first")
    yield from (StoreCheckpoint(step, path) for step in listing.visible)
    yield from (BrokenNativeCheckpoint(step, path, error) for step, error in listing.broken.items())


def native_checkpoint_at(path: Path) -> SourceCheckpoint | None:
    """The checkpoint that a file or a directory is, if this library wrote it; else None."""
    if path.is_dir():
        try:
            return NativeDirectory(_directory_step(path), path) if is_ours(path) else None
        except ShrinkpointError as error:
            return BrokenNativeCheckpoint(step_from_name(path.name) or 0, path, error)
    is_native = path.suffix == ".safetensors" and safetensors_file.is_ours(path)
    return NativeFile(step_from_name(path.name) or 0, path) if is_native else None


def _directory_step(path: Path) -> int:
    step = directory.read_directory_manifest(path).step
    return step if step is not None else step_from_name(path.name) or 0
