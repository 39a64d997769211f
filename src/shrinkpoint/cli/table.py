"""Tables that stay readable in a narrow terminal: the least important columns go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from shrinkpoint.cli.console import stdout_console
from shrinkpoint.cli.humanize import printable

_GAP = 2


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        cells: one text a row.
        align_right: numbers stand on the right.
        drop_order: 0 always stays; the largest rank is the first to go.
        wrap: may be folded into several lines instead of going.
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
    """The columns that fit into `width` characters; a column without any text is left out at once.

    >>> note, age = Column("note", ["a long story"], drop_order=2), Column("age", ["3 h"], drop_order=1)
    >>> columns = [Column("step", ["100"]), note, age]
    >>> [c.title for c in fit_columns(columns, 80)], [c.title for c in fit_columns(columns, 12)]
    (['step', 'note', 'age'], ['step', 'age'])
    """
    left = [column for column in columns if column.drop_order == 0 or any(column.cells)]
    while sum(column.min_width + _GAP for column in left) - _GAP > width:
        worst = max(left, key=lambda column: column.drop_order)
        if worst.drop_order == 0:
            break
        left.remove(worst)
    return left


def print_table(columns: Sequence[Column], *, totals: bool = False, styles: Sequence[str] | None = None) -> None:
    """Print the columns side by side.

    Args:
        totals: the last row sums up the others and is set apart.
        styles: one rich style a row.
    """
    console = stdout_console()
    chosen = fit_columns(columns, console.width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in chosen:
        side: JustifyMethod = "right" if column.align_right else "left"
        title = Text(printable(column.title))
        table.add_column(title, justify=side, no_wrap=not column.wrap, overflow="fold")
    rows = len(columns[0].cells)
    for at in range(rows):
        cells: list[RenderableType] = [Text(printable(column.cells[at])) for column in chosen]
        if totals and at == rows - 1:
            table.add_row(*[Text("-" * column.min_width, style="dim") for column in chosen])
        table.add_row(*cells, style=styles[at] if styles else None)
    console.print(table)
    if gone := [column.title for column in columns if column not in chosen and any(column.cells)]:
        console.print(Text(f"(narrow terminal: without {', '.join(map(printable, gone))})", style="dim"))


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print `name  value` lines; pairs without a value are left out."""
    console = stdout_console()
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            grid.add_row(name, Text(printable(value)))
    console.print(grid)
