"""What the rounds of `scale.py` say: one row an operation, figures beside their targets, and a table.

A machine that gives fresh memory at random speed makes seconds of the clock, and of the system, differ from round to
round: beside the median of all rounds stands the least, and beside processor time that of the user alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

Row = dict[str, Any]
TIMES = ("seconds", "processor_seconds", "user_seconds", "stall_seconds")
"""Keys of which a summary has the median of all rounds and the least."""
SIZES = ("peak_states", "beyond_live_states", "bytes")
"""Keys of which a summary has the median."""
SAVES, LOADS = ("keyframe", "delta", "delta, warm"), ("load keyframe", "load delta")
SAVES_AND_LOADS = (*SAVES, *LOADS)
WIDTHS = ("", ", AVX2")
"""What follows the name of a method: nothing, or the widest instructions that it may use."""
_MOST_SECONDS = {"fisher": (1.0, 1.0, 1.5), "lossless": (1.5, 1.5, 1.5)}
"""Of a save over `torch.save` with fsync, of a load of a keyframe and of a delta over `torch.load`."""
RIVALS = (
    *(
        (method + width, operation, "torch.save", other, target)
        for width in WIDTHS
        for method, (save, load, load_delta) in _MOST_SECONDS.items()
        for operation, other, target in (
            *((operation, "keyframe, synced", save) for operation in SAVES),
            *((operation, "keyframe", None) for operation in SAVES),
            ("load keyframe", "load keyframe", load),
            ("load delta", "load keyframe", load_delta),
        )
    ),
    ("lossless", "keyframe", "zipnn", "keyframe", None),
    ("lossless", "load keyframe", "zipnn", "load keyframe", None),
)
"""Method and operation of ours, of a rival, and the most seconds of ours over the rival's; None: no target."""
SPEEDS = (
    ("fisher", SAVES, 2.4),
    ("fisher, AVX2", SAVES, 1.3),
    *(
        (method + width, operations, target)
        for width in WIDTHS
        for method, operations, target in (
            ("fisher", LOADS, 1.5),
            ("lossless", ("keyframe",), 1.0),
            ("lossless", ("delta", "delta, warm"), 0.7),
            ("lossless", LOADS, 1.5),
        )
    ),
)
"""Least GB of raw state a second of processor time."""
MEMORY = {"fisher": 0.4, "lossless": 1.15}
"""Most memory of a save beyond the live state, in states; a save in the background has one more."""


class Figure(NamedTuple):
    """One figure beside its target.

    Attributes:
        values: from medians, from the least of all rounds, and, where a processor's time is measured, from the least
            time of the user alone.
        target: None if there is none.
        at_most: True if the target is the most that it may be, or the least.
    """

    name: str
    values: Sequence[float]
    target: float | None = None
    at_most: bool = True

    @property
    def verdict(self) -> str:
        """ "yes" if the median meets the target, "at best" if another value does, else "no"; "" without a target."""
        if self.target is None:
            return ""
        meets = [value <= self.target if self.at_most else value >= self.target for value in self.values]
        return "yes" if meets[0] else "at best" if any(meets) else "no"


def summarize(rows: Iterable[Row]) -> list[Row]:
    """One row of each operation: of each time the median of all rounds and the least, of each size the median."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["threads"], row["method"], row["operation"]), []).append(row)
    summary = []
    for group in groups.values():
        row = {key: value for round_ in group for key, value in round_.items()}
        for key in TIMES:
            if values := [round_[key] for round_ in group if key in round_]:
                row[key] = [round(statistic(values), 4) for statistic in (median, min)]
        for key in SIZES:
            if values := [round_[key] for round_ in group if key in round_]:
                row[key] = round(median(values), 3)
        if "seconds" in row:
            row["rounds"] = sum("seconds" in round_ for round_ in group)
        summary.append(row)
    return summary


class _Summary:
    """The rows of a summary by what they are of."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {
            (row["model"], row["threads"], row["method"], row["operation"]): row for row in rows if "seconds" in row
        }
        self.runs = list(dict.fromkeys((model, threads) for model, threads, _, _ in self._rows))

    def times(self, model: str, threads: int, method: str, operation: str, key: str = "seconds") -> list[float]:
        """Median and least of a time; empty if it was not measured."""
        return self._rows.get((model, threads, method, operation), {}).get(key, [])

    def size(self, model: str, threads: int, method: str, operation: str, key: str) -> float:
        """A size of a row that there is."""
        return float(self._rows[model, threads, method, operation][key])

    def operations(self, model: str, threads: int, method: str) -> list[str]:
        """What was measured of a method."""
        return [key[3] for key in self._rows if key[:3] == (model, threads, method)]


def figures(rows: Iterable[Row]) -> Iterator[Figure]:
    """Every figure that has a target, and ratios of ours to what people use."""
    summary = _Summary(rows)
    for model, threads in summary.runs:
        for figure in (
            *_rival_figures(summary, model, threads),
            *_speed_figures(summary, model, threads),
            *_stall_figures(summary, model, threads),
            *_memory_figures(summary, model, threads),
            *_chain_figures(summary, model, threads),
        ):
            yield figure._replace(name=f"{model}, {threads} thread{'s' * (threads > 1)}: {figure.name}")
    yield from _thread_figures(summary)
    yield from _growth_figures(summary)


def _rival_figures(summary: _Summary, model: str, threads: int) -> Iterator[Figure]:
    for method, operation, rival, other, target in RIVALS:
        ours, theirs = summary.times(model, threads, method, operation), summary.times(model, threads, rival, other)
        if ours and theirs:
            # a target of the saves is set for two threads
            yield Figure(
                f"{method} {operation}, seconds / {rival} {other}",
                _ratios(ours, theirs),
                target if threads > 1 else None,
            )


