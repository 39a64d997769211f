"""`shrinkpoint demo`: play the story with progress bars, show what came of it, keep the figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shrinkpoint.demo import story, table
from shrinkpoint.demo.plan import Plan
from shrinkpoint.demo.story import Outcome
from shrinkpoint.errors import PolicyError


def run(plan: Plan, console: Console | None = None) -> bool:
    """Play, show, keep the figures in `plan.record`.

    Returns:
        True when the resumed run ended bit-identical to the one that was never killed.

    Raises:
        PolicyError: the store's place is taken by something that is not an earlier demo's.
        ShrinkpointError: a training process failed, or no kill hit a save.
    """
    console = console or Console()
    make_room(plan)
    with bars(plan, console) as progress:
        outcome = story.play(plan, progress)
    plan.record.write_text(json.dumps(figures(outcome), indent=1))
    table.show(console, outcome)
    return outcome.passed


def make_room(plan: Plan) -> None:
    """Remove an earlier demo's store, and nothing else."""
    if plan.store.exists() and any(plan.store.iterdir()) and not plan.record.exists():
        raise PolicyError(
            str(plan.store),
            found="a directory that is not an earlier demo's",
            expected="a new or empty one",
            do="name another with --store",
        )
    shutil.rmtree(plan.store, ignore_errors=True)
    plan.record.parent.mkdir(parents=True, exist_ok=True)
    plan.record.write_text(json.dumps({"passed": None}))


@contextmanager
def bars(plan: Plan, console: Console) -> Iterator[story.Progress]:
    """One bar a process; the killed one's stops where it was killed."""
    columns = TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(name: str, step: int) -> None:
            if name not in tasks:
                for task in tasks.values():
                    progress.stop_task(task)
                tasks[name] = progress.add_task(name, total=plan.steps)
            progress.update(tasks[name], completed=step)

        yield show


def figures(outcome: Outcome) -> dict[str, object]:
    """The outcome as JSON."""
    return {
        "passed": outcome.passed,
        "plan": {**asdict(outcome.plan), "store": str(outcome.plan.store)},
        "killed": asdict(outcome.killed),
        "resumed at": outcome.resumed.first,
        "parting": outcome.parting,
        "skipped": outcome.resumed.skipped,
        "live": [asdict(section) for section in outcome.live],
        "stored": [asdict(section) for section in outcome.stored],
        "stalls": list(outcome.whole.stalls.values()),
        "figures": asdict(outcome.figures),
    }
