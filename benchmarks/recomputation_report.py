"""Tables, JSON and a plot out of the courses of `recomputation.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import plot
from lossless_report import table

Record = Mapping[str, Any]
Row = dict[str, Any]

PAPER = {
    "ratio": "arXiv 2009.13003: up to 28x; published re-implementations of its idea: LeNet 5.4x, AlexNet 8.1x",
    "speed-up": "arXiv 2009.13003: recovery up to 5.77x faster than from SCAR",
    "partial": "arXiv 1810.07354: partial recovery alone 12-42 % (3/4 lost), 31-62 % (1/2), 59-89 % (1/4); "
    "with prioritized checkpoints 78-95 %",
}
SYSTEMS = (
    "lossless",
    *(f"lc paper x={x}" for x in (1, 2, 3, 4)),
    *(f"lc x={x}" for x in (1, 2, 3, 4)),
    "scar largest",
    "scar round robin",
    "scar random",
    "topn",
)
LCS, RIVAL = tuple(name for name in SYSTEMS if name.startswith("lc ")), "scar largest"
TRADITIONAL = "full checkpoints"
ARMS = {"partial": (TRADITIONAL, "partial recovery"), "scar": ("scar 1/8", "SCAR"), "lc": ("lc x=3", "LC x=3")}
PARTS = (("1/4", "0.25"), ("1/2", "0.5"), ("3/4", "0.75"))


def courses(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by workload and optimizer; those of a course differ by the seed."""
    out: dict[str, list[Record]] = {}
    for record in records:
        settings = record["settings"]
        out.setdefault(f"{settings['workload']}, {settings['optimizer']}", []).append(record)
    return out


def iterations(one: Mapping[str, Any], record: Record) -> int:
    """Rework; what was given up counts as the patience that it had, which is less than it is."""
    facts = record["facts"]
    return facts["patience"] if one["rework"] is None else one["rework"]


def rows(records: Sequence[Record]) -> list[Row]:
    """One of each course and system."""
    return [
        {"course": course, "system": system, **_row(found, system)}
        for course, found in courses(records).items()
        for system in SYSTEMS
        if all(system in record["systems"] for record in found)
    ]


def _row(found: Sequence[Record], system: str) -> Row:
    mine = [record["systems"][system] for record in found]
    saves = [save for one in mine for save in one["saves"]]
    deltas = [save for save in saves if not save["keyframe"]]
    reference = sum(s["weights stored"] for r in found for s in r["systems"]["lc x=3"]["saves"] if not s["keyframe"])
    rework, extra, targets = [], [], []
    for record, one in zip(found, mine, strict=True):
        plain = record["systems"]["lossless"]["failures"]
        for a, b in zip(one["failures"], plain, strict=True):
            rework.append(iterations(a, record))
            extra.append(iterations(a, record) - iterations(b, record))
            targets += [a["to target"]] if a.get("to target") is not None else []
    failures = [failure for one in mine for failure in one["failures"]]
    return {
        "seeds": len(found),
        "fraction": fmean(one["fraction"] for one in mine) if mine[0]["fraction"] else None,
        "ratio": _total(deltas, "weights raw") / _total(deltas, "weights stored"),
        "ratio with keyframe": _total(saves, "weights raw") / _total(saves, "weights stored"),
        "ratio of files": _total(saves, "raw") / _total(saves, "stored"),
        "ratio of the quantized": _total((one["save"] for one in mine), "quantized raw")
        / _total((one["save"] for one in mine), "quantized stored"),
        "bytes": _total(deltas, "weights stored") / len(deltas),
        "bytes of lc x=3": _total(deltas, "weights stored") / reference,
        "error": fmean(failure["error"] for failure in failures),
        "rework": _spread(rework),
        "extra": _spread(extra),
        "bound": _bound(failures),
        "within the bound": sum(_num_within(record, system) for record in found),
        "given up": sum(failure["rework"] is None for failure in failures),
        "failures": len(failures),
        "to target": _spread(targets) if targets else None,
        **{f"overhead {key}": fmean(_overhead(r, system, key) for r in found) for key in ("cpu", "seconds")},
    }


