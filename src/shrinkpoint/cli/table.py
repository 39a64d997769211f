"""Prints tables that fit a narrow terminal by leaving out the least important columns."""

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
    while sum(column.min_width + _GAP for column in selected) - _GAP > width:
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
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
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
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            grid.add_row(name, Text(printable(value)))
    console.print(grid)
