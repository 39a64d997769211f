"""What `shrinkpoint-lab demo` prints, on 80 columns: a summary, the story in five parts, and the verdict."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

from shrinkpoint.store.save_report import RoleBytes
from shrinkpoint_lab.demo.measurements import LOSS_BUDGET, Measurements
from shrinkpoint_lab.demo.scenario import DemoOptions, DemoResult
from shrinkpoint_lab.demo.training_log import TrainingLog
from shrinkpoint_lab.demo.verdict import CheckpointCheck

ROLE_TITLES = {"parameter": "parameters", "moment1": "first moments", "moment2": "second moments"}
SECTION_TITLES = {"extra": "data order", "rng": "random generators"}
WIDTH = 80


def print_introduction(console: Console, options: DemoOptions) -> None:
    """Prints what is going to happen."""
    saving = "in the background" if options.background else "while it waits"
    model = f"A GPT of {options.layers} layers and width {options.width} learns Python's standard library with AdamW:"
    course = f"{options.steps} steps, a checkpoint every {options.every} of them, written {saving}. Once it is left"
    rest = "alone; once it is killed with SIGKILL in the middle of a save, and started again."
    console.print(f"{model} {course} {rest}\n", width=WIDTH)


def print_result(console: Console, result: DemoResult) -> None:
    """Prints a summary, the kill, the losses, the comparison, bytes and seconds, and the verdict."""
    if result.measurements is not None:
        console.print(_summary_table(result, result.measurements))
    _print_kill(console, result)
    console.print(_loss_table(result))
    if any(log.first_divergence(result.reference_log) for log in (result.killed_logs[-1], result.resumed_log)):
        console.print("* after this step, the state differs from that of the run never killed", style="red")
    console.print(_comparison_table(result))
    if result.measurements is not None:
        console.print(_bytes_table(result, result.measurements))
        _print_lossy(console, result.measurements)
        console.print(_speed_table(result, result.measurements))
    _print_verdict(console, result)


def _table(title: str, first: str, *rest: str) -> Table:
    style = {"title_justify": "left", "title_style": "bold", "box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    table = Table(title=f"\n{title}", **style)  # type: ignore[arg-type]
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


def _summary_table(result: DemoResult, measurements: Measurements) -> Table:
    """Bytes of the run beside those of torch.save, and what the resumed run is beside the one never killed."""
    table = _table("Beside torch.save", "", "torch.save", "stored", "smaller", "after the kill")
    raw, count = measurements.torch_save_bytes, len(result.manifests)
    stored = sum(manifest.stored_bytes for manifest in result.manifests)
    equal = "[green]every bit equal[/green]" if result.verdict.passed else "[red]not equal[/red]"
    table.add_row(
        f"{count} checkpoints, lossless", format_mb(count * raw), format_mb(stored), _ratio(count * raw, stored), equal
    )
    lossy = measurements.lossy
    size, rise = lossy.delta.stored_bytes, f"{lossy.rise:+.2%} loss"
    table.add_row(f"the last, Fisher({LOSS_BUDGET})", format_mb(raw), format_mb(size), _ratio(raw, size), rise)
    return table


def _print_kill(console: Console, result: DemoResult) -> None:
    kill, first_step = result.kill, result.resumed_log.first_step
    console.print("\n1. The kill", style="bold")
    console.print(f"SIGKILL came during the save of step {kill.step}. It left behind", width=WIDTH)
    for name, size in kill.files.items():
        console.print(f"  {name} ({format_mb(size)})", soft_wrap=True, highlight=False)
    console.print(f"The same command, started again, went on at step {first_step}.", width=WIDTH)
    for reason in result.resumed_log.skip_reasons:
        console.print(f"It skipped {reason}", soft_wrap=True)


def _loss_table(result: DemoResult) -> Table:
    """The losses of all processes at the steps of the checkpoints, and what the store has and gives back of these."""
    reference, killed, resumed = result.reference_log, result.killed_logs[-1], result.resumed_log
    names = "never killed", "killed", "resumed", "checkpoint", "stored", "read back"
    table = _table("2. The losses of both runs, with nine digits: all that a float32 has", "step", *names)
    manifests = {manifest.step: manifest for manifest in result.manifests}
    checks = {check.step: check for check in result.checks}
    for step in sorted(reference.stalls):
        losses = [_format_loss(log, step, reference) for log in (reference, killed, resumed)]
        cells = ["-", "-", "-"]
        if step in manifests:
            manifest = manifests[step]
            kind = f"delta {manifest.depth}" if manifest.depth else "keyframe"
            cells = [kind, format_mb(manifest.stored_bytes), _describe_check(checks[step])]
        table.add_row(str(step), *losses, *cells)
    return table


def _format_loss(log: TrainingLog, step: int, reference: TrainingLog) -> str:
    """The loss of a step; red where the state after it is not that of the run that was never killed."""
    if step not in log.losses:
        return ""
    text = f"{log.losses[step]:#.9g}"
    return text if log.states[step] == reference.states[step] else f"[red]{text}*[/red]"


def _describe_check(check: CheckpointCheck) -> str:
    if check.error:
        return "[red]damaged[/red]"
    return "[red]differs[/red]" if check.names else "every bit"


def _comparison_table(result: DemoResult) -> Table:
    title = f"3. After {result.options.steps} steps, killed and resumed against never killed, bit for bit"
    table = _table(title, "", "tensors", "bytes", "values", "differences")
    sections = [(section, SECTION_TITLES.get(section.name, section.name)) for section in result.final_sections]
    sections += [(section, f"{section.name}, as the store gives it back") for section in result.store_sections]
    for section, name in sections:
        count = len(section.differences)
        cells = str(section.tensors), format_mb(section.nbytes), str(section.values), str(count)
        table.add_row(name, *cells, style="red" if count else "")
    return table


def _bytes_table(result: DemoResult, measurements: Measurements) -> Table:
    """Raw and stored bytes of the last checkpoint by role, as a keyframe and as a delta."""
    keyframe, delta, lossy = measurements.keyframe.report, measurements.delta.report, measurements.lossy
    delta_title = f"delta, {result.options.every} steps"
    title = f"4. Bytes of step {result.options.steps}: nothing lost"
    table = _table(title, "", "raw", "keyframe", "ratio", delta_title, "ratio")
    for role in (*ROLE_TITLES, *sorted(keyframe.roles.keys() - ROLE_TITLES.keys())):
        sizes = keyframe.roles.get(role, RoleBytes())
        delta_stored = delta.roles.get(role, RoleBytes()).stored
        cells = format_mb(sizes.stored), _ratio(sizes.raw, sizes.stored)
        delta_cells = format_mb(delta_stored), _ratio(sizes.raw, delta_stored)
        table.add_row(ROLE_TITLES.get(role, role), format_mb(sizes.raw), *cells, *delta_cells)
    for name, first, second in (("all", keyframe, delta), (f"Fisher({LOSS_BUDGET})", lossy.keyframe, lossy.delta)):
        cells = format_mb(first.stored_bytes), f"{first.ratio:.2f}x"
        delta_cells = format_mb(second.stored_bytes), f"{second.ratio:.2f}x"
        table.add_row(name, format_mb(keyframe.raw_bytes), *cells, *delta_cells, style="bold")
    return table


def _print_lossy(console: Console, measurements: Measurements) -> None:
    lossy = measurements.lossy
    allowed = f'The last row is lossy: Fisher(budget="{LOSS_BUDGET}") may raise the loss by {LOSS_BUDGET}.'
    found = f"Right after a restore it is {lossy.loss_after:.4f} where it was {lossy.loss:.4f}: {lossy.rise:+.2%}."
    console.print(f"{allowed} {found}", width=WIDTH)


def _speed_table(result: DemoResult, measurements: Measurements) -> Table:
    """Seconds to encode and decode in memory, and seconds by which a save stalls the loop."""
    stalls = result.reference_log.stalls.values()
    rows = {
        "encode a keyframe": measurements.keyframe.encode,
        "decode a keyframe": measurements.keyframe.decode,
        "encode a delta": measurements.delta.encode,
        "decode a delta": measurements.delta.decode,
        f"stall of the loop per save ({len(stalls)} saves)": median(stalls),
        "  beside it: torch.save to a file": measurements.torch_save,
        "  beside it: a plain copy of the state": measurements.copy,
    }
    table = _table(f"5. Seconds ({result.options.threads} threads train)", "", "median", "GB/s of raw bytes")
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds:.3f} s", f"{measurements.keyframe.report.raw_bytes / seconds / 1e9:.2f}")
    return table


def _print_verdict(console: Console, result: DemoResult) -> None:
    console.print()
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
    store, last = result.options.store, result.options.steps
    console.print(f"\nThe store stays in {store}. To look at it:")
    diff = f"diff {store}@{last - result.options.every} {store}@{last}"
    for command in (f"list {store}", f"show {store}@{last}", f"verify {store}", diff):
        console.print(f"  shrinkpoint {command}", style="cyan")