def _bound(failures: Sequence[Mapping[str, Any]]) -> float | None:
    """SCAR's bound, mean over the failures; None where the course does not come nearer to its end."""
    found = [failure.get("bound") for failure in failures]
    return None if None in found else fmean(found)


def _num_within(record: Record, system: str) -> int:
    """Failures that cost no more than SCAR's bound, the undisturbed run's own wait taken off."""
    failures = record["systems"][system]["failures"]
    costs = [iterations(one, record) - (wait or 0) for one, wait in zip(failures, record["waits"], strict=True)]
    bounds = [failure.get("bound") for failure in failures]
    return sum(bound is not None and cost <= bound for cost, bound in zip(costs, bounds, strict=True))


def _total(saves: Iterable[Mapping[str, Any]], key: str) -> float:
    return float(sum(save[key] for save in saves))


def _overhead(record: Record, system: str, key: str) -> float:
    """A save's seconds for each second of the interval's training."""
    return float(record["systems"][system]["save"][key] / record["iteration"][key] / record["facts"]["interval"])


def _spread(values: Sequence[float]) -> list[float]:
    """Mean and deviation."""
    return [fmean(values), stdev(values) if len(values) > 1 else 0.0]


def facts(records: Sequence[Record]) -> list[Row]:
    """What each course is, and how large its noise is."""
    out = []
    for course, found in courses(records).items():
        plain = [failure for record in found for failure in record["systems"]["lossless"]["failures"]]
        waits = [wait for record in found for wait in record["waits"] if wait is not None]
        out.append(
            {
                "course": course,
                "seeds": len(found),
                **found[0]["facts"],
                "age": fmean(failure["age"] for failure in plain),
                "wait": fmean(waits) if waits else None,
                "level": fmean(record["target"]["level"] for record in found),
                "versions": sorted({record["version"] for record in found}),
            }
        )
    return out


def partials(records: Sequence[Record]) -> list[Row]:
    """One of each course: rework with everything restored from checkpoints far apart, and what others save of it."""
    out = []
    for course, found in courses(records).items():
        row: Row = {"course": course, "traditional": _mean_of(found, TRADITIONAL, 1.0)}
        row["bytes"] = {arm: _bytes_of(found, arm) for arm, _ in list(ARMS.values())[1:]}
        for name, (arm, _) in ARMS.items():
            means = {str(lost): _mean_of(found, arm, lost) for lost in (0.25, 0.5, 0.75, 1.0)}
            row[name] = {
                lost: {"rework": mean, "saving": 1 - mean / row["traditional"] if row["traditional"] else None}
                for lost, mean in means.items()
            }
        out.append(row)
    return out


def _bytes_of(found: Sequence[Record], arm: str) -> float:
    """Of the weights' checkpoints of eight intervals, for each byte of a float32 checkpoint of all weights."""
    saves = [save for record in found for save in record["systems"][arm]["saves"] if not save["keyframe"]]
    return 8 * _total(saves, "weights stored") / _total(saves, "weights raw")


def _mean_of(found: Sequence[Record], arm: str, lost: float) -> float:
    return fmean(
        iterations(one, record)
        for record in found
        for one in record["partial"]
        if (one["arm"], one["lost"]) == (arm, lost)
    )


# text


def _matrix(found: Sequence[Row], title: str, cell: Callable[[Row], str]) -> str:
    names = [name for name in SYSTEMS if any(row["system"] == name for row in found)]
    by = {(row["course"], row["system"]): row for row in found}
    lines = [[course, *(cell(by[course, name]) for name in names)] for course in dict.fromkeys(c for c, _ in by)]
    return table([title, *names], lines)


def _pm(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.1f} ± {pair[1]:.1f}"


def _rework(row: Row) -> str:
    return f"{'>' if row['given up'] else ''}{_pm(row['rework'])}"


def _extra(row: Row) -> str:
    mark = f" ({row['given up']}/{row['failures']} given up)" if row["given up"] else ""
    return f"{row['extra'][0]:+.1f} ± {row['extra'][1]:.1f}{mark}"


