"""What a path holds that can be converted: one checkpoint, or a run of them in the order of their steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.foreign import dcp_folder, folder, ours, torch_file
from shrinkpoint.foreign.checkpoint import Broken, Checkpoint
from shrinkpoint.foreign.part import TENSORS
from shrinkpoint.foreign.steps import step_of
from shrinkpoint.storage import what_is_at
from shrinkpoint.store.folder import found_in

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
_INSIDE = "checkpoints"
"""Where Accelerate and Lightning keep the checkpoints of a project."""


@dataclass(frozen=True)
class Run:
    """Checkpoints by rising step.

    Attributes:
        checkpoints: at least one.
        left_out: files and directories beside them that are none, or say no step.
        whole: it is the directory of a run, even if only one checkpoint is in it.
    """

    checkpoints: Sequence[Checkpoint]
    left_out: Sequence[Path] = ()
    whole: bool = False


def find(path: Path, *, only: Sequence[str] = (), step: int | None = None) -> Run:
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
    found = _at(path.resolve() if path.name in ("", "..") else path)
    matching = [
        one
        for one in found.checkpoints
        if (step is None or one.step == step)
        and (not only or not found.whole or any(fnmatchcase(one.name, pattern) for pattern in only))
    ]
    if not matching:
        what = (
            f"no checkpoint {'' if step is None else f'of step {step} '}{'like ' + ' or '.join(only) if only else ''}"
        )
        names = ", ".join(f"{one.name} (step {one.step})" for one in list(found.checkpoints)[:8])
        raise NotFoundError(str(path), found=what.strip(), expected=f"one of {names}", do="choose among these")
    return Run(_ordered(matching, path), found.left_out, found.whole)


def _at(path: Path) -> Run:
    one = ours.found(path)
    if one is not None:
        return Run([one])
    if path.is_file():
        return Run([Checkpoint(step_of(path.name) or 0, path)])
    if ours.is_store(path):
        return Run([*ours.kept(path)], found_in(path), whole=True)
    if (path / dcp_folder.METADATA).is_file():
        return Run([Checkpoint(step_of(path.name) or 0, path)])
    run = _run(path)
    if run.checkpoints and not _is_inner(run, path):
        return run
    if not _holds_files(path) and (path / _INSIDE).is_dir():
        return _at(path / _INSIDE)
    if not folder.scan(path).holds_tensors:
        raise folder.nothing(path)
    return Run([Checkpoint(step_of(path.name) or 0, path)])


def _run(path: Path) -> Run:
    """The children of a directory whose names say a step; none where it is a checkpoint itself."""
    children = sorted(path.iterdir())
    found: list[Checkpoint] = []
    others: list[Path] = []
    for child in children:
        step = step_of(child.name)
        one = None if step is None or _SHARD.search(child.name) else _child(child, step)
        if one is None:
            others.append(child)
        else:
            found.append(one)
    return Run(found, [other for other in others if not _same(other, found)], whole=True)


def _child(path: Path, step: int) -> Checkpoint | None:
    if path.is_file():
        if path.suffix not in TENSORS and not torch_file.is_torch(path):
            return None
        return ours.found(path) or Checkpoint(step, path)
    if not path.is_dir():
        return None
    own = ours.found(path)
    if own is not None:
        return own
    try:
        return Checkpoint(step, path) if folder.scan(path).holds_tensors else None
    except ShrinkpointError as error:
        return Broken(step, path, error)


def _is_inner(run: Run, path: Path) -> bool:
    """Whether a directory is not a run but one checkpoint, with the directory of an engine in it: DeepSpeed's
    `checkpoint-500/global_step500`.
    """
    return len(run.checkpoints) == 1 and run.checkpoints[0].step == step_of(path.name) and _holds_files(path)


def _holds_files(path: Path) -> bool:
    return any(child.suffix in TENSORS for child in path.iterdir())


def _same(path: Path, found: Iterable[Checkpoint]) -> bool:
    """Whether a file (`last.ckpt`) is another name of a checkpoint that is converted."""
    return not path.exists() or any(path.samefile(one.path) for one in found)


def _ordered(found: Sequence[Checkpoint], path: Path) -> Sequence[Checkpoint]:
    steps: dict[int, Checkpoint] = {}
    for one in found:
        if one.step in steps:
            names = f"{steps[one.step].name} and {one.name}"
            raise PolicyError(
                str(path), found=f"step {one.step} twice: {names}", expected="one checkpoint a step",
                do="choose with --only",
            )  # fmt: skip
        steps[one.step] = one
    return [steps[step] for step in sorted(steps)]
