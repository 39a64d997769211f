"""The charts of a page: marks and lines of SVG, which the page draws without a library. `treemap` draws tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shrinkpoint import humanize
from shrinkpoint.report.files import TensorRow
from shrinkpoint.report.run import RunReport, seconds_text
from shrinkpoint.store.save_report import LossIncrease

Point = tuple[float, float]
_SIDE = 1000  # Units of a chart's sides: the page stretches it to the width there is, and its texts stand outside of it


class Trace(NamedTuple):
    """Marks or lines of one kind."""

    name: str  # in the legend; "" leaves it out
    style: str  # classes of `page.css`: how it is drawn, and its color
    points: Sequence[Point | None]  # (step, value); None ends a line
    rows: Sequence[int] = ()  # for marks, the number of each one's checkpoint in its run; empty for lines
    run: int = 0  # number of the run


@dataclass
class Chart:
    """Values over steps."""

    title: str  # its heading
    caption: str  # how it is read
    label: Callable[[float], str]  # text of a value on the axis
    log: bool = False  # the axis of values is logarithmic; otherwise it begins at zero or below
    traces: list[Trace] = field(default_factory=list)  # in the order of drawing

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
        texts = [f"{step / 1000:g}k" if high >= 20_000 else f"{int(step):,}" for step in steps]
        return [(_percent(self._x(step)), text) for step, text in zip(steps, texts, strict=True)]

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
        if self.log:
            return min(values) / 1.3, max(values) * 1.3
        return min(0.0, *values), 1.05 * max(0.0, *values) or 1.0

    def _x(self, step: float) -> float:
        low, high = self._steps
        return _SIDE * (0.02 + 0.96 * (step - low) / (high - low)) if high > low else _SIDE / 2

    def _y(self, value: float) -> float:
        low, high = self._values
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return _SIDE * (high - value) / (high - low)


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


_MAX_LEAVES = 1500  # More tensors than a page shows boxes for: the smallest of each role become one
_MIN_SHARE = 4e-4  # Of the map: a smaller box is not drawn; its parent's bytes contain it
_WIDTH, _HEIGHT, _LABEL = 1000, 480, 26
"""Sizes of a map and of the label above the boxes in a box, in the units of its layout."""
_SEPARATOR = re.compile(r"[/.]")
ROLE_NAMES = {
    "parameter": "weights",
    "moment1": "first moments",
    "moment2": "second moments",
    "master": "master weights",
    "buffer": "buffers",
    "gradient": "gradients",
    "activation": "activations",
    "other": "other",
}


@dataclass
class Node:
    """A box of the map; boxes lie within that of their parent."""

    id: str  # the path of names from the role on; "" is the whole file
    label: str  # the last of them
    parent: str  # the id of the parent
    # `raw_bytes`, `stored_bytes`: of all tensors in it.
    raw_bytes: int = 0
    stored_bytes: int = 0


@dataclass
class Box:
    """A box as the page draws it."""

    label: str  # its name
    tip: str  # its path and its bytes
    style: str  # its place and size in its parent, in percent, as CSS
    role: int  # number of its role, which is its color
    boxes: list[Box] = field(default_factory=list)  # in it


def tensor_tree(rows: Sequence[TensorRow]) -> list[Node]:
    """The boxes of all tensors with any bytes; parents come before their children."""
    largest = sorted((row for row in rows if row.raw_bytes), key=lambda row: -row.raw_bytes)
    nodes: dict[str, Node] = {"": Node("", "all", "")}
    for index, row in enumerate(largest):
        names = _SEPARATOR.split(row.name) if index < _MAX_LEAVES else ["smaller tensors"]
        for node in _path(nodes, [ROLE_NAMES.get(row.role, row.role), *filter(None, names)]):
            node.raw_bytes += row.raw_bytes
            node.stored_bytes += row.stored_bytes
    return [*nodes.values()]


def _path(nodes: dict[str, Node], names: Iterable[str]) -> Iterable[Node]:
    """The boxes from the whole file to that of a tensor; those that are missing are added."""
    yield nodes[""]
    parent = ""
    for name in names:
        id = f"{parent}/{name}"
        if id not in nodes:
            nodes[id] = Node(id, name, parent)
        yield nodes[id]
        parent = id


def tensor_boxes(rows: Sequence[TensorRow]) -> list[Box]:
    """The boxes of roles, whose areas are stored bytes, with those of layers and tensors in them."""
    nodes = tensor_tree(rows)
    children: dict[str, list[Node]] = {}
    for node in nodes[1:]:
        children.setdefault(node.parent, []).append(node)
    return _boxes("", children, _WIDTH, _HEIGHT, nodes[0].stored_bytes * _MIN_SHARE)


def _boxes(parent: str, children: dict[str, list[Node]], width: float, height: float, least: float) -> list[Box]:
    nodes = [node for node in children.get(parent, ()) if node.stored_bytes > least]
    nodes.sort(key=lambda node: (-node.stored_bytes, node.label))
    boxes = []
    for node, (x, y, w, h) in zip(nodes, squarify([node.stored_bytes for node in nodes], width, height), strict=True):
        places = zip(("left", "top", "width", "height"), (x / width, y / height, w / width, h / height), strict=True)
        style = ";".join(f"{name}:{100 * share:.2f}%" for name, share in places)
        roles = [*ROLE_NAMES.values()]
        role = node.id.split("/")[1]
        label = node.label
        while len(only := children.get(node.id, [])) == 1:
            node, label = only[0], f"{label}/{only[0].label}"
        tip = f"{node.id.strip('/')}\n{humanize.sizes(node.raw_bytes, node.stored_bytes)}"
        box = Box(label, tip, style, roles.index(role) if role in roles else len(roles) - 1)
        if h > 2 * _LABEL:
            box.boxes = _boxes(node.id, children, w, h - _LABEL, least)
        boxes.append(box)
    return boxes


def squarify(values: Sequence[float], width: float, height: float) -> list[tuple[float, float, float, float]]:
    """Rectangles (x, y, width, height) of areas in proportion to falling values, which fill one and are nearly squares.

    Bruls, Huizing, van Wijk: Squarified Treemaps (2000).

    >>> squarify([2, 1, 1], 2, 2)
    [(0.0, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    rectangles: list[tuple[float, float, float, float]] = []
    x, y, total = 0.0, 0.0, sum(values)
    rest = [value * width * height / total for value in values]
    while rest:
        side, count = max(min(width, height), 1e-9), 1
        while count < len(rest) and _worst_aspect(rest[: count + 1], side) <= _worst_aspect(rest[:count], side):
            count += 1
        is_column, depth, at = width >= height, sum(rest[:count]) / side, 0.0
        for area in rest[:count]:
            length = area / depth
            rectangles.append((x, y + at, depth, length) if is_column else (x + at, y, length, depth))
            at += length
        if is_column:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
        rest = rest[count:]
    return rectangles


def _worst_aspect(areas: Sequence[float], side: float) -> float:
    """The longer side by the shorter one, of the longest of some rectangles side by side."""
    squared = (sum(areas) / side) ** 2
    return max(max(squared / area, area / squared) for area in areas)
