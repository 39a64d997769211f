"""`shrinkpoint diff`: what changed between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, parse_location
from shrinkpoint.cli.console import Column, ExitCode, print_json, print_line, print_table, spinner

if TYPE_CHECKING:
    from shrinkpoint.tensors.compare import CheckpointDifference, TensorDifference

_LOCATION_HELP = "A file, a store (its newest checkpoint) or STORE@STEP."


def command(
    first: Annotated[str, typer.Argument(metavar="A", help=_LOCATION_HELP)],
    second: Annotated[str, typer.Argument(metavar="B", help=_LOCATION_HELP)],
    every: Annotated[bool, typer.Option("--all", help="Also the tensors that are equal.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit for bit; exit code 1 if they differ.

    Per tensor: values that differ, the largest absolute difference, and the difference relative to A in L2.
    """
    a, b = parse_location(first), parse_location(second)
    from shrinkpoint.cli.arguments import decode_location
    from shrinkpoint.tensors.compare import compare_checkpoints

    with spinner(f"comparing {a} with {b}"):
        difference = compare_checkpoints(decode_location(a), decode_location(b))
    if json:
        print_json({"a": str(a), "b": str(b), "equal": difference.equal, **asdict(difference)})
    else:
        _print(f"{a} and {b}", difference, every)
    if not difference.equal:
        raise typer.Exit(ExitCode.FINDINGS)


def _print(title: str, difference: CheckpointDifference, show_all: bool) -> None:
    rows = difference.tensors if show_all else [row for row in difference.tensors if not row.equal]
    if rows:
        print_table(_columns(rows), styles=["dim" if row.equal else "" for row in rows])
        print_line("")
    for sign, names in (("+", difference.added), ("-", difference.missing)):
        for name in names:
            print_line(f"{sign} {name}", "green" if sign == "+" else "red")
    if difference.added or difference.missing:
        print_line("")
    if difference.values:
        a_texts, b_texts = zip(*difference.values.values(), strict=True)
        columns = ("plain value", [*difference.values]), ("A", a_texts), ("B", b_texts)
        print_table([Column(title, ["-" if x is None else x for x in texts], wrap=True) for title, texts in columns])
        print_line("")
    print_line(f"{title}: {_verdict(difference)}", "" if not difference.equal else "green")


def _columns(rows: Sequence[TensorDifference]) -> list[Column]:
    def texts(values: Iterable[float | None]) -> list[str]:
        pairs = zip(rows, values, strict=True)
        return ["" if row.equal or value is None else f"{value:.3g}" for row, value in pairs]

    counts = [row.change or ("equal" if row.equal else f"{row.different:,}") for row in rows]
    return [
        Column("tensor", [row.name for row in rows], wrap=True),
        Column("values that differ", counts, align_right=True, drop_order=1),
        Column("max |A-B|", texts(row.max_abs for row in rows), align_right=True),
        Column("|A-B|/|A|", texts(row.relative for row in rows), align_right=True),
    ]


def _verdict(difference: CheckpointDifference) -> str:
    if difference.equal:
        return f"equal bit for bit ({humanize.count(len(difference.tensors), 'tensor')} and every plain value)"
    if difference.structure and all(row.equal for row in difference.tensors):
        return "every tensor and value is equal, but not the containers that hold them (ties, tuples, parameters)"
    num_different = sum(not row.equal for row in difference.tensors)
    parts = [
        f"{humanize.count(num_different, 'different tensor')} of {len(difference.tensors)}" if num_different else "",
        f"{len(difference.added)} added" if difference.added else "",
        f"{len(difference.missing)} missing" if difference.missing else "",
        f"{humanize.count(len(difference.values), 'different plain value')}" if difference.values else "",
    ]
    return ", ".join(part for part in parts if part)
