"""Discovers what a path holds that can be converted: one checkpoint, or a series of them ordered by step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from shrinkpoint.convert import dcp, directory, framework_layouts, safetensors_file, torch_file
from shrinkpoint.convert.part import TENSOR_SUFFIXES, Part, tensor_suffix
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.storage import LocalStorage, Storage, what_is_at
from shrinkpoint.storage.base import RESERVED
from shrinkpoint.store import Store, layout
from shrinkpoint.store.checkpoint_file import build_state
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.identify import find_checkpoints
from shrinkpoint.store.listing import scan
from shrinkpoint.store.load import load
from shrinkpoint.store.step_storage import StepStorage, find_store

_STEP_PATTERN = re.compile(
    r"(?:^|[^a-z])(?:global[-_]?)?(step|checkpoint|ckpt|iteration|iter|it|update|epoch|ep)s?[-_=.]?0*(\d{1,15})(?!\d)",
    re.IGNORECASE,
)
_EPOCH_LABELS = ("epoch", "ep")
_SHARD_PATTERN = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
_CHECKPOINTS_DIR = "checkpoints"  # Directory in which Accelerate and Lightning keep the checkpoints of a project


def step_from_name(name: str) -> int | None:
    """Reads the training step from a file name; an epoch counts if the name has nothing else. None: it has no step.

    >>> names = "checkpoint-500", "epoch=0-step=10.ckpt", "model_epoch_8.pth", "step_000100.pt", "ck100"
    >>> [step_from_name(name) for name in names]
    [500, 10, 8, 100, None]
    >>> names = "global_step7", "model-00001-of-00002.safetensors", "iter=0040", "12", "12.pt", "last.ckpt"
    >>> [step_from_name(name) for name in names]
    [7, None, 40, 12, 12, None]
    """
    if (stem := name.removesuffix(tensor_suffix(name))).isdecimal():
        return int(stem) if len(stem) <= 15 else None
    numbers = [(label.lower(), int(digits)) for label, digits in _STEP_PATTERN.findall(name)]
    steps = [number for label, number in numbers if label not in _EPOCH_LABELS]
    return next(iter([*steps, *(number for _, number in numbers)]), None)


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint that can be converted; nothing of it has been read yet. This class: a file or directory of others.

    Attributes:
        step: the training step, by which the checkpoints of a run are ordered.
        path: the file or the directory.
        is_ours: this library wrote it.
    """

    is_ours: ClassVar[bool] = False
    step: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the disk; a file with several names (hard links) counts once."""
        return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in map(os.stat, self._files())}.values())

    def _files(self) -> Iterable[Path]:
        return directory.list_files(self.path)[0] if self.path.is_dir() else [self.path]

    def read(self, *, opaque: bool = False) -> Any:
        """Reads the checkpoint as {"source": its origin, "state": its content}, or one of ours as it was saved.

        Tensors are views of mapped files where that is possible.

        Args:
            opaque: take files that cannot be read without running them as their bytes, however large.

        Raises:
            StateError: it holds something that is neither a tensor nor a plain value. Nothing has been run.
            NotFoundError: a part of it is missing.
            FormatError: a file is damaged.
            StorageError: reading failed.
        """
        return self._read_part(opaque).to_state(self.name)

    def read_with_unchecked(self, *, opaque: bool = False) -> tuple[Any, tuple[str, ...]]:
        """The checkpoint as `read` returns it, and the names of its files that have no checksum; raises as `read`."""
        if self.is_ours:
            return self.read(opaque=opaque), ()
        part = self._read_part(opaque)
        return part.to_state(self.name), part.unchecked

    def _read_part(self, opaque: bool) -> Part:
        path = self.path
        if path.is_dir():
            return directory.read(path, opaque=opaque)
        if path.suffix == ".safetensors":
            return safetensors_file.read(path)
        if path.suffix in (".pt", ".pth", ".ckpt", ".bin") or torch_file.is_torch_file(path):
            return torch_file.read(path)
        expected = "a torch file (.pt, .pth, .bin, .ckpt) or a safetensors file"
        raise PolicyError(str(path), found="a file of another kind", expected=expected, do="name a checkpoint")


@dataclass(frozen=True)
class BrokenCheckpoint(SourceCheckpoint):
    """A checkpoint whose damage shows before it is read. Reading it raises `error`; others of its run can be read."""

    error: ShrinkpointError  # what is wrong with it

    def _read_part(self, opaque: bool) -> Part:
        raise self.error


class BrokenNativeCheckpoint(BrokenCheckpoint):
    """A checkpoint of a store or of a framework's run whose manifest cannot be read."""

    is_ours = True


class StoreCheckpoint(SourceCheckpoint):
    """A checkpoint of a store; `path` is the store's."""

    is_ours = True

    @property
    def name(self) -> str:
        return f"{self.path.name}@{self.step}"

    @property
    def nbytes(self) -> int:
        return Store(self.path).manifest(self.step).stored_bytes

    def read(self, *, opaque: bool = False) -> Any:
        return Store(self.path).load(self.step, keep=False)


class NativeFile(SourceCheckpoint):
    """A single file that `shrinkpoint.save` or `convert` wrote."""

    is_ours = True

    def read(self, *, opaque: bool = False) -> Any:
        return load(self.path)


