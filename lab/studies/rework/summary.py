"""Figures of the courses of `run.py`, which `table.py` makes tables of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

Record = Mapping[str, Any]
Row = dict[str, Any]

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
ARMS = {"partial": TRADITIONAL, "scar": "scar 1/8", "lc": "lc x=3"}


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
        row["bytes"] = {arm: _bytes_of(found, arm) for arm in list(ARMS.values())[1:]}
        for name, arm in ARMS.items():
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


def speedups(found: Sequence[Row]) -> list[Row]:
    """How much less rework LC-Checkpoint needs than SCAR for the same bytes, of each course and kind of LC."""
    by = {(row["course"], row["system"]): row for row in found}
    out = []
    for course in dict.fromkeys(row["course"] for row in found):
        for name in LCS:
            mine, rival = by[course, name]["rework"][0], by[course, RIVAL]["rework"][0]
            out.append({"course": course, "system": name, "speed-up": rival / mine if mine else None})
    return out


def summary(records: Sequence[Record]) -> dict[str, list[Row]]:
    """What `table.py` reads, in plain values."""
    found = rows(records)
    return {"courses": facts(records), "rows": found, "speed-ups": speedups(found), "partial": partials(records)}
