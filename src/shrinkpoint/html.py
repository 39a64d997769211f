"""Fragments of HTML that notebooks and pages share: numbers with their names, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from shrinkpoint.humanize import printable

_STYLE = """
.sp{font:14px/1.5 system-ui,sans-serif;max-width:60em}
.sp dl{display:flex;flex-wrap:wrap;gap:.3em 2em;margin:.5em 0}
.sp dt{opacity:.75;font-size:85%}
.sp dd{margin:0;font-variant-numeric:tabular-nums}
.sp table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.sp th,.sp td{padding:.15em .8em;text-align:left;border-bottom:1px solid rgba(128,128,128,.3);font-size:95%}
.sp .number{text-align:right}
"""


def text(value: str) -> str:
    """Text for a page: names come from untrusted files.

    >>> text("<b>\\x1b")
    '&lt;b&gt;\\\\x1b'
    """
    return escape(printable(value))


def pairs(values: Iterable[tuple[str, str]]) -> str:
    """Numbers under their names; those without a text are left out."""
    items = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values if value)
    return f"<dl>{''.join(items)}</dl>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = (), label: str = "") -> str:
    """A table.

    Args:
        heads: of its columns.
        rows: text of each cell.
        numbers: the heads of columns that are aligned to the right.
        label: what the table is of, for those who cannot see the page.
    """
    attributes = [' class="number"' if head in numbers else "" for head in heads]
    columns = "".join(
        f'<th scope="col"{attribute}>{text(head)}</th>' for head, attribute in zip(heads, attributes, strict=True)
    )
    lines = []
    for row in rows:
        cells = (f"<td{attribute}>{text(cell)}</td>" for cell, attribute in zip(row, attributes, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = f' aria-label="{text(label)}"' if label else ""
    return f"<table{caption}><thead><tr>{columns}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def fragment(title: str, *parts: str) -> str:
    """What a notebook shows of an object: a title, and parts of HTML."""
    return f'<div class="sp"><style>{_STYLE}</style><strong>{text(title)}</strong>{"".join(parts)}</div>'
