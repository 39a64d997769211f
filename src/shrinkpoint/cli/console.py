"""Output of a command: lines, tables and JSON on stdout, notes on stderr, and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console, JustifyMethod, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from shrinkpoint import errors, humanize
from shrinkpoint.humanize import printable
from shrinkpoint.progress import Task, TaskProgress, is_watched, watch_progress
from shrinkpoint.store.manifest import json_safe

_UNBOUNDED_WIDTH = 100_000
_COLUMN_GAP = 2
_WRAP_WIDTH, _MAX_WORD = 20, 40
"""A column whose cells fold: its least width, and the longest word, such as a path, that is not folded itself."""


class ExitCode(IntEnum):
    """Exit codes for scripts; docs/cli.md explains each."""

    FINE = 0
    FINDINGS = 1
    USAGE = 2
    NOT_FOUND = 3
    CORRUPT = 4
    LOCKED = 5
    STORAGE = 6
    OTHER = 7
    INTERRUPTED = 130
    BROKEN_PIPE = 141


_CODE_OF_ERROR: tuple[tuple[type[Exception], ExitCode], ...] = (
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.FormatError, ExitCode.CORRUPT),
    (errors.ChainError, ExitCode.CORRUPT),
    (errors.LockedError, ExitCode.LOCKED),
    (errors.StorageError, ExitCode.STORAGE),
    (errors.PolicyError, ExitCode.USAGE),
    (errors.ShrinkpointError, ExitCode.OTHER),
    (OSError, ExitCode.STORAGE),
)


def exit_code_of(error: errors.ShrinkpointError | OSError) -> ExitCode:
    """The exit code for an error: that of the first class it is an instance of, special classes first.

    >>> exit_code_of(errors.NoSpaceError("run", found="a full disk", do="free some space")).name
    'STORAGE'
    """
    return next(code for kind, code in _CODE_OF_ERROR if isinstance(error, kind))


class PipeSafeConsole(Console):
    """A console of rich that ends the command with the exit code of SIGPIPE if the reader has closed the pipe."""

    def on_broken_pipe(self) -> NoReturn:
        close_pipe()
        raise typer.Exit(ExitCode.BROKEN_PIPE)


def close_pipe() -> None:
    """Redirects stdout to the null device, so that flushing it at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_console() -> PipeSafeConsole:
    """A console on stdout, or on what will be paged; lines for a program (no terminal, no COLUMNS) are never cut to a
    width."""
    if (page := _PAGE.get()) is not None:
        return PipeSafeConsole(file=page, force_terminal=True, highlight=False, soft_wrap=False)
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return PipeSafeConsole(width=None if bounded else _UNBOUNDED_WIDTH, highlight=False, soft_wrap=False)


def print_line(line: str, style: str = "") -> None:
    """Prints one line to stdout: never folded, so that a path can be copied, and never read as markup."""
    stdout_console().print(Text(printable(line), style=style), soft_wrap=True)


def print_note(line: str, label: str = "note", style: str = "yellow") -> None:
    """Prints one line to stderr, never folded."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{label}: ", style), printable(line)), soft_wrap=True)


@contextlib.contextmanager
def print_loss_warnings() -> Iterator[None]:
    """Print every distinct warning of a scheme as a note when the block has ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(item.message) for item in caught if issubclass(item.category, errors.LossWarning)):
        print_note(text)


