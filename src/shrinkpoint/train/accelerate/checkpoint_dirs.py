"""Checkpoint directories of an Accelerator: their numbers, which of them can be loaded, which have expired."""

from __future__ import annotations

import re
from pathlib import Path

from accelerate import Accelerator

from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.storage import local_path
from shrinkpoint.store.directory import is_checkpoint
from shrinkpoint.train.checkpointer import wait_for_writes

_NUMBERED_DIR = re.compile(r"checkpoint_(\d{1,18})")


class NoCheckpointError(NotFoundError, ValueError):
    """There is nothing to load. Also a ValueError, which `Accelerator.load_state` raises for a missing directory."""


def numbered_root(accelerator: Accelerator) -> Path | None:
    """Return the directory of the numbered checkpoints; None if the caller names each checkpoint.

    Raises:
        PolicyError: checkpoints are numbered, and there is no `project_dir`.
    """
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        return None
    if project.project_dir is None:
        raise PolicyError(
            "ProjectConfiguration",
            found="automatic_checkpoint_naming without a project_dir",
            do="pass project_dir= to Accelerator",
        )
    return local_path(project.project_dir, "project_dir").expanduser() / "checkpoints"


def save_dir(accelerator: Accelerator, output_dir: str | Path | None) -> Path:
    """Return the directory of the next checkpoint.

    Raises:
        PolicyError: no directory is given, or the next number is taken.
    """
    root = numbered_root(accelerator)
    if root is None:
        if output_dir is None:
            raise PolicyError(
                "save_state",
                found="no directory",
                do="pass output_dir=, or ProjectConfiguration(automatic_checkpoint_naming=True)",
            )
        return local_path(output_dir, "output_dir").expanduser()
    directory = root / f"checkpoint_{accelerator.save_iteration}"
    if has_saved_state(directory):
        raise PolicyError(
            str(directory),
            found="a checkpoint that is there",
            expected="a number that is free",
            do="set accelerator.project_configuration.iteration, or load_state first",
        )
    return directory


def load_candidates(accelerator: Accelerator, input_dir: str | Path | None) -> list[Path]:
    """Return the directories that may be loaded, newest first.

    Raises:
        NotFoundError: there is none.
        PolicyError: no directory is given, and checkpoints are not numbered.
    """
    if input_dir is not None:
        directory = local_path(input_dir, "input_dir").expanduser()
        wait_for_writes(directory)
        if not has_saved_state(directory):
            exists = directory.is_dir()
            message = f"Tried to find {directory} but folder does not exist"  # Accelerate's own words
            raise NoCheckpointError(
                str(directory),
                found="neither a manifest nor a state of Accelerate's own" if exists else message,
                expected="a checkpoint",
                do="look at the directories next to it",
            )
        return [directory]
    root = numbered_root(accelerator)
    if root is None:
        raise PolicyError(
            "load_state",
            found="no directory",
            do="pass input_dir=, or ProjectConfiguration(automatic_checkpoint_naming=True)",
        )
    candidates = [path for _, path in reversed(list_numbered_dirs(root))]
    if not candidates:
        raise NoCheckpointError(
            str(root), found="no checkpoint", expected="checkpoint_0 or a later one", do="train first"
        )
    return candidates


def list_numbered_dirs(root: Path) -> list[tuple[int, Path]]:
    """List number and path of the numbered directories, complete or not, oldest first."""
    if not root.is_dir():
        return []
    matches = ((_NUMBERED_DIR.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def next_free_number(root: Path) -> int:
    """Return the lowest number above those of all checkpoints."""
    return max((number for number, path in list_numbered_dirs(root) if has_saved_state(path)), default=-1) + 1


def expired_dirs(root: Path, limit: int | None) -> list[Path]:
    """Return all directories older than the newest `limit` checkpoints, oldest first.

    Directories without a checkpoint do not count towards the limit.
    """
    if limit is None:
        return []
    numbered = list_numbered_dirs(root)
    retained = [number for number, path in numbered if has_saved_state(path)][-max(limit, 1) :]
    return [path for number, path in numbered if retained and number < retained[0]]


def has_saved_state(directory: Path) -> bool:
    """Whether a directory holds a checkpoint, ours or one of Accelerate itself."""
    return is_checkpoint(directory) or is_stock_checkpoint(directory)


def is_stock_checkpoint(directory: Path) -> bool:
    """Whether Accelerate itself saved to a directory; the file is one of the last that it writes."""
    return not is_checkpoint(directory) and (directory / "random_states_0.pkl").is_file()