def facts_table(found: Sequence[Row]) -> str:
    head = ["course", "seeds", "parameters", "exact %", "iterations", "interval", "rate", "lowest loss", "age", "noise"]
    lines = [
        [
            row["course"],
            str(row["seeds"]),
            f"{row['parameters']:,}",
            f"{100 * row['exact share']:.1f}",
            str(row["steps"]),
            str(row["interval"]),
            f"{row['rate']:g}",
            f"{row['level']:.3f}",
            f"{row['age']:.1f}",
            "-" if row["wait"] is None else f"{row['wait']:.1f}",
        ]
        for row in found
    ]
    return table(head, lines)


def speedups(found: Sequence[Row]) -> list[Row]:
    """How much less rework LC-Checkpoint needs than SCAR for the same bytes, of each course and kind of LC."""
    by = {(row["course"], row["system"]): row for row in found}
    out = []
    for course in dict.fromkeys(row["course"] for row in found):
        for name in LCS:
            mine, rival = by[course, name]["rework"][0], by[course, RIVAL]["rework"][0]
            out.append({"course": course, "system": name, "speed-up": rival / mine if mine else None})
    return out


def speedup_table(found: Sequence[Row]) -> str:
    quick = {(row["course"], row["system"]): row["speed-up"] for row in speedups(found)}
    by = {(row["course"], row["system"]): row for row in found}
    lines = []
    for course in dict.fromkeys(row["course"] for row in found):
        cells = [_times(quick[course, name], by[course, RIVAL]["given up"]) for name in LCS]
        lines.append([course, *cells, f"{by[course, RIVAL]['bytes of lc x=3']:.2f}"])
    return table(["rework from SCAR / rework from", *LCS, "SCAR's bytes / lc x=3's"], lines)


def _times(value: float | None, given_up: int) -> str:
    return "-" if value is None else f"{'>' if given_up else ''}{value:.2f}x"


def bound_table(found: Sequence[Row], what: Sequence[Row]) -> str:
    """What failures cost beside SCAR's bound, in iterations; the undisturbed run's own wait is taken off."""
    waits = {row["course"]: row["wait"] or 0.0 for row in what}
    names = ("lossless", "lc x=3", RIVAL)
    by = {(row["course"], row["system"]): row for row in found if row["system"] in names}
    lines = []
    for course in waits:
        cells = []
        for name in names:
            row = by.get((course, name))
            if row is not None:
                least = "-" if row["bound"] is None else f"{row['bound']:.1f}"
                cells.append(f"{row['rework'][0] - waits[course]:.1f} of at most {least}")
        lines.append([course, *cells])
    return table(["iteration cost, of the bound", *names], lines)


def partial_table(found: Sequence[Row]) -> str:
    head = ["saving % at lost", "rework, all restored", *(f"bytes, {label}" for _, label in list(ARMS.values())[1:])]
    head += [f"{label} {lost}" for _, label in ARMS.values() for lost, _ in PARTS]
    lines = []
    for row in found:
        said = [f"{value:.2f}" for value in row["bytes"].values()]
        cells = [row[name][lost]["saving"] for name in ARMS for _, lost in PARTS]
        lines.append(
            [
                row["course"],
                f"{row['traditional']:.1f}",
                *said,
                *("-" if x is None else f"{100 * x:.0f}" for x in cells),
            ]
        )
    return table(head, lines)


def here(found: Sequence[Row], lost: Sequence[Row]) -> str:
    """What stands beside the papers' headlines: least and largest over the courses."""
    lines = []
    for name in SYSTEMS[1:]:
        mine = [row for row in found if row["system"] == name]
        if mine:
            alone, whole, extra = (
                _range([key(row) for row in mine])
                for key in (lambda r: r["ratio of the quantized"], lambda r: r["ratio"], lambda r: r["extra"][0])
            )
            faster = [s["speed-up"] for s in speedups(found) if s["system"] == name and s["speed-up"] is not None]
            mean = fmean(row["extra"][0] for row in mine)
            times = (_range(faster, "x"), f"{_pooled(found, RIVAL) / _pooled(found, name):.1f}x") if faster else "--"
            lines.append([name, alone, whole, extra, f"{mean:+.1f}", *times])
    head = ["range over the courses", "ratio of what is quantized", "of all weights", "extra iterations", "mean"]
    head += ["SCAR's rework", "all courses together"]
    savings = [
        f"{label}: " + ", ".join(f"{part} lost {_savings(lost, name, key)} %" for part, key in PARTS)
        for name, (_, label) in ARMS.items()
    ]
    return "\n".join([table(head, lines), "", *savings])


