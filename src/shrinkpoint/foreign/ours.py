"""Checkpoints that this library wrote, as something to convert: for the way back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.foreign import stock
from shrinkpoint.foreign.checkpoint import SOURCE, STATE, Broken, Checkpoint, disk_bytes
from shrinkpoint.foreign.folder import is_ours
from shrinkpoint.foreign.steps import step_of
from shrinkpoint.state import unflatten
from shrinkpoint.storage.base import RESERVED
from shrinkpoint.store import Store, folder
from shrinkpoint.store.single import load
from shrinkpoint.store.unfold import decode

_STEP, _PAYLOAD = re.compile("step-[0-9]{9,15}"), re.compile(r"rank-[0-9]{5}(\.[0-9]+)?\.safetensors")


@dataclass(frozen=True)
class Kept(Checkpoint):
    """A checkpoint of a store; `path` is that of the store."""

    @property
    def name(self) -> str:
        return f"{self.path.name}@{self.step}"

    @property
    def is_ours(self) -> bool:
        return True

    @property
    def bytes(self) -> int:
        return Store(self.path).manifest(self.step).stored_bytes

    def read(self, *, opaque: bool = False) -> Any:
        return Store(self.path).load(self.step, keep=False)


@dataclass(frozen=True)
class Lost(Broken):
    """One of a store or a run of ours whose manifest cannot be read."""

    @property
    def is_ours(self) -> bool:
        return True


@dataclass(frozen=True)
class File(Checkpoint):
    """A single file."""

    @property
    def is_ours(self) -> bool:
        return True

    def read(self, *, opaque: bool = False) -> Any:
        return load(self.path)


@dataclass(frozen=True)
class Folder(Checkpoint):
    """A directory that a framework's integration wrote; its chain's files are in it."""

    @property
    def is_ours(self) -> bool:
        return True

    @property
    def bytes(self) -> int:
        return disk_bytes(path for path in self.path.rglob("*") if path.is_file())

    def read(self, *, opaque: bool = False) -> Any:
        manifest = folder.read_manifest(self.path)
        if stock.frameworks(manifest) == "dcp":
            from shrinkpoint.train.dcp import load as load_shards  # needs torch.distributed

            state: Any = load_shards(self.path)
        else:
            decoded = decode(self.path)
            state = unflatten(decoded.tree, decoded.reference.tensors, where=str(self.path), max_bytes=decoded.left)
        part = stock.part(self.path, manifest, state, opaque=opaque)
        return state if part is None else {SOURCE: {"name": self.name, **part.said}, STATE: part.content}


def is_store(path: Path) -> bool:
    """Whether a directory has a checkpoint as a store keeps it."""
    return any(_STEP.fullmatch(one.name) and (one / "manifest.json").is_file() for one in path.iterdir())


def is_begun(path: Path) -> bool:
    """Whether a directory is empty, or has no more in it than what a store's first save leaves when it is killed."""
    steps = [one for one in path.iterdir() if not one.name.startswith(RESERVED)]
    return all(_STEP.fullmatch(step.name) and step.is_dir() for step in steps) and all(
        one.name.startswith(RESERVED) or _PAYLOAD.fullmatch(one.name) for step in steps for one in step.iterdir()
    )


def kept(path: Path) -> Iterator[Checkpoint]:
    """The checkpoints of a store, those whose manifest cannot be read included.

    Raises:
        NotFoundError: there is none that is not forgotten.
    """
    listing = Store(path).scan()
    if not listing.shown and not listing.broken:
        raise NotFoundError(str(path), found="no checkpoint", expected="a store with some", do="save one first")
    yield from (Kept(step, path) for step in listing.shown)
    yield from (Lost(step, path, error) for step, error in listing.broken.items())


def found(path: Path) -> Checkpoint | None:
    """The checkpoint of ours that a file or a directory is, if it is one."""
    if path.is_dir():
        try:
            return Folder(_folder_step(path), path) if is_ours(path) else None
        except ShrinkpointError as error:
            return Lost(step_of(path.name) or 0, path, error)
    from shrinkpoint.foreign import safetensors_file

    ours = path.suffix == ".safetensors" and safetensors_file.is_ours(path)
    return File(step_of(path.name) or 0, path) if ours else None


def _folder_step(path: Path) -> int:
    step = folder.read_manifest(path).step
    return step if step is not None else step_of(path.name) or 0
