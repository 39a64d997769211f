"""`shrinkpoint diff`: what changed between two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, say, waiting
from shrinkpoint.cli.exits import Code
from shrinkpoint.cli.table import Column, show
from shrinkpoint.cli.target import JsonOption, target

if TYPE_CHECKING:
    from shrinkpoint.cli.difference import Difference, TensorDifference

_PLACE = "A file, a store (its newest checkpoint) or STORE@STEP."


def command(
    first: Annotated[str, typer.Argument(metavar="A", help=_PLACE, show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help=_PLACE, show_default=False)],
    every: Annotated[bool, typer.Option("--all", help="Also the tensors that are equal.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit for bit; exit code 1 if they differ.

    Per tensor: values that differ, the largest absolute difference, and the difference relative to A in L2.
    """
    a, b = target(first), target(second)
    from shrinkpoint.cli.decoded import decode
    from shrinkpoint.cli.difference import difference

    with waiting(f"comparing {a} with {b}"):
        found = difference(decode(a), decode(b))
    if json:
        emit({"a": str(a), "b": str(b), "equal": found.equal, **asdict(found)})
    else:
        _print(f"{a} and {b}", found, every)
    if not found.equal:
        raise typer.Exit(Code.FINDINGS)


def _print(pair: str, found: Difference, every: bool) -> None:
    rows = found.tensors if every else [one for one in found.tensors if not one.equal]
    if rows:
        show(_columns(rows), styles=["dim" if one.equal else "" for one in rows])
        say("")
    for sign, names in (("+", found.added), ("-", found.missing)):
        for name in names:
            say(f"{sign} {name}", "green" if sign == "+" else "red")
    if found.added or found.missing:
        say("")
    if found.values:
        sides = list(found.values.values())
        columns = [
            Column("plain value", list(found.values), wrap=True),
            Column("A", [a if a is not None else "-" for a, _ in sides], wrap=True),
            Column("B", [b if b is not None else "-" for _, b in sides], wrap=True),
        ]
        show(columns)
        say("")
    say(f"{pair}: {_verdict(found)}", "" if not found.equal else "green")


def _columns(rows: Sequence[TensorDifference]) -> list[Column]:
    return [
        Column("tensor", [one.name for one in rows], wrap=True),
        Column("values that differ", [_amount(one) for one in rows], right=True, rank=1),
        Column("max |A-B|", [_figure(one, one.max_abs) for one in rows], right=True),
        Column("|A-B|/|A|", [_figure(one, one.relative) for one in rows], right=True),
    ]


def _amount(one: TensorDifference) -> str:
    if one.change:
        return one.change
    return "equal" if one.equal else f"{one.different:,}"


def _figure(one: TensorDifference, value: float | None) -> str:
    return "" if one.equal or value is None else f"{value:.3g}"


def _verdict(found: Difference) -> str:
    if found.equal:
        return f"equal bit for bit ({words.count(len(found.tensors), 'tensor')} and every plain value)"
    if found.structure and all(one.equal for one in found.tensors):
        return "every tensor and value is equal, but not the containers that hold them (ties, tuples, parameters)"
    unlike = sum(not one.equal for one in found.tensors)
    parts = [
        f"{words.count(unlike, 'different tensor')} of {len(found.tensors)}" if unlike else "",
        f"{len(found.added)} added" if found.added else "",
        f"{len(found.missing)} missing" if found.missing else "",
        f"{words.count(len(found.values), 'different plain value')}" if found.values else "",
    ]
    return ", ".join(part for part in parts if part)
