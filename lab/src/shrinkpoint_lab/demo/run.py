"""`shrinkpoint-lab demo`: runs the scenario with progress bars, prints what came of it, and writes it to a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shrinkpoint.errors import PolicyError
from shrinkpoint_lab.demo import scenario
from shrinkpoint_lab.demo.report import print_introduction, print_result
from shrinkpoint_lab.demo.scenario import DemoOptions, DemoResult, ProgressCallback
from shrinkpoint_lab.demo.verdict import Cause


def run_demo(options: DemoOptions, console: Console | None = None) -> bool:
    """Runs the scenario, prints the result, and writes it as JSON to `options.record_path`.

    Returns:
        True if the resumed run ended bit-identical to the one that was never killed.

    Raises:
        PolicyError: the directory of the store has something else in it than a previous demo's store.
        ShrinkpointError: a training process failed, or no kill hit a save.
    """
    console = console or Console()
    remove_previous_store(options)
    print_introduction(console, options)
    with progress_bars(options, console) as progress:
        result = scenario.run_scenario(options, progress)
    options.record_path.write_text(json.dumps(result_to_json(result), indent=1))
    print_result(console, result)
    return result.verdict.passed


def remove_previous_store(options: DemoOptions) -> None:
    """Removes the store of a previous demo; refuses to remove anything else."""
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
def progress_bars(options: DemoOptions, console: Console) -> Iterator[ProgressCallback]:
    """Shows one progress bar for each training process; that of the killed one stops where it was killed."""
    names = TextColumn("{task.description:14}"), BarColumn(bar_width=30), MofNCompleteColumn()
    losses = TextColumn("loss {task.fields[loss]:.4f}"), TimeElapsedColumn()
    with Progress(*names, *losses, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(name: str, step: int, loss: float) -> None:
            if name not in tasks:
                for task in tasks.values():
                    progress.stop_task(task)
                tasks[name] = progress.add_task(name, total=options.steps, loss=loss)
            progress.update(tasks[name], completed=step, loss=loss)

        yield show


def result_to_json(result: DemoResult) -> dict[str, object]:
    """The result as a JSON object."""
    verdict, cause = result.verdict, result.verdict.cause
    return {
        "passed": verdict.passed,
        "cause": None if cause is Cause.NOTHING else cause.name.lower().replace("_", " "),
        "findings": verdict.findings,
        "plan": {**asdict(result.options), "store": str(result.options.store)},
        "killed": asdict(result.kill),
        "resumed at": result.resumed_log.first_step,
        "skipped": result.resumed_log.skip_reasons,
        "losses": {log.name: log.losses for log in (result.reference_log, *result.killed_logs, result.resumed_log)},
        "checkpoints": [asdict(check) for check in result.checks],
        "live": [asdict(section) for section in result.final_sections],
        "stored": [asdict(section) for section in result.store_sections],
        "stalls": list(result.reference_log.stalls.values()),
        "figures": None if result.measurements is None else asdict(result.measurements),
    }
