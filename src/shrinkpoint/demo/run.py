"""`shrinkpoint demo`: play the story with progress bars, show what came of it, keep the figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shrinkpoint.demo import scenario, table
from shrinkpoint.demo.scenario import DemoOptions, DemoResult
from shrinkpoint.errors import PolicyError


def run_demo(options: DemoOptions, console: Console | None = None) -> bool:
    """Play, show, keep the figures in `plan.record`.

    Returns:
        True when the resumed run ended bit-identical to the one that was never killed.

    Raises:
        PolicyError: the store's place is taken by something that is not an earlier demo's.
        ShrinkpointError: a training process failed, or no kill hit a save.
    """
    console = console or Console()
    remove_previous_store(options)
    with progress_bars(options, console) as progress:
        outcome = scenario.run_scenario(options, progress)
    options.record_path.write_text(json.dumps(result_to_json(outcome), indent=1))
    table.print_result(console, outcome)
    return outcome.passed


def remove_previous_store(options: DemoOptions) -> None:
    """Remove an earlier demo's store, and nothing else."""
    if options.store.exists() and any(options.store.iterdir()) and not options.record_path.exists():
        raise PolicyError(
            str(options.store),
            found="a directory that is not an earlier demo's",
            expected="a new or empty one",
            do="name another with --store",
        )
    shutil.rmtree(options.store, ignore_errors=True)
    options.record_path.parent.mkdir(parents=True, exist_ok=True)
    options.record_path.write_text(json.dumps({"passed": None}))


@contextmanager
def progress_bars(options: DemoOptions, console: Console) -> Iterator[scenario.ProgressCallback]:
    """One bar a process; the killed one's stops where it was killed."""
    columns = TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(name: str, step: int) -> None:
            if name not in tasks:
                for task in tasks.values():
                    progress.stop_task(task)
                tasks[name] = progress.add_task(name, total=options.steps)
            progress.update(tasks[name], completed=step)

        yield show


def result_to_json(result: DemoResult) -> dict[str, object]:
    """The outcome as JSON."""
    return {
        "passed": result.passed,
        "plan": {**asdict(result.options), "store": str(result.options.store)},
        "killed": asdict(result.kill),
        "resumed at": result.resumed_log.first_step,
        "parting": result.divergence,
        "skipped": result.resumed_log.skip_reasons,
        "live": [asdict(section) for section in result.final_sections],
        "stored": [asdict(section) for section in result.store_sections],
        "stalls": list(result.reference_log.stalls.values()),
        "figures": asdict(result.measurements),
    }
