"""Tables of a document that stand between two marks, and are written by a program out of committed results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

END = "<!-- end of these tables -->"


def written(document: str, program: str, inner: str) -> str:
    """The document with `inner` between the mark of benchmarks/`program`.py and the end of its tables.

    Raises:
        ValueError: one of the marks is missing.
    """
    mark = f"<!-- tables of benchmarks/{program}.py -->"
    start = document.index(mark) + len(mark)
    return f"{document[:start]}\n\n{inner}\n\n{document[document.index(END, start) :]}"


def main(description: str | None, document: Path, program: str, inner: str) -> None:
    """The command line of such a program: writes the tables or, with --check, says whether they are these."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the tables are others")
    args = parser.parse_args()
    before = document.read_text()
    after = written(before, program, inner)
    if args.check:
        sys.exit(0 if before == after else f"{document}: the tables are not those of the results")
    document.write_text(after)
