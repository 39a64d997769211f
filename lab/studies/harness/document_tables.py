"""Tables of a document that stand between two marks, and are written by a program out of committed results."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lab.studies.harness import REPO

END = "<!-- end of these tables -->"


def written(document: str, program: str, inner: str, part: str = "") -> str:
    """The document with `inner` between the mark of a program and the end of its tables.

    Args:
        program: its path in the repository.
        part: names one of several places that the program writes; its mark has this name.

    Raises:
        ValueError: one of the marks is missing.
    """
    mark = f"<!-- tables of {program}{f', {part}' if part else ''} -->"
    start = document.index(mark) + len(mark)
    return f"{document[:start]}\n\n{inner}\n\n{document[document.index(END, start) :]}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join((lines[0], f"|{'---|' * len(head)}", *lines[1:]))


def figure(value: float | None, digits: int = 3) -> str:
    """A number in so many digits, as it stands in a table; nothing for None.

    >>> figure(0.6351), figure(26.61), figure(105.8), figure(0), figure(None), figure(2.9999e-05)
    ('0.635', '26.6', '106', '0', '', '3.00e-05')
    """
    if value is None:
        return ""
    if abs(value) < 0.001:
        return f"{value:.{digits - 1}e}" if value else "0"
    return (f"{value:#.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:.0f}").rstrip(".")


def label(text: str) -> str:
    """A name in a result file, with its numbers as documents write them.

    >>> label("fisher(relative_error=.3)"), label("AdamW .9/.999, error 0.3")
    ('fisher(relative_error=0.3)', 'AdamW 0.9/0.999, error 0.3')
    """
    return re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)


def main(description: str | None, program: str, inner: Mapping[Path, str | Mapping[str, str]]) -> None:
    """Command line of such a program: writes the tables or, with --check, says whether the documents have them.

    Args:
        program: its file.
        inner: by document, what stands between its marks; by part, where there are several.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the tables are others")
    args = parser.parse_args()
    program = Path(program).resolve().relative_to(REPO).as_posix()
    for document, tables in inner.items():
        before = after = document.read_text()
        for part, table in {"": tables}.items() if isinstance(tables, str) else tables.items():
            after = written(after, program, table, part)
        if args.check and before != after:
            sys.exit(f"{document}: the tables are not those of the results")
        if not args.check:
            document.write_text(after)
