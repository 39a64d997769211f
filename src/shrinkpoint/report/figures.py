"""The charts of a page: marks and lines of SVG, which the page draws without a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shrinkpoint import humanize
from shrinkpoint.report.run import RunReport, seconds_text
from shrinkpoint.store.loss_increase import LossIncrease

Point = tuple[float, float]
_SIDE = 1000
"""Units of a chart's sides: the page stretches it to the width there is, and its texts stand outside of it."""


class Trace(NamedTuple):
    """Marks or lines of one kind.

    Attributes:
        name: in the legend; "" leaves it out.
        style: classes of `page.css`: how it is drawn, and its color.
        points: (step, value); None ends a line.
        rows: for marks, the number of each one's checkpoint in its run; empty for lines.
        run: number of the run.
    """

    name: str
    style: str
    points: Sequence[Point | None]
    rows: Sequence[int] = ()
    run: int = 0


@dataclass
class Chart:
    """Values over steps.

    Attributes:
        title: its heading.
        caption: how it is read.
        label: text of a value on the axis.
        log: the axis of values is logarithmic; otherwise it begins at zero or below.
        traces: in the order of drawing.
    """

    title: str
    caption: str
    label: Callable[[float], str]
    log: bool = False
    traces: list[Trace] = field(default_factory=list)

    def add(self, trace: Trace) -> None:
        """Add a trace unless it is empty."""
        if any(trace.points):
            self.traces.append(trace)

    @property
    def legend(self) -> list[Trace]:
        """A trace for each name."""
        return [*{trace.name: trace for trace in reversed(self.traces) if trace.name}.values()][::-1]

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """(percent of the width, text)."""
        low, high = self._steps
        steps = [step for step in linear_ticks(low, high, 6) if step == int(step)]
        return [(_percent(self._x(step)), _step_label(int(step), high)) for step in steps]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """(percent of the height from above, text)."""
        low, high = self._values
        ticks = log_ticks(low, high) if self.log else linear_ticks(low, high)
        return [(_percent(self._y(value)), self.label(value)) for value in ticks if self.label(value)]

    def path(self, trace: Trace) -> str:
        """The trace as the data of an SVG path; a mark is a line without length, whose cap is what one sees."""
        parts, pen = [], "M"
        for point in trace.points:
            if point is None:
                pen = "M"
                continue
            parts.append(f"{pen}{round(self._x(point[0]), 1):g} {round(self._y(point[1]), 1):g}")
            if trace.rows:
                parts.append("h0")
            else:
                pen = "L"
        return "".join(parts)

    @cached_property
    def _points(self) -> list[Point]:
        return [point for trace in self.traces for point in trace.points if point is not None]

    @cached_property
    def _steps(self) -> tuple[float, float]:
        steps = [step for step, _ in self._points] or [0.0]
        return min(steps), max(steps)

    @cached_property
    def _values(self) -> tuple[float, float]:
        values = [value for _, value in self._points] or [1.0]
        return (
            (min(values) / 1.3, max(values) * 1.3) if self.log else (min(0.0, *values), 1.05 * max(0.0, *values) or 1.0)
        )

    def _x(self, step: float) -> float:
        low, high = self._steps
        return _SIDE * (0.02 + 0.96 * (step - low) / (high - low)) if high > low else _SIDE / 2

    def _y(self, value: float) -> float:
        low, high = self._values
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return _SIDE * (high - value) / (high - low)


def _step_label(step: int, highest: float) -> str:
    return f"{step / 1000:g}k" if highest >= 20_000 else f"{step:,}"


