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
"""Where Accelerate and Lightning keep the checkpoints of a project."""


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints by rising step.

    Attributes:
        checkpoints: at least one.
        ignored_paths: files and directories beside them that are none, or say no step.
        is_run_dir: it is the directory of a run, even if only one checkpoint is in it.
    """

    checkpoints: Sequence[SourceCheckpoint]
    ignored_paths: Sequence[Path] = ()
    is_run_dir: bool = False


def discover(path: Path, *, only: Sequence[str] = (), step: int | None = None) -> CheckpointSeries:
    """What there is at a path.

    Args:
        only: patterns for the names of a run's checkpoints.
        step: only the checkpoint of this step.

    Raises:
        NotFoundError: there is nothing, or nothing that matches.
        PolicyError: two checkpoints of a run say the same step.
        FormatError: an index or a metadata file is damaged; of a run, the checkpoint that it is in says so when read.
    """
    if not path.exists():
        raise NotFoundError(str(path), found="no such file or directory", do="check the path")
    if not path.is_file() and not path.is_dir():  # a pipe, which might never end
        raise NotFoundError(str(path), found=what_is_at(path), expected="a file or a directory", do="name another")
    found = _discover_at(path.resolve() if path.name in ("", "..") else path)
    matching = [
        one
        for one in found.checkpoints
        if (step is None or one.step == step)
        and (not only or not found.is_run_dir or any(fnmatchcase(one.name, pattern) for pattern in only))
    ]
    if not matching:
        what = (
            f"no checkpoint {'' if step is None else f'of step {step} '}{'like ' + ' or '.join(only) if only else ''}"
        )
        names = ", ".join(f"{one.name} (step {one.step})" for one in list(found.checkpoints)[:8])
        raise NotFoundError(str(path), found=what.strip(), expected=f"one of {names}", do="choose among these")
    return CheckpointSeries(_sort_by_step(matching, path), found.ignored_paths, found.is_run_dir)


def _discover_at(path: Path) -> CheckpointSeries:
    one = native.native_checkpoint_at(path)
    if one is not None:
        return CheckpointSeries([one])
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
    """The children of a directory whose names say a step; none where it is a checkpoint itself."""
    children = sorted(path.iterdir())
    found: list[SourceCheckpoint] = []
    others: list[Path] = []
    for child in children:
        step = step_from_name(child.name)
        one = None if step is None or _SHARD_PATTERN.search(child.name) else _child_checkpoint(child, step)
        if one is None:
            others.append(child)
        else:
            found.append(one)
    return CheckpointSeries(found, [other for other in others if not _is_alias(other, found)], is_run_dir=True)


def _child_checkpoint(path: Path, step: int) -> SourceCheckpoint | None:
    if path.is_file():
        if path.suffix not in TENSOR_SUFFIXES and not torch_file.is_torch_file(path):
            return None
        return native.native_checkpoint_at(path) or SourceCheckpoint(step, path)
    if not path.is_dir():
        return None
    own = native.native_checkpoint_at(path)
    if own is not None:
        return own
    try:
        return SourceCheckpoint(step, path) if directory.scan_directory(path).holds_tensors else None
    except ShrinkpointError as error:
        return BrokenCheckpoint(step, path, error)


def _is_engine_checkpoint(series: CheckpointSeries, path: Path) -> bool:
    """Whether a directory is not a run but one checkpoint, with the directory of an engine in it: DeepSpeed's
    `checkpoint-500/global_step500`.
    """
    return (
        len(series.checkpoints) == 1
        and series.checkpoints[0].step == step_from_name(path.name)
        and _has_tensor_files(path)
    )


def _has_tensor_files(path: Path) -> bool:
    return any(child.suffix in TENSOR_SUFFIXES for child in path.iterdir())


def _is_alias(path: Path, checkpoints: Iterable[SourceCheckpoint]) -> bool:
    """Whether a file (`last.ckpt`) is another name of a checkpoint that is converted."""
    return not path.exists() or any(path.samefile(one.path) for one in checkpoints)


def _sort_by_step(checkpoints: Sequence[SourceCheckpoint], path: Path) -> Sequence[SourceCheckpoint]:
    steps: dict[int, SourceCheckpoint] = {}
    for one in checkpoints:
        if one.step in steps:
            names = f"{steps[one.step].name} and {one.name}"
            raise PolicyError(
                str(path),
                found=f"step {one.step} twice: {names}",
                expected="one checkpoint a step",
                do="choose with --only",
            )
        steps[one.step] = one
    return [steps[step] for step in sorted(steps)]