def _speed_figures(summary: _Summary, model: str, threads: int) -> Iterator[Figure]:
    for method, operations, target in SPEEDS:
        for operation in operations:
            processor = summary.times(model, threads, method, operation, "processor_seconds")
            if processor:
                user = summary.times(model, threads, method, operation, "user_seconds")
                gigabytes = summary.size(model, threads, method, operation, "state_bytes") / 1e9
                speeds = [gigabytes / max(seconds, 1e-9) for seconds in (*processor, user[1])]
                yield Figure(f"{method} {operation}, GB/s a core", speeds, target, at_most=False)


def _stall_figures(summary: _Summary, model: str, threads: int) -> Iterator[Figure]:
    """A copy into new memory is what the first saves are, and one into used memory what the later ones are."""
    for operation in summary.operations(model, threads, "background"):
        stall = summary.times(model, threads, "background", operation, "stall_seconds")
        for copy in ("copy", "copy again"):
            seconds = summary.times(model, threads, "copy", copy)
            if seconds:
                yield Figure(f"{operation}, stall / {copy}", _ratios(stall, seconds), 1.2 if copy == "copy" else None)


def _memory_figures(summary: _Summary, model: str, threads: int) -> Iterator[Figure]:
    for method, target in MEMORY.items():
        for operation in summary.operations(model, threads, method):
            if not operation.startswith("load"):
                states = summary.size(model, threads, method, operation, "beyond_live_states")
                yield Figure(f"{method} {operation}, states beyond the live one", [states], target)
    for operation in summary.operations(model, threads, "background"):
        states = summary.size(model, threads, "background", operation, "beyond_live_states")
        target = 1 + MEMORY[operation.partition(",")[0]]
        yield Figure(f"{operation} in the background, states beyond the live one", [states], target)


def _chain_figures(summary: _Summary, model: str, threads: int) -> Iterator[Figure]:
    of_fisher = [(f"fisher chain{width}", "fisher", f"fisher{width}") for width in WIDTHS]
    for method, scheme, name in (*(("chain", scheme, scheme) for scheme in MEMORY), *of_fisher):
        first, last = (summary.times(model, threads, method, f"{scheme}, load {number} of 20") for number in (1, 20))
        if first and last:
            yield Figure(f"{name} load of 20 in a chain / of its keyframe", _ratios(last, first), 2.0)
            states = summary.size(model, threads, method, f"{scheme}, load 20 of 20", "peak_states")
            yield Figure(f"{name} load of 20 in a chain, states", [states], 1.3)


def _thread_figures(summary: _Summary) -> Iterator[Figure]:
    for model, threads in summary.runs:
        if threads != 2:
            continue
        for method in ("fisher", "lossless"):
            for operation in SAVES_AND_LOADS:
                single = summary.times(model, 1, method, operation)
                double = summary.times(model, 2, method, operation)
                if single and double:
                    yield Figure(
                        f"{model}: {method} {operation}, 1 thread / 2", _ratios(single, double), 1.8, at_most=False
                    )


def _growth_figures(summary: _Summary) -> Iterator[Figure]:
    for model, threads in summary.runs:
        if model != "350M":
            continue
        for method in ("fisher", "lossless"):
            for operation in SAVES_AND_LOADS:
                for key in ("seconds", "processor_seconds"):
                    large = summary.times("350M", threads, method, operation, key)
                    small = summary.times("30M", threads, method, operation, key)
                    if large and small:
                        growth = summary.size("350M", threads, method, operation, "state_bytes") / summary.size(
                            "30M", threads, method, operation, "state_bytes"
                        )
                        values = [ratio / growth for ratio in _ratios(large, small)]
                        what = f"{method} {operation}, {key.replace('_', ' ')} a parameter"
                        yield Figure(f"{threads} thread{'s' * (threads > 1)}: {what}, 350M / 30M", values, 1.2)


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / max(b, 1e-9) for a, b in zip(over, under, strict=True)]


def operation_table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines of a Markdown table of a summary; times are the median of all rounds and the least."""
    head = ("model", "threads", "method", "operation", "s", "processor s", "user s", "GB/s", "GB/s a core")
    lines = [[*head, "peak, states", "beyond live", "ratio", "stall, s"]]
    for row in rows:
        names = [row["model"], str(row["threads"]), row["method"], row["operation"]]
        if "error" in row or not {"seconds", "peak_states"} <= row.keys():
            lines.append([*names, row.get("error", "not measured whole")])
            continue
        gigabytes = row["state_bytes"] / 1e9
        lines.append(
            [
                *names,
                *(f"{row[key][0]:.3f} ({row[key][1]:.3f})" for key in TIMES[:3]),
                *(f"{gigabytes / max(row[key][0], 1e-9):.2f}" for key in TIMES[:2]),
                *(f"{row[key]:.2f}" for key in SIZES[:2]),
                f"{row['state_bytes'] / row['bytes']:.2f}" if "bytes" in row else "",
                f"{row['stall_seconds'][0]:.3f} ({row['stall_seconds'][1]:.3f})" if "stall_seconds" in row else "",
            ]
        )
    yield from markdown(lines)


def figure_table(found: Iterable[Figure]) -> Iterator[str]:
    """Lines of a Markdown table of figures, each beside its target."""
    lines = [["figure", "target", "median", "best", "best, user time", "met"]]
    for figure in found:
        target = "" if figure.target is None else f"{'<=' if figure.at_most else '>='} {figure.target:g}"
        values = [f"{value:.2f}" for value in figure.values] + [""] * (3 - len(figure.values))
        lines.append([figure.name, target, *values, figure.verdict])
    yield from markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table with columns of one width each; an error, in a row that ends early, takes what it needs."""
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    for number, line in enumerate(lines):
        yield "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
