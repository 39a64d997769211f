"""Checkpoint directories of an Accelerator: their numbers, which of them can be loaded, which have expired."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from accelerate import Accelerator

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import AnyDirectory, ObjectUrl, is_object_url, local_path, resolve_directory
from shrinkpoint.store import Keep
from shrinkpoint.store.directory import find_siblings
from shrinkpoint.store.directory_retention import RunPlan, plan_run
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.store.retention import check_keep
from shrinkpoint.train.checkpointer import wait_for_writes
from shrinkpoint.train.directory_run import DirectoryRun
from shrinkpoint.train.newest_valid import NoCheckpointError

_NUMBERED_DIR = re.compile(r"checkpoint_(\d{1,18})")
_NUMBERING = "ProjectConfiguration(automatic_checkpoint_naming=True)"


class CheckpointDirs:
    """The checkpoint directories of an Accelerator, which are numbered or named by the caller.

    Args:
        keep: rules of retention; None: `total_limit` of the accelerator's project.

    Raises:
        PolicyError: both are given.
    """

    def __init__(self, accelerator: Accelerator, keep: Keep | None = None) -> None:
        self._accelerator, self._project = accelerator, accelerator.project_configuration
        self._rules = check_keep(keep)
        if keep is not None and self._project.total_limit is not None:
            found, do = f"keep={keep!r}, and total_limit={self._project.total_limit} of the project", "leave one out"
            raise PolicyError("keep", found=found, expected="one of them", do=do)

    @property
    def root(self) -> Path | None:
        """The directory of the numbered checkpoints; None if the caller names each checkpoint.

        Raises:
            PolicyError: checkpoints are numbered, and there is no `project_dir`.
        """
        if not self._project.automatic_checkpoint_naming:
            return None
        if self._project.project_dir is None:
            found, do = "automatic_checkpoint_naming without a project_dir", "pass project_dir= to Accelerator"
            raise PolicyError("ProjectConfiguration", found=found, do=do)
        return local_path(self._project.project_dir, "project_dir").expanduser() / "checkpoints"

    @property
    def keep(self) -> Keep | None:
        """The rules by which checkpoints are deleted, by `total_limit` numbered ones only; None: all are kept."""
        if self._rules is not None:
            return self._rules
        limit = None if self.root is None else self._project.total_limit
        return None if limit is None else Keep(last=max(limit, 1))

    def next_dir(self, output_dir: AnyDirectory | None) -> Path | ObjectUrl:
        """The directory of the next checkpoint.

        Raises:
            PolicyError: no directory is given, or the next number is taken.
        """
        root = self.root
        if root is None:
            if output_dir is None:
                raise PolicyError("save_state", found="no directory", do=f"pass output_dir=, or {_NUMBERING}")
            return _resolve(output_dir, "output_dir")
        directory = root / f"checkpoint_{self._accelerator.save_iteration}"
        if has_saved_state(directory):
            found, expected = "a checkpoint that exists", "a free number"
            do = "set accelerator.project_configuration.iteration, or load_state first"
            raise PolicyError(str(directory), found=found, expected=expected, do=do)
        return directory

    def load_candidates(self, input_dir: AnyDirectory | None) -> Sequence[Path | ObjectUrl]:
        """The directories that may be loaded, newest first.

        Raises:
            NotFoundError: there is none.
            PolicyError: no directory is given, and checkpoints are not numbered.
        """
        if input_dir is not None:
            directory = _resolve(input_dir, "input_dir")
            wait_for_writes(directory)
            if not has_saved_state(directory):
                found, do = "neither a manifest nor a state of Accelerate's own", "check the path"
                if not isinstance(directory, Path) or not directory.is_dir():
                    found = f"Tried to find {directory} but folder does not exist"  # Accelerate's own words
                raise NoCheckpointError(str(directory), found=found, expected="a checkpoint", do=do)
            return [directory]
        root = self.root
        if root is None:
            raise PolicyError("load_state", found="no directory", do=f"pass input_dir=, or {_NUMBERING}")
        if not (candidates := self.run(root).newest_first()):
            expected = "checkpoint_0 or a later one"
            raise NoCheckpointError(str(root), found="no checkpoint", expected=expected, do="save one first")
        return candidates

    def run(self, root: Path) -> DirectoryRun:
        """The numbered checkpoints below `root`."""

        def number_of(name: str) -> int | None:
            match = _NUMBERED_DIR.fullmatch(name)
            return int(match[1]) if match else None

        return DirectoryRun(root, number_of, has_saved_state)

    def plan(self, keep: Keep, last: Path | ObjectUrl | None) -> RunPlan:
        """Decide what the rules do with the checkpoints of the run.

        Args:
            last: the directory that was saved last; those beside it whose names differ in numbers alone are its run.

        Raises: as `plan_run`.
        """
        if self.root is not None:
            return self.run(self.root).plan(keep)
        return plan_run(() if last is None else find_siblings(last), keep, datetime.now(timezone.utc))


def _resolve(directory: AnyDirectory, argument: str) -> Path | ObjectUrl:
    place = resolve_directory(directory, argument) if is_object_url(directory) else directory
    return place if isinstance(place, ObjectUrl) else local_path(place, argument).expanduser()


def has_saved_state(directory: Path | ObjectUrl) -> bool:
    """True if a directory holds a checkpoint, ours or one of Accelerate itself."""
    return is_checkpoint(directory) or is_stock_checkpoint(directory)


def is_stock_checkpoint(directory: Path | ObjectUrl) -> bool:
    """True if Accelerate itself saved to a directory; the file is one of the last that it writes."""
    if isinstance(directory, ObjectUrl):  # Accelerate saves to no bucket
        return False
    return not is_checkpoint(directory) and (directory / "random_states_0.pkl").is_file()
