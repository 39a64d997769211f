"""What `shrinkpoint-lab demo` prints, on 80 columns: the course, one table, the kill and the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shrinkpoint_lab.demo.measurements import LOSS_BUDGET, Measurements, SaveFigures
from shrinkpoint_lab.demo.scenario import DemoOptions, DemoResult

WIDTH = 80


def print_introduction(console: Console, options: DemoOptions) -> None:
    """Prints what is going to happen."""
    saving = "in the background" if options.background else "while it waits"
    model = f"A GPT of {options.layers} layers and width {options.width} learns Python's standard library with AdamW:"
    course = f"{options.steps} steps, a checkpoint every {options.every} of them, written {saving}. Once it is left"
    rest = "alone; once it is killed with SIGKILL in the middle of a save, and started again."
    console.print(f"{model} {course} {rest}\n", width=WIDTH)


def print_result(console: Console, result: DemoResult) -> None:
    """Prints bytes, seconds and rises, the kill, and the verdict."""
    if result.measurements is not None:
        console.print()
        console.print(_table(result, result.measurements))
        seconds = f"{result.measurements.evaluation:.2f} s"
        console.print(f"Fisher evaluates the loss two or three times in a save, {seconds} each.", style="dim")
    kill, log = result.kill, result.resumed_log
    console.print(f"\nKilled in the save of step {kill.step}, resumed at step {log.first_step}.", width=WIDTH)
    for reason in log.skip_reasons:
        console.print(f"It skipped {reason}", soft_wrap=True)
    _print_verdict(console, result)


def format_mb(count: float) -> str:
    """Bytes as text in MB or kB, with one decimal.

    >>> format_mb(58_200_000), format_mb(12_345)
    ('58.2 MB', '12.3 kB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _table(result: DemoResult, measurements: Measurements) -> Table:
    """The last checkpoint, saved in three ways."""
    last, before = result.checks[-1].step, result.checks[-2].step
    title = f"The checkpoint of step {last}: torch.save, and deltas against step {before}"
    table = Table(title=title, title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    for name in ("bytes", "smaller", "save", "load", "loss after a restore"):
        table.add_column(name, justify="right")
    plain = measurements.torch_save

    def add(name: str, figures: SaveFigures, loss: str) -> None:
        ratio = f"{plain.stored_bytes / figures.stored_bytes:.1f}x"
        seconds = (f"{count:.2f} s" for count in (figures.save, figures.load))
        table.add_row(name, format_mb(figures.stored_bytes), ratio, *seconds, loss)

    is_exact = all(check.is_exact for check in result.checks)
    add("torch.save", plain, "the same")
    add("lossless", measurements.lossless, "the same" if is_exact else "[red]differs[/red]")
    add(f'Fisher(budget="{LOSS_BUDGET}")', measurements.lossy, f"{measurements.rise:+.2%}")
    return table


def _print_verdict(console: Console, result: DemoResult) -> None:
    verdict, num_checks = result.verdict, len(result.checks)
    if verdict.passed:
        console.print("PASS: every bit is equal.", style="bold green")
    else:
        console.print(f"FAIL. At fault is {verdict.cause.value}.", style="bold red", width=WIDTH)
    for finding in verdict.findings:
        console.print(finding, width=WIDTH)
    if not verdict.findings:
        equal = f"Both runs had the same state after each of {len(result.reference_log.states)} steps"
        console.print(f"{equal}, and {num_checks} checkpoints give back what was saved.", width=WIDTH)
    elif all(check.is_exact for check in result.checks):
        text = f"All {num_checks} checkpoints give back, bit for bit, the state that was saved."
        console.print(text, width=WIDTH)
    store, record = result.options.store, result.options.record_path
    console.print(f"\nLosses, bytes and digests are in {record}. The store stays, to look at:")
    for command in (f"list {store}", f"report {store}"):
        console.print(f"  shrinkpoint {command}", style="cyan")
