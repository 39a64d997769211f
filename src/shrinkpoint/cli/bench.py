"""`shrinkpoint bench`: every scheme on the same checkpoints."""

from __future__ import annotations

import json as jsonlib
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.console import emit, note, say, waiting
from shrinkpoint.cli.table import Column, show
from shrinkpoint.cli.target import JsonOption, ThresholdOption, share_of

if TYPE_CHECKING:
    from shrinkpoint.harness import Outcome, Quality, Series, System


def command(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[STORE|FILES...]",
            help="One store, or files of checkpoints in their order; none: a small GPT is trained first.",
            show_default=False,
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="MODULE:FUNCTION",
            help="Gets a state as it was saved, returns a loss; without it, schemes that search are left out.",
            show_default=False,
        ),
    ] = None,
    higher: Annotated[bool, typer.Option("--higher-is-better", help="--evaluate returns a score, not a loss.")] = False,
    threshold: ThresholdOption = "1%",
    schemes: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            metavar="SCHEME",
            show_default=False,
            help='Only this one, such as "fisher(relative_error=.3)"; may be given again.',
        ),
    ] = None,
    keyframe_every: Annotated[
        int | None,
        typer.Option("--keyframe-every", min=1, help="Checkpoints in a chain; else one chain.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of the coders.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="Also write PATH.json, PATH.html (and .png).", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compress the same checkpoints with every scheme, and show rate, distortion, rise of the loss, speed and memory.

    Bits a value and errors are medians over the deltas; ratios are of the whole state, of the deltas and of the whole
    run; the rise is relative to the state before; memory is the largest rise during a save, in sizes of the state.
    """
    from shrinkpoint.harness import SYSTEMS, system

    share = share_of(threshold)
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-bench-") as folder:
        series, quality = _subject(places or [], evaluate, higher, Path(folder))
        function = None if quality is None else quality.evaluate
        wanted = schemes or [name for name, known in SYSTEMS.items() if function is not None or not known.searches]
        systems = [
            system(
                name, evaluate=function, threshold=share, higher_is_better=higher, keyframe_every=keyframe_every,
                threads=threads,
            )
            for name in wanted
        ]  # fmt: skip
        outcomes = [_outcome(one, series, quality) for one in systems]
        _report(series, outcomes, share, function is not None, out, json)


def _subject(places: Sequence[Path], evaluate: str | None, higher: bool, folder: Path) -> tuple[Series, Quality | None]:
    from shrinkpoint.harness import Quality, series
    from shrinkpoint.harness.evaluation import named
    from shrinkpoint.harness.live import Plan, record

    function = None if evaluate is None else named(evaluate)
    if places:
        return series(places), None if function is None else Quality(function, higher)
    with waiting("training a small GPT"):
        recorded, quality = record(folder, Plan())
    return recorded, quality if function is None else Quality(function, higher)


def _outcome(system: System, series: Series, quality: Quality | None) -> Outcome:
    from shrinkpoint.harness import measure

    with waiting(f"{system.name}: {len(series)} checkpoints"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what schemes say of single checkpoints is in the table
        return measure(system, series, quality)


def _report(
    series: Series, outcomes: Sequence[Outcome], threshold: float, evaluated: bool, out: Path | None, json: bool
) -> None:
    document: dict[str, Any] = {
        "series": series.name,
        "checkpoints": len(series),
        "threshold": threshold if evaluated else None,
        "schemes": [one.to_json() for one in outcomes],
    }
    written = [] if out is None else _written(document, outcomes, out)
    if json:
        emit(document)
        return
    from shrinkpoint.harness.table import HEAD, cells

    rows = cells(outcomes)
    ranks = dict(zip(HEAD, (0, 1, 4, 5, 0, 2, 3, 6, 1, 7, 8, 9, 10, 11), strict=True))
    if rows:
        show([Column(name, [row[i] for row in rows], i > 0, ranks[name]) for i, name in enumerate(HEAD)])
    for one in outcomes:
        if one.failure:
            note(f"{one.name}: {one.failure}", "failed", "bold red")
    if not evaluated:
        note("no --evaluate: nothing is known of the loss, and schemes that search were left out")
    if written:
        say("written: " + ", ".join(map(str, written)))


def _written(document: dict[str, Any], outcomes: Sequence[Outcome], out: Path) -> list[Path]:
    from importlib.util import find_spec

    from shrinkpoint.harness import plot

    out.parent.mkdir(parents=True, exist_ok=True)
    written = [out.with_suffix(".json")]
    written[0].write_text(jsonlib.dumps(document, indent=1))
    if find_spec("plotly") is None:
        note("plotly is not installed: no picture (pip install 'shrinkpoint[plot]')")
    else:
        written += plot.write(outcomes, out, f"{document['series']}: {document['checkpoints']} checkpoints")
    return written