class NativeDirectory(SourceCheckpoint):
    """A directory that a framework's integration wrote, with the files of its chain in it."""

    is_ours = True

    def _files(self) -> Iterable[Path]:
        return (path for path in self.path.rglob("*") if path.is_file())

    def read(self, *, opaque: bool = False) -> Any:
        manifest = read_directory_manifest(self.path)
        if framework_layouts.framework_of(manifest) == "dcp":
            from shrinkpoint.train.dcp import load as load_shards  # needs torch.distributed

            state: Any = load_shards(self.path)
        else:
            state = build_state(decode_directory(self.path), str(self.path))
        part = framework_layouts.to_framework_part(self.path, manifest, state, opaque=opaque)
        return state if part is None else part.to_state(self.name)


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
        store, _, number = str(path).rpartition("@")
        is_step = number.isdecimal() and Path(store).is_dir()
        do = f"name the store, and add --step {number}" if is_step else "check the path"
        raise NotFoundError(str(path), found="no such file or directory", do=do)
    if not path.is_file() and not path.is_dir():  # a pipe, which might never end
        raise NotFoundError(str(path), found=what_is_at(path), expected="a file or a directory", do="check the path")
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
        raise NotFoundError(str(path), found=found, expected=expected, do="choose one of them")
    steps: dict[int, SourceCheckpoint] = {}
    for checkpoint in matches:
        if checkpoint.step in steps:
            found = f"step {checkpoint.step} twice: {steps[checkpoint.step].name} and {checkpoint.name}"
            expected, do = "one checkpoint for each step", "choose one with --only"
            raise PolicyError(str(path), found=found, expected=expected, do=do)
        steps[checkpoint.step] = checkpoint
    return CheckpointSeries([steps[step] for step in sorted(steps)], series.ignored_paths, series.is_run_dir)


def _discover_at(path: Path) -> CheckpointSeries:
    native = _native_checkpoint(path)
    single = CheckpointSeries([native or SourceCheckpoint(step_from_name(path.name) or 0, path)])
    if native is not None or path.is_file():
        return single
    if is_store(path):
        return CheckpointSeries(
            [*_store_checkpoints(path, LocalStorage(path))], find_checkpoints(path), is_run_dir=True
        )
    if (path / dcp.METADATA_FILE).is_file():
        return single
    run = _series_in(path)
    has_tensor_files = any(child.suffix in TENSOR_SUFFIXES for child in path.iterdir())
    # a directory with one of the same step in it is one checkpoint: DeepSpeed's `checkpoint-500/global_step500`
    is_engine_checkpoint = has_tensor_files and [c.step for c in run.checkpoints] == [step_from_name(path.name)]
    if run.checkpoints and not is_engine_checkpoint:
        return run
    if not has_tensor_files and (path / _CHECKPOINTS_DIR).is_dir():
        return _discover_at(path / _CHECKPOINTS_DIR)
    if not directory.scan_directory(path).holds_tensors:
        raise directory.no_checkpoint_error(path)
    return single


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

    def is_alias(child: Path) -> bool:
        """True if a file (`last.ckpt`) is another name of one of the checkpoints."""
        return child.exists() and any(child.samefile(checkpoint.path) for checkpoint in checkpoints)

    return CheckpointSeries(checkpoints, [child for child in others if not is_alias(child)], is_run_dir=True)


def _child_checkpoint(path: Path, step: int) -> SourceCheckpoint | None:
    if path.is_file():
        if path.suffix not in TENSOR_SUFFIXES and not torch_file.is_torch_file(path):
            return None
        return _native_checkpoint(path) or SourceCheckpoint(step, path)
    if not path.is_dir():
        return None
    try:
        native = _native_checkpoint(path)
        if native is not None:
            return native
        return SourceCheckpoint(step, path) if directory.scan_directory(path).holds_tensors else None
    except ShrinkpointError as error:
        return BrokenCheckpoint(step, path, error)


def _native_checkpoint(path: Path) -> SourceCheckpoint | None:
    """The checkpoint that a file or a directory is, if this library wrote it; else None."""
    step = step_from_name(path.name) or 0
    if not path.is_dir():
        is_native = path.suffix == ".safetensors" and safetensors_file.is_ours(path)
        return NativeFile(step, path) if is_native else None
    try:
        if isinstance(store := find_store(LocalStorage(path)), StepStorage):
            return next(_store_checkpoints(path, store))
        if not directory.is_ours(path):
            return None
        recorded_step = read_directory_manifest(path).step
        return NativeDirectory(step if recorded_step is None else recorded_step, path)
    except ShrinkpointError as error:
        return BrokenNativeCheckpoint(step, path, error)


def is_store(path: Path) -> bool:
    """True if a directory holds a checkpoint of a store."""
    return any(
        layout.step_of_dir(child.name) is not None and (child / layout.MANIFEST).is_file() for child in path.iterdir()
    )


def is_new_store(path: Path) -> bool:
    """True if a directory is empty, or holds only what the first save of a store leaves when it is killed."""
    steps = [child for child in path.iterdir() if not child.name.startswith(RESERVED)]
    return all(layout.step_of_dir(step.name) is not None and step.is_dir() for step in steps) and all(
        file.name.startswith(RESERVED) or layout.PAYLOAD.fullmatch(file.name)
        for step in steps
        for file in step.iterdir()
    )


def _store_checkpoints(path: Path, storage: Storage) -> Iterator[SourceCheckpoint]:
    """Yields the checkpoints of a store, also those whose manifest cannot be read; `NotFoundError` if there is none."""
    listing = scan(storage)
    if not listing.visible and not listing.broken:
        raise NotFoundError(str(path), found="no checkpoint", expected="a store with checkpoints", do="save one first")
    yield from (StoreCheckpoint(step, path) for step in listing.visible)
    yield from (BrokenNativeCheckpoint(step, path, error) for step, error in listing.broken.items())
