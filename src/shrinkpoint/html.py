"""Renders the templates of notebooks and pages. Names come from untrusted files: every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from shrinkpoint.humanize import printable

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader  # torch brings it along

    def without_controls(value: object) -> object:
        return printable(value) if type(value) is str else value

    return Environment(loader=PackageLoader("shrinkpoint"), autoescape=True, finalize=without_controls)


def render(template: str, **values: object) -> str:
    """Renders a file of `templates/`. Texts are escaped, control characters become visible."""
    return _environment().get_template(template).render(**values)


def fragment(
    title: str,
    numbers: Sequence[tuple[str, str]],
    heads: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    *,
    aligned: Sequence[str] = (),
    note: str = "",
) -> str:
    """HTML of an object in a notebook: a title, numbers under their names, and a table.

    Args:
        numbers: those without a text are left out.
        heads: of the table's columns.
        rows: texts of the table's cells.
        aligned: heads of the columns that are aligned to the right.
        note: a last line.
    """
    return render("fragment.html", title=title, numbers=numbers, heads=heads, rows=rows, aligned=aligned, note=note)
