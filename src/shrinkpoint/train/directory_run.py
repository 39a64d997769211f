"""The numbered checkpoint directories of a framework's run: which one is the newest, and which ones have expired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from shrinkpoint.store import Keep, layout
from shrinkpoint.store.directory import newest_first
from shrinkpoint.store.directory_retention import RunPlan, plan_run
from shrinkpoint.store.identify import has_file, is_checkpoint, is_stock_dcp


class DirectoryRun:
    """Checkpoint directories beside each other, with a number in each name.

    The newest checkpoint is the one that was saved last, whatever its number: a run may go back to an older one.

    Args:
        root: the parent directory, which need not exist.
        number_of: number in a directory's name; None for a name that is not one of the run.
        is_complete: True if a directory holds a checkpoint.
    """

    def __init__(
        self, root: Path, number_of: Callable[[str], int | None], is_complete: Callable[[Path], bool] = is_checkpoint
    ) -> None:
        self.root, self._number_of, self._is_complete = root, number_of, is_complete

    def numbers(self) -> dict[Path, int]:
        """Directories of the run, complete or not, with their numbers, lowest number first."""
        paths = [path for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
        found = ((number, path) for path in paths if (number := self._number_of(path.name)) is not None)
        return {path: number for number, path in sorted(found)}

    def newest_first(self) -> list[Path]:
        """Directories of the run, complete or not, from the newest to the oldest."""
        return newest_first(self.numbers())

    def next_number(self) -> int:
        """The number after the highest one of a checkpoint."""
        return max((number for path, number in self.numbers().items() if self._is_complete(path)), default=-1) + 1

    def plan(self, keep: Keep) -> RunPlan:
        """Decide what `keep` does with the checkpoints.

        A directory without a checkpoint does not count. It is deleted, too, if its number is lower than those of all
        checkpoints that are kept, unless torch's own writer or a store has saved a checkpoint in it.

        Raises: as `plan_run`.
        """
        numbers = self.numbers()
        complete = [path for path in numbers if self._is_complete(path)]
        plan = plan_run(complete, keep, datetime.now(timezone.utc))
        lowest = min((numbers[path] for path in complete if path not in plan.delete), default=0)
        unfinished = [path for path, number in numbers.items() if path not in complete and number < lowest]
        unfinished = [path for path in unfinished if not (is_stock_dcp(path) or has_file(path, layout.MANIFEST))]
        return replace(plan, delete=(*unfinished, *plan.delete))