def print_json(document: Any) -> None:
    """Prints a document as JSON to stdout; floats that JSON does not have become "nan", "inf" and "-inf"."""
    sys.stdout.write(json.dumps(json_safe(document), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[None]:
    """Shows what runs in the block on stderr, if that is a terminal: a spinner, then bars with the time left.

    Inside of another such block, a line below its bars.
    """
    if is_watched():
        with Task(title):
            yield
        return
    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield
        return
    with ProgressBars(console, title) as bars, watch_progress(bars.show):
        yield


class ProgressBars:
    """Bars of the tasks that run, on a terminal; a context manager that leaves nothing behind.

    Args:
        title: shown with a spinner while no task runs.
    """

    def __init__(self, console: Console, title: str) -> None:
        plain = partial(TextColumn, markup=False)
        self._bars = Progress(
            SpinnerColumn(),
            plain("{task.description}"),
            _TaskBarColumn(),
            plain("{task.fields[amount]}"),
            plain("{task.fields[left]}"),
            console=console,
            transient=True,
            redirect_stdout=False,
        )
        self._title = self._bars.add_task(printable(title), total=None, amount="", left="", has_bar=False)
        self._rows: dict[int, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, task: TaskProgress) -> None:
        """Shows one report of a task; any thread may call this."""
        if task.is_finished:
            if (row := self._rows.pop(task.key, None)) is not None:
                self._bars.remove_task(row)
            self._bars.update(self._title, visible=not self._rows)
            return
        if task.key not in self._rows:
            self._bars.update(self._title, visible=False)
            self._rows[task.key] = self._bars.add_task(printable(task.title), amount="", left="", has_bar=False)
        left = task.seconds_left
        self._bars.update(
            self._rows[task.key],
            total=task.total,
            completed=task.done,
            amount=task.amount if task.done or task.total else "",
            left="" if left is None else f"{humanize.duration(left)} left",
            has_bar=task.total is not None,
        )


class _TaskBarColumn(BarColumn):
    """A bar, but for what has no length."""

    def render(self, task: Any) -> Any:
        return super().render(task) if task.fields["has_bar"] else Text("")


_PAGE: ContextVar[io.StringIO | None] = ContextVar("_PAGE", default=None)
_is_paging_off = False


def turn_pager_off() -> None:
    """Makes `paged` print as it is, in this process."""
    global _is_paging_off
    _is_paging_off = True


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """Shows what the block prints to stdout in the user's pager, if it is longer than the terminal."""
    command = _pager_command()
    if not command:
        yield
        return
    page = io.StringIO()
    token = _PAGE.set(page)
    try:
        yield
    finally:
        _PAGE.reset(token)
        text = page.getvalue()
        is_short = text.count("\n") < shutil.get_terminal_size().lines
        if is_short or not _run_pager(command, text):
            sys.stdout.write(text)
            sys.stdout.flush()


def _pager_command() -> str:
    """The pager as the shell runs it: $SHRINKPOINT_PAGER, $PAGER or less; "" if the output is not to be paged."""
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if _is_paging_off or not is_interactive:
        return ""
    command = os.environ.get("SHRINKPOINT_PAGER", os.environ.get("PAGER"))
    if command is None:
        return "less" if shutil.which("less") else ""
    return "" if command.strip() == "cat" else command.strip()


def _run_pager(command: str, text: str) -> bool:
    """True if the pager has shown the text; False if the shell does not find it."""
    env = {"LESS": "FRX", "LV": "-c", **os.environ}  # as git sets them
    pager = subprocess.Popen(
        command, shell=True, stdin=subprocess.PIPE, env=env, encoding=sys.stdout.encoding, errors="replace"
    )
    assert pager.stdin is not None
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # quit before it has read all
        pager.stdin.write(text)
    with contextlib.suppress(BrokenPipeError):
        pager.stdin.close()
    while pager.returncode is None:
        with contextlib.suppress(KeyboardInterrupt):  # the pager's own business
            pager.wait()
    return pager.returncode not in (126, 127)


@dataclass(frozen=True)
class Column:
    """One column."""

    title: str  # its heading
    cells: Sequence[str]  # text of each row
    align_right: bool = False  # align cells to the right, as numbers are
    drop_order: int = 0  # columns with the largest number are left out first; 0: never
    wrap: bool = False  # fold long cells between words into several lines instead of leaving the column out

    @property
    def width(self) -> int:
        return max(cell_len(printable(text)) for text in (self.title, *self.cells))

    @property
    def min_width(self) -> int:
        words = (printable(word) for text in (self.title, *self.cells) for word in text.split())
        longest = max(map(cell_len, words), default=0)
        return min(self.width, max(_WRAP_WIDTH, min(longest, _MAX_WORD))) if self.wrap else self.width


def fit_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Selects the columns that fit into `width` characters; columns without any text are always left out.

    >>> note, age = Column("note", ["a long story"], drop_order=2), Column("age", ["3 h"], drop_order=1)
    >>> columns = [Column("step", ["100"]), note, age]
    >>> [c.title for c in fit_columns(columns, 80)], [c.title for c in fit_columns(columns, 12)]
    (['step', 'note', 'age'], ['step', 'age'])
    """
    selected = [column for column in columns if column.drop_order == 0 or any(column.cells)]
    while sum(column.min_width + _COLUMN_GAP for column in selected) - _COLUMN_GAP > width:
        least_important = max(selected, key=lambda column: column.drop_order)
        if least_important.drop_order == 0:
            break
        selected.remove(least_important)
    return selected


def print_table(columns: Sequence[Column], *, totals: bool = False, styles: Sequence[str] | None = None) -> None:
    """Prints the columns side by side.

    Args:
        columns: columns of equally many cells.
        totals: the last row has totals; a line is drawn above it.
        styles: style of rich for each row.
    """
    console = stdout_console()
    selected = fit_columns(columns, console.width)
    table = Table(box=None, padding=(0, _COLUMN_GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in selected:
        side: JustifyMethod = "right" if column.align_right else "left"
        title = Text(printable(column.title))
        table.add_column(title, justify=side, no_wrap=not column.wrap, overflow="fold")
    num_rows = len(columns[0].cells)
    for row in range(num_rows):
        cells: list[RenderableType] = [Text(printable(column.cells[row])) for column in selected]
        if totals and row == num_rows - 1:
            table.add_row(*[Text("-" * column.min_width, style="dim") for column in selected])
        table.add_row(*cells, style=styles[row] if styles else None)
    console.print(table)
    if omitted := [column.title for column in columns if column not in selected and any(column.cells)]:
        console.print(Text(f"(narrow terminal: without {', '.join(map(printable, omitted))})", style="dim"))


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Prints a line with a name and a value for each pair; pairs without a value are left out."""
    console = stdout_console()
    grid = Table.grid(padding=(0, _COLUMN_GAP, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            grid.add_row(name, Text(printable(value)))
    console.print(grid)