def _pooled(found: Sequence[Row], name: str) -> float:
    """Mean rework over all courses."""
    return fmean(row["rework"][0] for row in found if row["system"] == name)


def _savings(lost: Sequence[Row], name: str, key: str) -> str:
    return _range([100 * row[name][key]["saving"] for row in lost if row[name][key]["saving"] is not None], "", 0)


def _range(values: Sequence[float], unit: str = "", digits: int = 1) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}{unit}" if values else "-"


def panels(found: Sequence[Row], lost: Sequence[Row]) -> list[plot.Panel]:
    shown = {name: rs for name in SYSTEMS[:-1] if (rs := [row for row in found if row["system"] == name])}

    def bars(key: Callable[[Row], float]) -> list[plot.Line]:
        return [
            plot.Line(n, [row["course"] for row in rs], [key(row) for row in rs], "bars") for n, rs in shown.items()
        ]

    against = [
        plot.Line(name, [row["ratio"] for row in rs], [row["extra"][0] for row in rs], "markers")
        for name, rs in shown.items()
    ]
    saved = [
        plot.Line(system, [0.25, 0.5, 0.75, 1.0], [_saved(lost, name, str(part)) for part in (0.25, 0.5, 0.75, 1.0)])
        for system, name in (("lossless", "partial"), (RIVAL, "scar"), ("lc x=3", "lc"))
    ]
    return [
        plot.Panel("ratio of the weights, keyframe apart", "", "x", bars(lambda row: row["ratio"]), log=True),
        plot.Panel("iterations beyond those after a lossless restore", "", "iterations", bars(lambda r: r["extra"][0])),
        plot.Panel("the same against the ratio, a mark a course", "ratio", "extra iterations", against, log_x=True),
        plot.Panel("partial failures: saved of the rework, SCAR 1/8", "share lost", "%, mean of the courses", saved),
    ]


def _saved(lost: Sequence[Row], name: str, part: str) -> float | None:
    found = [100 * row[name][part]["saving"] for row in lost if row[name][part]["saving"] is not None]
    return fmean(found) if found else None


def write(records: Sequence[Record], path: Path) -> None:
    """Print the tables; write `path`.json, `path`.html and perhaps `path`.png."""
    if not records:
        print("nothing was run yet")
        return
    found, what, lost = rows(records), facts(records), partials(records)
    texts = [
        facts_table(what),
        _matrix(found, "ratio of the weights, keyframe apart", lambda row: f"{row['ratio']:.1f}"),
        _matrix(found, "of what is quantized, alone", lambda row: f"{row['ratio of the quantized']:.1f}"),
        _matrix(found, "with the keyframe", lambda row: f"{row['ratio with keyframe']:.1f}"),
        _matrix(found, "of whole files, optimizer exact", lambda row: f"{row['ratio of files']:.2f}"),
        f"paper, {PAPER['ratio']}",
        _matrix(found, "error / move of an interval", lambda row: f"{row['error']:.2f}"),
        _matrix(found, "rework, iterations", _rework),
        _matrix(found, "extra, iterations", _extra),
        _matrix(found, "late to the run's lowest level", lambda row: _pm(row["to target"])),
        speedup_table(found),
        f"paper, {PAPER['speed-up']}",
        bound_table(found, what),
        partial_table(lost),
        f"paper, {PAPER['partial']}",
        here(found, lost),
        _matrix(found, "saves / training, % of CPU time", lambda row: f"{100 * row['overhead cpu']:.0f}"),
        _matrix(found, "saves / training, % of wall time", lambda row: f"{100 * row['overhead seconds']:.0f}"),
    ]
    print("\n" + "\n\n".join(texts) + "\n")
    versions = {version for row in what for version in row["versions"]}
    if len(versions) > 1:
        print(f"these courses were run with {len(versions)} versions of the code, while it was being worked on\n")
    summary = {"courses": what, "rows": found, "speed-ups": speedups(found), "partial": lost, "paper": PAPER}
    path.with_suffix(".json").write_text(json.dumps(summary, indent=1))
    plot.write(panels(found, lost), path, "Rework after failures")
