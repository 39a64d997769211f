"""`shrinkpoint-lab demo`: runs the scenario with progress bars, prints what came of it, and writes it to a file."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shrinkpoint.errors import PolicyError
from shrinkpoint_lab.demo import scenario
from shrinkpoint_lab.demo.report import WIDTH, print_introduction, print_result
from shrinkpoint_lab.demo.scenario import DemoOptions, DemoResult, ProgressCallback
from shrinkpoint_lab.demo.verdict import Cause


def run_demo(options: DemoOptions, console: Console | None = None, picture: Path | None = None) -> bool:
    """Runs the scenario, prints the result, and writes it as JSON to `options.record_path`.

    Args:
        options: what is run.
        console: where text goes; None: standard output.
        picture: an SVG file that gets the same text, as a terminal shows it.

    Returns:
        True if the resumed run ended bit-identical to the one that was never killed.

    Raises:
        PolicyError: the directory of the store has something else in it than a previous demo's store.
        ShrinkpointError: a training process failed, or no kill hit a save.
    """
    console = console or Console()
    remove_previous_store(options)
    print_introduction(console, options)
    with progress_bars(console) as progress:
        result = scenario.run_scenario(options, progress_callback(options, progress))
    options.record_path.write_text(json.dumps(result_to_json(result), indent=1))
    print_result(console, result)
    if picture is not None:
        draw_terminal(picture, options, result, progress)
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


def progress_bars(console: Console) -> Progress:
    """Progress bars for training processes."""
    names = TextColumn("{task.description:14}"), BarColumn(bar_width=30), MofNCompleteColumn()
    losses = TextColumn("loss {task.fields[loss]:.4f}"), TimeElapsedColumn()
    return Progress(*names, *losses, console=console)


def progress_callback(options: DemoOptions, progress: Progress) -> ProgressCallback:
    """Shows one progress bar for each training process; that of the killed one stops where it was killed."""
    tasks: dict[str, TaskID] = {}

    def show(name: str, step: int, loss: float) -> None:
        if name not in tasks:
            for task in tasks.values():
                progress.stop_task(task)
            tasks[name] = progress.add_task(name, total=options.steps, loss=loss)
        progress.update(tasks[name], completed=step, loss=loss)

    return show


FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""A font that rich's pictures load from the network; without it the reader's monospace font is used."""


def draw_terminal(path: Path, options: DemoOptions, result: DemoResult, progress: Progress) -> None:
    """Writes what the demo printed as an SVG picture of a terminal."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
    print_introduction(console, options)
    console.print(progress.make_tasks_table(progress.tasks))
    print_result(console, result)
    picture = FONT_FACE.sub("", console.export_svg(title="make demo", unique_id="demo"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n", encoding="utf-8")


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
