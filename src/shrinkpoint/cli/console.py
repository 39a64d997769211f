"""What a command says: lines, tables and JSON on stdout, notes on stderr, and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from shrinkpoint import errors
from shrinkpoint.humanize import printable
from shrinkpoint.store.manifest import json_safe

_UNBOUNDED_WIDTH = 100_000
_COLUMN_GAP = 2


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
    """A console on stdout; lines for a program (no terminal, no COLUMNS) are never cut to a width."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return PipeSafeConsole(width=None if bounded else _UNBOUNDED_WIDTH, highlight=False, soft_wrap=False)


def print_line(line: str, style: str = "") -> None:
    """Prints one line to stdout: never folded, so that a path can be copied, and never read as markup."""
    stdout_console().print(Text(printable(line), style=style), soft_wrap=True)


def print_note(line: str, label: str = "note", style: str = "yellow") -> None:
    """Prints one line to stderr, never folded."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{label}: ", style), printable(line)), soft_wrap=True)


def print_json(document: Any) -> None:
    """Prints a document as JSON to stdout; floats that JSON does not have become "nan", "inf" and "-inf"."""
    sys.stdout.write(json.dumps(json_safe(document), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def spinner(title: str) -> Iterator[None]:
    """Shows a spinner on stderr during the block if stderr is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(printable(title))):
        yield


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        cells: text of each row.
        align_right: align cells to the right, as numbers are.
        drop_order: columns with the largest number are left out first; 0: never.
        wrap: fold long cells into several lines instead of leaving the column out.
    """

    title: str
    cells: Sequence[str]
    align_right: bool = False
    drop_order: int = 0
    wrap: bool = False

    @property
    def width(self) -> int:
        return max(cell_len(printable(text)) for text in (self.title, *self.cells))

    @property
    def min_width(self) -> int:
        return min(self.width, 24) if self.wrap else self.width


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
