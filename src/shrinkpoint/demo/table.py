"""What the demo shows when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from shrinkpoint.demo.compare import Section
from shrinkpoint.demo.measure import Timed
from shrinkpoint.demo.story import Outcome
from shrinkpoint.store.file import RoleBytes
from shrinkpoint.store.manifest import Manifest

ROLES = {"parameter": "parameters", "moment1": "first moments", "moment2": "second moments"}


def show(console: Console, outcome: Outcome) -> None:
    """Print the verdict, the figures, the store and what to try next."""
    console.print()
    console.print(_bytes_table(outcome))
    console.print(_speed_table(outcome))
    console.print(_store_table(outcome))
    console.print(_verdict_table(outcome))
    _verdict(console, outcome)


def _table(title: str, first: str, *rest: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="right")
    return table


def mb(count: float) -> str:
    """
    >>> mb(58_200_000), mb(12_345), mb(0)
    ('58.2 MB', '12.3 kB', '-')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB" if count else "-"


def _ratio(raw: int, stored: int) -> str:
    return f"{raw / stored:.2f}x" if stored else "-"


def _bytes_table(outcome: Outcome) -> Table:
    """Raw and stored bytes of the last checkpoint by role, coded alone and as a delta."""
    alone, delta = outcome.figures.keyframe.report, outcome.figures.delta.report
    table = _table(
        f"Bytes of step {outcome.plan.steps}",
        "",
        "raw",
        "keyframe",
        "ratio",
        f"delta, {outcome.plan.every} steps",
        "ratio",
    )
    for role in (*ROLES, *sorted(alone.roles.keys() - ROLES.keys())):
        one, other = alone.roles.get(role, RoleBytes()), delta.roles.get(role, RoleBytes())
        cells = mb(one.stored), _ratio(one.raw, one.stored), mb(other.stored), _ratio(one.raw, other.stored)
        table.add_row(ROLES.get(role, role), mb(one.raw), *cells)
    cells = mb(alone.stored_bytes), f"{alone.ratio:.2f}x", mb(delta.stored_bytes), f"{delta.ratio:.2f}x"
    table.add_row("all, headers included", mb(alone.raw_bytes), *cells, style="bold")
    return table


def _speed_table(outcome: Outcome) -> Table:
    """Seconds: coding in memory, and what a save costs the loop."""
    figures = outcome.figures
    table = _table(f"\nSeconds ({outcome.plan.threads} threads train)", "", "median", "GB/s of raw bytes")

    def row(name: str, seconds: float) -> None:
        table.add_row(name, f"{seconds:.3f} s", f"{figures.keyframe.report.raw_bytes / seconds / 1e9:.2f}")

    kinds: Sequence[tuple[str, Timed]] = ("a keyframe", figures.keyframe), ("a delta", figures.delta)
    for name, timed in kinds:
        row(f"encode {name}", timed.encode)
        row(f"decode {name}", timed.decode)
    row(f"stall of the loop per save ({len(outcome.whole.stalls)} saves)", median(outcome.whole.stalls.values()))
    row("  beside it: torch.save to a file", figures.torch_save)
    row("  beside it: a plain copy of the state", figures.copy)
    return table


def _store_table(outcome: Outcome) -> Table:
    """The checkpoints that are there now, and which process wrote each."""
    table = _table(f"\nIn {outcome.plan.store}", "step", "kind", "stored", "ratio", "loss", "written by")
    for manifest in outcome.manifests:
        table.add_row(*_store_row(manifest, outcome))
    return table


def _store_row(manifest: Manifest, outcome: Outcome) -> tuple[str, ...]:
    kind = f"delta {manifest.depth}" if manifest.depth else "keyframe"
    by = "the resumed process" if manifest.step >= outcome.resumed.first else "the killed process"
    loss = f"{manifest.metrics['loss']:.4f}"
    ratio = _ratio(manifest.raw_bytes, manifest.stored_bytes)
    return str(manifest.step), kind, mb(manifest.stored_bytes), ratio, loss, by


def _verdict_table(outcome: Outcome) -> Table:
    title = f"\nAfter {outcome.plan.steps} steps: killed and resumed against never killed, bit for bit"
    table = _table(title, "", "tensors", "bytes", "values", "differences")
    for section in outcome.live:
        _verdict_row(table, section, section.name)
    for section in outcome.stored:
        _verdict_row(table, section, f"{section.name}, as the store gives it back")
    return table


def _verdict_row(table: Table, section: Section, name: str) -> None:
    count = len(section.differences)
    cells = str(section.tensors), mb(section.nbytes), str(section.values), str(count)
    table.add_row(name, *cells, style="red" if count else "")


def _verdict(console: Console, outcome: Outcome) -> None:
    console.print()
    left = ", ".join(f"{name} ({mb(size)})" for name, size in outcome.killed.left.items())
    console.print(f"SIGKILL came during the save of step {outcome.killed.step}; it left {left}.")
    console.print(f"The same command, started again, went on at step {outcome.resumed.first}.")
    for reason in outcome.resumed.skipped:
        console.print(f"It skipped {reason}")
    if outcome.passed:
        console.print("PASS: every bit is equal.", style="bold green")
    else:
        differing = [path for section in (*outcome.live, *outcome.stored) for path in section.differences]
        console.print(f"FAIL: {len(differing)} differences, the first at {differing[0]}", style="bold red")
        console.print(f"The losses differ {outcome.parting or 'nowhere'}.")
    store, last = outcome.plan.store, outcome.plan.steps
    console.print(f"\nThe store stays in {store}. To look at it:")
    diff = f"diff {store}@{last - outcome.plan.every} {store}@{last}"
    for command in (f"list {store}", f"show {store}@{last}", f"verify {store}", diff):
        console.print(f"  shrinkpoint {command}", style="cyan")
