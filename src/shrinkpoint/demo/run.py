"""`shrinkpoint demo`: runs the scenario with progress bars, prints what came of it, and writes it to a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from shrinkpoint.demo import scenario
from shrinkpoint.demo.scenario import DemoOptions, DemoResult, ProgressCallback
from shrinkpoint.errors import PolicyError
from shrinkpoint.store.checkpoint_file import RoleBytes

ROLE_TITLES = {"parameter": "parameters", "moment1": "first moments", "moment2": "second moments"}


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
    with progress_bars(options, console) as progress:
        result = scenario.run_scenario(options, progress)
    options.record_path.write_text(json.dumps(result_to_json(result), indent=1))
    print_result(console, result)
    return result.passed


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
    """The result as a JSON object."""
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


def print_result(console: Console, result: DemoResult) -> None:
    """Prints bytes, seconds, the checkpoints of the store, and the comparison."""
    console.print()
    for table in (_bytes_table(result), _speed_table(result), _store_table(result), _verdict_table(result)):
        console.print(table)
    _print_verdict(console, result)


def _table(title: str, first: str, *rest: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="right")
    return table


def format_mb(count: float) -> str:
    """Bytes as text in MB or kB, with one decimal.

    >>> format_mb(58_200_000), format_mb(12_345), format_mb(0)
    ('58.2 MB', '12.3 kB', '-')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB" if count else "-"


def _ratio(raw: int, stored: int) -> str:
    return f"{raw / stored:.2f}x" if stored else "-"


def _bytes_table(result: DemoResult) -> Table:
    """Raw and stored bytes of the last checkpoint by role, as a keyframe and as a delta."""
    keyframe, delta = result.measurements.keyframe.report, result.measurements.delta.report
    delta_title = f"delta, {result.options.every} steps"
    table = _table(f"Bytes of step {result.options.steps}", "", "raw", "keyframe", "ratio", delta_title, "ratio")
    for role in (*ROLE_TITLES, *sorted(keyframe.roles.keys() - ROLE_TITLES.keys())):
        sizes = keyframe.roles.get(role, RoleBytes())
        delta_stored = delta.roles.get(role, RoleBytes()).stored
        cells = format_mb(sizes.stored), _ratio(sizes.raw, sizes.stored)
        delta_cells = format_mb(delta_stored), _ratio(sizes.raw, delta_stored)
        table.add_row(ROLE_TITLES.get(role, role), format_mb(sizes.raw), *cells, *delta_cells)
    cells = format_mb(keyframe.stored_bytes), f"{keyframe.ratio:.2f}x"
    delta_cells = format_mb(delta.stored_bytes), f"{delta.ratio:.2f}x"
    table.add_row("all, headers included", format_mb(keyframe.raw_bytes), *cells, *delta_cells, style="bold")
    return table


def _speed_table(result: DemoResult) -> Table:
    """Seconds to encode and decode in memory, and seconds by which a save stalls the loop."""
    measurements, stalls = result.measurements, result.reference_log.stalls.values()
    rows = {
        "encode a keyframe": measurements.keyframe.encode,
        "decode a keyframe": measurements.keyframe.decode,
        "encode a delta": measurements.delta.encode,
        "decode a delta": measurements.delta.decode,
        f"stall of the loop per save ({len(stalls)} saves)": median(stalls),
        "  beside it: torch.save to a file": measurements.torch_save,
        "  beside it: a plain copy of the state": measurements.copy,
    }
    table = _table(f"\nSeconds ({result.options.threads} threads train)", "", "median", "GB/s of raw bytes")
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds:.3f} s", f"{measurements.keyframe.report.raw_bytes / seconds / 1e9:.2f}")
    return table


def _store_table(result: DemoResult) -> Table:
    """The checkpoints of the store, and which process wrote each."""
    table = _table(f"\nIn {result.options.store}", "step", "kind", "stored", "ratio", "loss", "written by")
    for manifest in result.manifests:
        kind = f"delta {manifest.depth}" if manifest.depth else "keyframe"
        sizes = format_mb(manifest.stored_bytes), _ratio(manifest.raw_bytes, manifest.stored_bytes)
        process = "the resumed process" if manifest.step >= result.resumed_log.first_step else "the killed process"
        table.add_row(str(manifest.step), kind, *sizes, f"{manifest.metrics['loss']:.4f}", process)
    return table


def _verdict_table(result: DemoResult) -> Table:
    title = f"\nAfter {result.options.steps} steps: killed and resumed against never killed, bit for bit"
    table = _table(title, "", "tensors", "bytes", "values", "differences")
    sections = [(section, section.name) for section in result.final_sections]
    sections += [(section, f"{section.name}, as the store gives it back") for section in result.store_sections]
    for section, name in sections:
        count = len(section.differences)
        cells = str(section.tensors), format_mb(section.nbytes), str(section.values), str(count)
        table.add_row(name, *cells, style="red" if count else "")
    return table


def _print_verdict(console: Console, result: DemoResult) -> None:
    console.print()
    files = ", ".join(f"{name} ({format_mb(size)})" for name, size in result.kill.left.items())
    console.print(f"SIGKILL came during the save of step {result.kill.step}; it left {files}.")
    console.print(f"The same command, started again, went on at step {result.resumed_log.first_step}.")
    for reason in result.resumed_log.skip_reasons:
        console.print(f"It skipped {reason}")
    if result.passed:
        console.print("PASS: every bit is equal.", style="bold green")
    else:
        sections = (*result.final_sections, *result.store_sections)
        differing = [path for section in sections for path in section.differences]
        console.print(f"FAIL: {len(differing)} differences, the first at {differing[0]}", style="bold red")
        console.print(f"The losses differ {result.divergence or 'nowhere'}.")
    store, last = result.options.store, result.options.steps
    console.print(f"\nThe store stays in {store}. To look at it:")
    diff = f"diff {store}@{last - result.options.every} {store}@{last}"
    for command in (f"list {store}", f"show {store}@{last}", f"verify {store}", diff):
        console.print(f"  shrinkpoint {command}", style="cyan")
