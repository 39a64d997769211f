"""`shrinkpoint-lab bench`: every scheme on the same checkpoints."""

from __future__ import annotations

import json as jsonlib
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.arguments import HigherIsBetterOption, JsonOption, ThresholdOption, import_function, parse_share
from shrinkpoint.cli.console import Column, ExitCode, print_json, print_line, print_note, print_table, show_progress
from shrinkpoint.progress import track

if TYPE_CHECKING:
    from shrinkpoint_lab.bench.result import BenchResult
    from shrinkpoint_lab.bench.series import QualityFunction, Series
    from shrinkpoint_lab.bench.systems import System

_PLACES_HELP = "One store, or files of checkpoints in their order; none: a small GPT is trained first."
_EVALUATE_HELP = "Function that gets a saved state and returns its loss; without it, schemes that search are left out."
_SCHEMES_HELP = 'Only this scheme, such as "fisher(relative_error=0.3)"; repeatable.'
PlacesArgument = Annotated[list[Path] | None, typer.Argument(metavar="[STORE|FILES...]", help=_PLACES_HELP)]
EvaluateOption = Annotated[str | None, typer.Option("--evaluate", metavar="MODULE:FUNCTION", help=_EVALUATE_HELP)]
SchemesOption = Annotated[list[str] | None, typer.Option("--scheme", metavar="SCHEME", help=_SCHEMES_HELP)]
KeyframeOption = Annotated[
    int | None, typer.Option("--keyframe-every", min=1, help="Checkpoints in a chain; default: one chain.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Threads of the coders.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="Also write PATH.json, PATH.html (and .png).")
]
_DROP_ORDERS = (0, 1, 4, 5, 0, 2, 3, 6, 1, 7, 8, 9, 10, 11)
"""The order in which a narrow terminal leaves out the columns of the table."""


def command(
    places: PlacesArgument = None,
    evaluate: EvaluateOption = None,
    higher: HigherIsBetterOption = False,
    threshold: ThresholdOption = "1%",
    schemes: SchemesOption = None,
    keyframe_every: KeyframeOption = None,
    threads: ThreadsOption = 1,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Compress the same checkpoints with every scheme, and show rate, distortion, rise of the loss, speed and memory.

    Bits a value and errors are medians over the deltas; ratios are of the whole state, of the deltas and of the whole
    run; the rise is relative to the state before; memory is the largest rise during a save, in sizes of the state.
    """
    from shrinkpoint.schemes.registry import needs_evaluation
    from shrinkpoint_lab.bench.systems import SYSTEMS, make_system

    share = parse_share(threshold)
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-bench-") as directory, show_progress("bench"):
        series, quality = _load_series(places or [], evaluate, higher, Path(directory))
        function = None if quality is None else quality.evaluate
        names = schemes or [name for name in SYSTEMS if function is not None or not needs_evaluation(name)]
        make = partial(
            make_system,
            evaluate=function,
            threshold=share,
            higher_is_better=higher,
            keyframe_every=keyframe_every,
            threads=threads,
        )
        systems = [make(name) for name in names]  # a wrong name is refused before anything is measured
        results = [_measure_system(system, series, quality) for system in track(systems, "schemes")]
        document: dict[str, Any] = {
            "series": series.name,
            "checkpoints": len(series),
            "threshold": None if function is None else share,
            "schemes": [result.to_json() for result in results],
        }
    written = [] if out is None else _write_results(document, results, out)
    if json:
        print_json(document)
    else:
        _print_results(results)
        if function is None:
            print_note("no --evaluate: the loss was not measured, and schemes that search were left out")
        if written:
            print_line("written: " + ", ".join(map(str, written)))
    if all(result.failure for result in results):
        raise typer.Exit(ExitCode.FINDINGS)


def _load_series(
    paths: Sequence[Path], evaluate: str | None, higher: bool, directory: Path
) -> tuple[Series, QualityFunction | None]:
    """The series of the given paths, or a sample run recorded in `directory`; and the quality function, if any."""
    from shrinkpoint_lab.bench.series import QualityFunction, SampleRunOptions, open_series, record_sample_run

    function = None if evaluate is None else import_function(evaluate, "evaluate")
    if paths:
        return open_series(paths), None if function is None else QualityFunction(function, higher)
    series, quality = record_sample_run(directory, SampleRunOptions())
    return series, quality if function is None else QualityFunction(function, higher)


def _measure_system(system: System, series: Series, quality: QualityFunction | None) -> BenchResult:
    from shrinkpoint_lab.bench.measure import measure

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table has what schemes warn of
        return measure(system, series, quality)


def _print_results(results: Sequence[BenchResult]) -> None:
    from shrinkpoint_lab.bench.result import TABLE_HEADER, table_rows

    if rows := table_rows(results):
        columns = zip(TABLE_HEADER, zip(*rows, strict=True), _DROP_ORDERS, strict=True)
        print_table(
            [Column(title, cells, title != TABLE_HEADER[0], drop_order) for title, cells, drop_order in columns]
        )
    for result in results:
        if result.failure:
            print_note(f"{result.name}: {result.failure}", "failed", "bold red")


def _write_results(document: dict[str, Any], results: Sequence[BenchResult], out: Path) -> list[Path]:
    from importlib.util import find_spec

    from shrinkpoint_lab.bench.result import write_plot

    out.parent.mkdir(parents=True, exist_ok=True)
    written = [out.with_suffix(".json")]
    written[0].write_text(jsonlib.dumps(document, indent=1))
    if find_spec("plotly") is None:
        print_note("plotly is not installed: no picture (pip install plotly)")
    else:
        written += write_plot(results, out, f"{document['series']}: {document['checkpoints']} checkpoints")
    return written
