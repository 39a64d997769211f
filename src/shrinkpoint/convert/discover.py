"""Discovers what a path holds that can be converted: one checkpoint, or a series of them ordered by step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shrinkpoint.convert import dcp, directory, native, torch_file
from shrinkpoint.convert.part import TENSOR_SUFFIXES
from shrinkpoint.convert.source import BrokenCheckpoint, SourceCheckpoint, step_from_name
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.storage import what_is_at
from shrinkpoint.store.directory import find_checkpoints

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
    native_checkpoint = native.native_checkpoint_at(path)
    if native_checkpoint is not None:
        return CheckpointSeries([native_checkpoint])
    if path.is_file():
        return CheckpointSeries([SourceCheckpoint(step_from_name(path.name) or 0, path)])
    if native.is_store(path):
        return CheckpointSeries([*native.store_checkpoints(path)], find_checkpoints(path), is_run_dir=True)
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
        return native.native_checkpoint_at(path) or SourceCheckpoint(step, path)
    if not path.is_dir():
        return None
    native_checkpoint = native.native_checkpoint_at(path)
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
