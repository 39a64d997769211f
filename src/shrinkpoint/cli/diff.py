"""`shrinkpoint diff`: what changed between two checkpoints, and where most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, Location, open_leaves, parse_location
from shrinkpoint.cli.console import Column, ExitCode, paged, print_json, print_line, print_table, show_progress

if TYPE_CHECKING:
    from shrinkpoint.tensors.compare import CheckpointDifference, LeafSource, TensorDifference

_LOCATION_HELP = "A file, a store (its newest checkpoint), STORE@STEP, or a checkpoint that `convert` reads."


class SortKey(str, Enum):
    """Measure by which `diff` ranks tensors."""

    RELATIVE = "relative"
    MAX = "max"
    SHARE = "share"
    NAME = "name"


SortOption = Annotated[
    SortKey,
    typer.Option("--sort", help="Measure by which the largest change comes first; name: the order of the state."),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", "-n", min=0, metavar="N", help="Print only the N tensors that changed most.")
]


def command(
    first: Annotated[str, typer.Argument(metavar="A", help=_LOCATION_HELP)],
    second: Annotated[str, typer.Argument(metavar="B", help=_LOCATION_HELP)],
    every: Annotated[bool, typer.Option("--all", help="Also print equal tensors.")] = False,
    sort: SortOption = SortKey.RELATIVE,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit for bit, the largest change first; exit code 1 if they differ.

    Each tensor has the L2 norm of A-B relative to A, the largest absolute difference, and the share of the values that
    differ. Names that only one side has come first, then tensors of another dtype or shape.
    """
    a, b = parse_location(first, allow_foreign=True), parse_location(second, allow_foreign=True)
    from shrinkpoint.tensors.compare import compare_states

    with show_progress(f"comparing {a} with {b}"):
        difference = compare_states(*_open_sides(a, b))
    ranked = sorted(difference.tensors, key=lambda row: _rank(row, sort))
    if limit is not None:
        ranked = [row for row in ranked if not row.equal][:limit]
    if json:
        document = asdict(replace(difference, tensors=tuple(ranked)))
        print_json({"a": str(a), "b": str(b), "equal": difference.equal, "sort": sort.value, **document})
    else:
        with paged():
            _print(f"{a} and {b}", difference, ranked if every else [row for row in ranked if not row.equal])
    if not difference.equal:
        raise typer.Exit(ExitCode.FINDINGS)


_MEASURES = {SortKey.RELATIVE: "relative", SortKey.MAX: "max_abs", SortKey.SHARE: "share"}


def _rank(row: TensorDifference, sort: SortKey) -> tuple[Any, ...]:
    """A sort key: other dtypes and shapes first, then the largest measure, then the largest share; equal ones last."""
    if sort is SortKey.NAME:
        return ()
    measure: float | None = getattr(row, _MEASURES[sort])
    return row.equal, not row.change, _descending(measure), _descending(row.share)


def _descending(value: float | None) -> float:
    """A sort key by which the largest value comes first: nan is larger than any number, None smaller."""
    if value is None:
        return math.inf
    return -math.inf if math.isnan(value) else -value


def _open_sides(a: Location, b: Location) -> tuple[LeafSource, LeafSource]:
    """The leaves of both; where one of them is what others wrote, the content alone of what `convert` made of such."""
    from shrinkpoint.convert.part import SOURCE_KEY, STATE_KEY
    from shrinkpoint.tensors.compare import SubtreeLeaves

    foreign = [_read_foreign(side) for side in (a, b)]
    first, second = (open_leaves(side) if state is None else state for side, state in zip((a, b), foreign, strict=True))
    if foreign == [None, None]:
        return first, second

    def content(side: LeafSource) -> LeafSource:
        is_converted = isinstance(side.tree, dict) and side.tree.keys() == {SOURCE_KEY, STATE_KEY}
        return SubtreeLeaves(side, STATE_KEY) if is_converted else side

    return content(first), content(second)


def _read_foreign(location: Location) -> LeafSource | None:
    """The content of a checkpoint that others wrote; None for one of ours."""
    identity = None if location.is_run or not isinstance(location.path, Path) else location.identify()
    if identity is None or not identity.is_foreign or not isinstance(location.path, Path):
        return None
    from shrinkpoint.convert.discover import discover
    from shrinkpoint.convert.part import STATE_KEY, origin_info
    from shrinkpoint.tensors.compare import StateLeaves

    state = discover(location.path, step=location.step).checkpoints[-1].read()
    return StateLeaves(state if origin_info(state) is None else state[STATE_KEY])


def _print(title: str, difference: CheckpointDifference, rows: Sequence[TensorDifference]) -> None:
    for sign, names in (("+", difference.added), ("-", difference.missing)):
        for name in names:
            print_line(f"{sign} {name}", "green" if sign == "+" else "red")
    if difference.added or difference.missing:
        print_line("")
    if rows:
        print_table(_columns(rows), styles=["dim" if row.equal else "" for row in rows])
        if hidden := sum(not row.equal for row in difference.tensors) - sum(not row.equal for row in rows):
            print_line(f"and {humanize.count(hidden, 'tensor')} that changed less", "dim")
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
    shares = ["" if row.equal or row.share is None else f"{100 * row.share:.3g}%" for row in rows]
    return [
        Column("tensor", [row.name for row in rows], wrap=True),
        Column("|A-B|/|A|", texts(row.relative for row in rows), align_right=True),
        Column("max |A-B|", texts(row.max_abs for row in rows), align_right=True),
        Column("values that differ", counts, align_right=True, drop_order=1),
        Column("share", shares, align_right=True, drop_order=2),
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
