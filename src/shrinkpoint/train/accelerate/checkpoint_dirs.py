"""Checkpoint directories of an Accelerator: their numbers, which of them can be loaded, which have expired."""

from __future__ import annotations

import re
from pathlib import Path

from accelerate import Accelerator

from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.storage import local_path
from shrinkpoint.store import directory as folders
from shrinkpoint.train.checkpointer import wait_for_writes


class NoCheckpointError(NotFoundError, ValueError):
    """There is nothing to load: of a directory that is not there `Accelerator.load_state` makes a ValueError."""


_NUMBERED_DIR = re.compile(r"checkpoint_(\d{1,18})")


def numbered_root(accelerator: Accelerator) -> Path | None:
    """Where checkpoints are numbered; None: the caller names each of them.

    Raises:
        PolicyError: they are to be numbered, and nobody said where.
    """
    settings = accelerator.project_configuration
    if not settings.automatic_checkpoint_naming:
        return None
    if settings.project_dir is None:
        found, do = "automatic_checkpoint_naming without a project_dir", "pass project_dir= to Accelerator"
        raise PolicyError("ProjectConfiguration", found=found, do=do)
    return local_path(settings.project_dir, "project_dir").expanduser() / "checkpoints"


def save_dir(accelerator: Accelerator, output_dir: str | Path | None) -> Path:
    """Where the next checkpoint goes.

    Raises:
        PolicyError: nobody says where, or the next number is taken.
    """
    root = numbered_root(accelerator)
    if root is None:
        if output_dir is None:
            found, do = "no directory", "pass output_dir=, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            raise PolicyError("save_state", found=found, do=do)
        return local_path(output_dir, "output_dir").expanduser()
    folder = root / f"checkpoint_{accelerator.save_iteration}"
    if has_saved_state(folder):
        found, do = "a checkpoint that is there", "set accelerator.project_configuration.iteration, or load_state first"
        raise PolicyError(str(folder), found=found, expected="a number that is free", do=do)
    return folder


def load_candidates(accelerator: Accelerator, input_dir: str | Path | None) -> list[Path]:
    """What may be loaded, the newest first.

    Raises:
        NotFoundError: nothing is there.
        PolicyError: nobody says where.
    """
    if input_dir is not None:
        folder = local_path(input_dir, "input_dir").expanduser()
        wait_for_writes(folder)
        if not has_saved_state(folder):
            found = f"Tried to find {folder} but folder does not exist"  # Accelerate's own words
            if folder.is_dir():
                found = "neither a manifest nor a state of Accelerate's own"
            raise NoCheckpointError(str(folder), found=found, expected="a checkpoint", do="look at what lies beside it")
        return [folder]
    root = numbered_root(accelerator)
    if root is None:
        found, do = "no directory", "pass input_dir=, or ProjectConfiguration(automatic_checkpoint_naming=True)"
        raise PolicyError("load_state", found=found, do=do)
    found_at = [path for _, path in reversed(list_numbered_dirs(root))]
    if not found_at:
        raise NoCheckpointError(
            str(root), found="no checkpoint", expected="checkpoint_0 or a later one", do="train first"
        )
    return found_at


def list_numbered_dirs(root: Path) -> list[tuple[int, Path]]:
    """The numbered directories, whole or not, the oldest first."""
    if not root.is_dir():
        return []
    found = ((_NUMBERED_DIR.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def next_free_number(root: Path) -> int:
    """A number above those of all checkpoints."""
    return max((number for number, path in list_numbered_dirs(root) if has_saved_state(path)), default=-1) + 1


def expired_dirs(root: Path, limit: int | None) -> list[Path]:
    """All directories that are older than the newest `limit` checkpoints, the oldest first.

    What is there without being a checkpoint counts as none, so it never costs one its place.
    """
    if limit is None:
        return []
    found = list_numbered_dirs(root)
    kept = [number for number, path in found if has_saved_state(path)][-max(limit, 1) :]
    return [path for number, path in found if kept and number < kept[0]]


def has_saved_state(directory: Path) -> bool:
    """Whether somebody has saved a state in a directory: we, or Accelerate itself."""
    return folders.is_checkpoint(directory) or is_stock_checkpoint(directory)


def is_stock_checkpoint(directory: Path) -> bool:
    """Whether Accelerate itself has saved a state in a directory; this file is one of the last that it writes."""
    return not folders.is_checkpoint(directory) and (directory / "random_states_0.pkl").is_file()