def linear_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """A few round numbers between two.

    >>> linear_ticks(0, 470_000), linear_ticks(100, 1200), linear_ticks(5, 5)
    ([0.0, 200000.0, 400000.0], [500.0, 1000.0], [5.0])
    """
    if high <= low:
        return [float(low)]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step * (1 + 1e-9)) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two numbers, or 1, 2 and 5 times powers where there are few.

    >>> log_ticks(80, 2e6), log_ticks(20_000, 700_000)
    ([100.0, 1000.0, 10000.0, 100000.0, 1000000.0], [20000.0, 50000.0, 100000.0, 200000.0, 500000.0])
    """
    factors = (1, 2, 5) if high / low < 100 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def size_label(value: float) -> str:
    """Bytes on an axis.

    >>> size_label(500_000.0), size_label(2.5e6), size_label(0.0)
    ('500 kB', '2.5 MB', '0 B')
    """
    number, unit = humanize.size(round(value)).split()
    return f"{float(number):g} {unit}"


def percent_label(value: float) -> str:
    return f"{100 * value:.3g}%"


def series_charts(runs: Sequence[RunReport]) -> Iterator[Chart]:
    """The charts over steps: bytes, the disk, chains, what was lost, and what saves cost."""
    if not any(run.checkpoints for run in runs):
        return
    yield _bytes_chart(runs)
    yield _disk_chart(runs)
    for number, run in enumerate(runs):
        if run.checkpoints:
            yield _chain_chart(run, number, f": {run.name}" if len(runs) > 1 else "")
    if any(row.manifest.is_lossy for run in runs for row in run.checkpoints):
        yield _rise_chart(runs)
    yield from (chart for chart in (_progress_chart(runs), _time_chart(runs)) if chart.traces)


def _each(runs: Sequence[RunReport]) -> Iterator[tuple[int, RunReport, str]]:
    """Number, run, and its name in legends: nothing where it is alone."""
    for number, run in enumerate(runs):
        yield number, run, run.name if len(runs) > 1 else ""


def _joined(name: str, kind: str) -> str:
    return f"{name}, {kind}" if name else kind


def _marks(name: str, style: str, run: RunReport, values: Sequence[float | None], number: int, rows: set[int]) -> Trace:
    """Marks of some checkpoints of a run, by their numbers."""
    points = list(zip(run.steps, values, strict=True))
    known = [(row, step, value) for row, (step, value) in enumerate(points) if row in rows and value is not None]
    return Trace(name, style, [(step, value) for _, step, value in known], [row for row, _, _ in known], number)


def _line(name: str, style: str, run: RunReport, values: Sequence[float | None]) -> Trace:
    points = [None if value is None else (step, value) for step, value in zip(run.steps, values, strict=True)]
    return Trace(name, f"line {style}", points)


def _add_kinds(chart: Chart, number: int, run: RunReport, values: Sequence[float | None], name: str = "") -> None:
    """Add a square for each keyframe and a dot for each delta; the legend explains both unless it names the run."""
    deltas = {index for index, row in enumerate(run.checkpoints) if row.manifest.depth}
    keyframes = {*range(len(values))} - deltas
    chart.add(_marks("" if name else "keyframe", f"square run{number}", run, values, number, keyframes))
    chart.add(_marks("" if name else "delta", f"dot run{number}", run, values, number, deltas))


def _add_run(chart: Chart, number: int, run: RunReport, values: Sequence[float | None], name: str) -> None:
    chart.add(_line(name, f"run{number}", run, values))
    _add_kinds(chart, number, run, values, name)


def _bytes_chart(runs: Sequence[RunReport]) -> Chart:
    caption = (
        "Bytes of each checkpoint's own file, beside those of its state, which torch.save writes. Squares: keyframes."
    )
    chart = Chart("Bytes by step", caption, size_label, log=True)
    for number, run, name in _each(runs):
        raw = [row.manifest.raw_bytes or None for row in run.checkpoints]
        chart.add(_line(_joined(name, "torch.save"), f"plain run{number}", run, raw))
        _add_run(chart, number, run, [row.manifest.stored_bytes or None for row in run.checkpoints], name)
    return chart


def _disk_chart(runs: Sequence[RunReport]) -> Chart:
    caption = "Bytes of the checkpoints up to a step and of all their bases, beside as many files of torch.save."
    chart = Chart("On the disk", caption, size_label)
    for number, run, name in _each(runs):
        raw, stored = run.cumulative_bytes()
        chart.add(_line(_joined(name, "torch.save"), f"plain run{number}", run, raw))
        _add_run(chart, number, run, stored, name)
    return chart


def _chain_chart(run: RunReport, number: int, suffix: str) -> Chart:
    caption = "A restore reads a checkpoint and every file below it on its line, down to a keyframe."
    if run.doomed:
        caption += " Red: the next prune deletes it."
    chart = Chart(f"Chains{suffix}", caption, lambda value: f"{value:g}" if value == int(value) else "")
    depths = [row.manifest.depth for row in run.checkpoints]
    places, links = list(zip(run.steps, depths, strict=True)), run.links()
    for name, style, is_back in (("", "", False), ("delta on a newer file", "back ", True)):
        lines = [(base, places[row], None) for row, base in links if (base[0] > places[row][0]) == is_back]
        chart.add(Trace(name, f"line {style}run{number}", [point for line in lines for point in line]))
    _add_kinds(chart, number, run, depths)
    doomed = {row for row, report in enumerate(run.checkpoints) if report.manifest.step in run.doomed}
    bases = {row for row, report in enumerate(run.checkpoints) if report.forgotten} - doomed
    marks = _marks("only a base of others", f"ring run{number}", run, depths, number, bases)
    deleted = sorted({base for _, base in links} - {*places})
    chart.add(marks._replace(points=[*deleted, *marks.points], rows=[*[-1] * len(deleted), *marks.rows]))
    chart.add(_marks("deleted by the next prune", "ring doomed", run, depths, number, doomed))
    return chart


def _rise_chart(runs: Sequence[RunReport]) -> Chart:
    caption = (
        "By how much the loss rises where a checkpoint is restored, with the 95% interval on other examples. "
        "Rings at zero were not measured."
    )
    chart = Chart("Rise of the loss", caption, percent_label)
    for number, run, name in _each(runs):
        increases = [LossIncrease.from_loss(row.manifest.loss) for row in run.checkpoints]
        values = [increase.value if increase.is_lossy else 0.0 for increase in increases]
        bars: list[Point | None] = []
        for step, increase in zip(run.steps, increases, strict=True):
            if increase.interval is not None:
                bars += [(step, increase.interval[0]), (step, increase.interval[1]), None]
        unknown, color = {row for row, value in enumerate(values) if value is None}, f"run{number}"
        known = {*range(len(values))} - unknown
        chart.add(Trace("", f"line {color}", bars))
        chart.add(_line("", color, run, values))
        chart.add(_marks(_joined(name, "measured, or nothing lost"), f"dot {color}", run, values, number, known))
        chart.add(_marks(_joined(name, "not measured"), f"ring {color}", run, [0.0] * len(values), number, unknown))
    return chart


def _progress_chart(runs: Sequence[RunReport]) -> Chart:
    chart = Chart("Progress held", "Share of the weights' progress since the checkpoint before.", percent_label)
    for number, run, name in _each(runs):
        _add_run(chart, number, run, [row.manifest.stats.get("retention") for row in run.checkpoints], name)
    return chart


def _time_chart(runs: Sequence[RunReport]) -> Chart:
    caption = "How long the training loop waited for each save, and how long writing took, also beside the loop."
    chart = Chart("Time of saves", caption, seconds_text)
    for number, run, name in _each(runs):
        for stat, kind, line, mark in (
            ("stall", "the loop waited", "", "dot"),
            ("seconds", "written", "back ", "ring"),
        ):
            values = [row.manifest.stats.get(stat) for row in run.checkpoints]
            chart.add(_line("", f"{line}run{number}", run, values))
            chart.add(_marks(_joined(name, kind), f"{mark} run{number}", run, values, number, {*range(len(values))}))
    return chart


def _percent(units: float) -> float:
    return round(100 * units / _SIDE, 2)
