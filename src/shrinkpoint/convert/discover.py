"""Discovers what a path holds that can be converted: one checkpoint, or a series of them ordered by step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shrinkpoint.convert import dcp, directory, framework_layouts, safetensors_file, torch_file
from shrinkpoint.convert.part import TENSOR_SUFFIXES, Part
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.storage import what_is_at
from shrinkpoint.storage.base import RESERVED
from shrinkpoint.store import Store
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import find_checkpoints, read_directory_manifest
from shrinkpoint.store.single_file import load
from shrinkpoint.tensors.flat_state import unflatten

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
        manifest = read_directory_manifest(self.path)
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
            return NativeDirectory(_directory_step(path), path) if directory.is_ours(path) else None
        except ShrinkpointError as error:
            return BrokenNativeCheckpoint(step_from_name(path.name) or 0, path, error)
    is_native = path.suffix == ".safetensors" and safetensors_file.is_ours(path)
    return NativeFile(step_from_name(path.name) or 0, path) if is_native else None


def _directory_step(path: Path) -> int:
    step = read_directory_manifest(path).step
    return step if step is not None else step_from_name(path.name) or 0


_SHARD_PATTERN = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
_CHECKPOINTS_DIR = "checkpoints"
"""Directory in which Accelerate and Lightning keep the checkpoints of a project."""


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints of one path, by rising step.

    Attributes:
        checkpoints: at least one.
        ignored_paths: files and directories next to them that are no checkpoints, or have no step in their names.
        is_run_dir: the path is the directory of a run, even if only one checkpoint is in it.
    """

    checkpoints: Sequence[SourceCheckpoint]
    ignored_paths: Sequence[Path] = ()
    is_run_dir: bool = False


def discover(path: Path, *, only: Sequence[str] = (), step: int | None = None) -> CheckpointSeries:
    """Discovers the checkpoints at a path: one, or a run of them.

    Args:
        only: patterns for the names of a run's checkpoints; empty: all.
        step: only the checkpoint of this step; None: all.

    Raises:
        NotFoundError: there is nothing, or nothing that matches.
        PolicyError: two checkpoints of a run have the same step.
        FormatError: an index or a metadata file is damaged; in a run, reading that checkpoint raises it instead.
    """
    if not path.exists():
        raise NotFoundError(str(path), found="no such file or directory", do="check the path")
    if not path.is_file() and not path.is_dir():  # a pipe, which might never end
        raise NotFoundError(str(path), found=what_is_at(path), expected="a file or a directory", do="name another")
    series = _discover_at(path.resolve() if path.name in ("", "..") else path)
    matches = [
        checkpoint
        for checkpoint in series.checkpoints
        if (step is None or checkpoint.step == step)
        and (not only or not series.is_run_dir or any(fnmatchcase(checkpoint.name, pattern) for pattern in only))
    ]
    if not matches:
        of_step = "" if step is None else f" of step {step}"
        like = f" like {' or '.join(only)}" if only else ""
        names = ", ".join(f"{checkpoint.name} (step {checkpoint.step})" for checkpoint in series.checkpoints[:8])
        found, expected = f"no checkpoint{of_step}{like}", f"one of {names}"
        raise NotFoundError(str(path), found=found, expected=expected, do="choose among these")
    return CheckpointSeries(_sort_by_step(matches, path), series.ignored_paths, series.is_run_dir)


def _discover_at(path: Path) -> CheckpointSeries:
    native_checkpoint = native_checkpoint_at(path)
    if native_checkpoint is not None:
        return CheckpointSeries([native_checkpoint])
    if path.is_file():
        return CheckpointSeries([SourceCheckpoint(step_from_name(path.name) or 0, path)])
    if is_store(path):
        return CheckpointSeries([*store_checkpoints(path)], find_checkpoints(path), is_run_dir=True)
    if (path / dcp.METADATA_FILE).is_file():
        return CheckpointSeries([SourceCheckpoint(step_from_name(path.name) or 0, path)])
    run = _series_in(path)
    if run.checkpoints and not _is_engine_checkpoint(run, path):
        return run
    if not _has_tensor_files(path) and (path / _CHECKPOINTS_DIR).is_dir():
        return _discover_at(path / _CHECKPOINTS_DIR)
    if not directory.scan_directory(path).holds_tensors:
        raise directory.no_checkpoint_error(path)
    return CheckpointSeries([SourceCheckpoint(step_from_name(path.name) or 0, path)])


def _series_in(path: Path) -> CheckpointSeries:
    """The children of a directory that are checkpoints with a step in their names."""
    checkpoints: list[SourceCheckpoint] = []
    others: list[Path] = []
    for child in sorted(path.iterdir()):
        step = None if _SHARD_PATTERN.search(child.name) else step_from_name(child.name)
        checkpoint = None if step is None else _child_checkpoint(child, step)
        if checkpoint is None:
            others.append(child)
        else:
            checkpoints.append(checkpoint)
    ignored_paths = [other for other in others if not _is_alias(other, checkpoints)]
    return CheckpointSeries(checkpoints, ignored_paths, is_run_dir=True)


def _child_checkpoint(path: Path, step: int) -> SourceCheckpoint | None:
    if path.is_file():
        if path.suffix not in TENSOR_SUFFIXES and not torch_file.is_torch_file(path):
            return None
        return native_checkpoint_at(path) or SourceCheckpoint(step, path)
    if not path.is_dir():
        return None
    native_checkpoint = native_checkpoint_at(path)
    if native_checkpoint is not None:
        return native_checkpoint
    try:
        return SourceCheckpoint(step, path) if directory.scan_directory(path).holds_tensors else None
    except ShrinkpointError as error:
        return BrokenCheckpoint(step, path, error)


def _is_engine_checkpoint(series: CheckpointSeries, path: Path) -> bool:
    """Whether a directory is one checkpoint with the directory of an engine in it, and not a run.

    DeepSpeed's `checkpoint-500/global_step500` is such a one.
    """
    return (
        len(series.checkpoints) == 1
        and series.checkpoints[0].step == step_from_name(path.name)
        and _has_tensor_files(path)
    )


def _has_tensor_files(path: Path) -> bool:
    return any(child.suffix in TENSOR_SUFFIXES for child in path.iterdir())


def _is_alias(path: Path, checkpoints: Iterable[SourceCheckpoint]) -> bool:
    """Whether a file (`last.ckpt`) is another name of one of the checkpoints."""
    return not path.exists() or any(path.samefile(checkpoint.path) for checkpoint in checkpoints)


def _sort_by_step(checkpoints: Sequence[SourceCheckpoint], path: Path) -> Sequence[SourceCheckpoint]:
    steps: dict[int, SourceCheckpoint] = {}
    for checkpoint in checkpoints:
        if checkpoint.step in steps:
            found = f"step {checkpoint.step} twice: {steps[checkpoint.step].name} and {checkpoint.name}"
            expected, do = "one checkpoint a step", "choose with --only"
            raise PolicyError(str(path), found=found, expected=expected, do=do)
        steps[checkpoint.step] = checkpoint
    return [steps[step] for step in sorted(steps)]
