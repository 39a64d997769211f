"""Tables, JSON and a plot out of the runs of `lossy_recovery.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import plot
import published_numbers
import restores_tables
import summarize
from lossless_report import table

Record = Mapping[str, Any]
GROUP = ("workload", "system", "paper", "threshold", "restores", "optimizer", "keyframe_every", "quick")
HIGHER = ("resnet", "wide", "resnet adamw")
"""Workloads with a score, of records that do not say so themselves."""
THREE = tuple(restores_tables.WORKLOADS)
"""A training from scratch of text, one of images, and a fine-tuning: each scheme is restored ten times in all three."""


def degradation(record: Record, quality: float, base: float) -> float:
    """Relative, above zero is worse; of a run's own measure, a score or a loss."""
    higher = record["facts"].get("higher_is_better", record["settings"]["workload"] in HIGHER)
    return (base - quality if higher else quality - base) / abs(base)


def bases(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """The uninterrupted runs by workload and seed."""
    out: dict[str, dict[int, Record]] = {}
    for record in records:
        settings = record["settings"]
        if settings["system"] == "none":
            out.setdefault(settings["workload"], {})[settings["seed"]] = record
    return out


def noise(found: Mapping[int, Record]) -> dict[str, Any]:
    """Of uninterrupted runs that differ by their seed: mean quality, and its deviation relative to it."""
    values = [record["quality"] for record in found.values()]
    mean = fmean(values)
    return {"seeds": len(values), "mean": mean, "deviation": stdev(values) / abs(mean) if len(values) > 1 else None}


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One of each setting that was run with any seed."""
    known, groups = bases(records), {}
    for record in records:
        if record["settings"]["system"] != "none":
            groups.setdefault(tuple(record["settings"][key] for key in GROUP), []).append(record)
    return [{**dict(zip(GROUP, key, strict=True)), **_row(key[0], found, known)} for key, found in groups.items()]


def _row(workload: str, found: Sequence[Record], known: Mapping[str, Mapping[int, Record]]) -> dict[str, Any]:
    base = known.get(workload, {})
    paired = [(record, base[record["settings"]["seed"]]) for record in found if record["settings"]["seed"] in base]
    same = [degradation(record, record["quality"], other["quality"]) for record, other in paired]
    mean = noise(base)["mean"] if base else None
    saves = [save for record in found for save in record["saves"]]
    kept = [save["retention"] for save in saves if save["retention"] is not None]
    searched = [save for save in saves if save["search"]]
    return {
        "seeds": len(found),
        "quality": fmean(record["quality"] for record in found),
        "against the same seed": fmean(same) if same else None,
        "against the mean": fmean(degradation(r, r["quality"], mean) for r in found) if mean else None,
        "bit-identical": all(record["fingerprint"] == other["fingerprint"] for record, other in paired)
        if paired
        else None,
        "ratio weights": _total(saves, "weights raw") / _total(saves, "weights stored"),
        "ratio full": _total(saves, "raw") / _total(saves, "stored"),
        "best": max(save["weights raw"] / save["weights stored"] for save in saves),
        "overhead": fmean(record["overhead"] for record in found),
        "evaluating": sum(s["evaluations"]["seconds"] for s in saves) / sum(r["train seconds"] for r in found),
        "trials": fmean(save["evaluations"]["calls"] for save in searched) if searched else None,
        "least retention": min(kept) if kept else None,
        "restore seconds": fmean([r["seconds"] for one in found for r in one["restores"]] or [0.0]),
        "seconds": fmean(record["seconds"] for record in found),
    }


def _total(saves: Iterable[Mapping[str, Any]], key: str) -> float:
    return float(sum(save[key] for save in saves))


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['system']}{' (paper)' if row['paper'] else ''}"


def _percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{100 * value:+.{digits}f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def measured_table(found: Sequence[Mapping[str, Any]]) -> str:
    head = [
        "workload, system",
        "threshold",
        "restores",
        "seeds",
        "quality",
        "worse % (seed)",
        "worse % (mean)",
        "weights x",
        "best x",
        "full x",
        "overhead %",
        "of it eval %",
        "trials",
        "retention",
        "run s",
    ]
    order = sorted(found, key=lambda row: (row["workload"], _name(row), -row["threshold"], row["restores"]))
    return table(head, [_cells(row) for row in order])


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['workload']}, {_name(row)}",
        f"{row['threshold']:g}",
        str(row["restores"]),
        str(row["seeds"]),
        f"{row['quality']:.4f}",
        _percent(row["against the same seed"]),
        _percent(row["against the mean"]),
        _number(row["ratio weights"]),
        _number(row["best"]),
        _number(row["ratio full"], 2),
        f"{100 * row['overhead']:.1f}",
        f"{100 * row['evaluating']:.1f}",
        _number(row["trials"]),
        _number(row["least retention"], 2),
        _number(row["seconds"], 0),
    ]


def paper_table() -> str:
    lines = []
    for model, systems in published_numbers.RECOVERY.items():
        for system, figures in systems.items():
            cells = (
                ["failed", "-", "-"]
                if figures is None
                else [f"{x:+.2f}" if i == 0 else f"{x:.2f}" for i, x in enumerate(figures)]
            )
            lines.append([f"{model}, {system}", *cells])
    return table(["paper: 10 restores, threshold .05", "worse %", "weights x", "overhead %"], lines)


def ten_restores(records: Sequence[Record]) -> str:
    """The tables of these runs as docs/scheme_studies.md has them."""
    runs = [summarize.row(record, records) for record in records]
    return restores_tables.tables({"machine": records[-1]["machine"], "runs": runs})


def panels(records: Sequence[Record], found: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    out = []
    for workload in dict.fromkeys(row["workload"] for row in found):
        mine = [row for row in found if row["workload"] == workload]
        known = bases(records).get(workload, {})
        out += [_degradations(workload, mine, known), _ratios(workload, records), _curves(workload, records)]
    return out


def _degradations(workload: str, mine: Sequence[Mapping[str, Any]], known: Mapping[int, Record]) -> plot.Panel:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(mine, key=lambda row: row["restores"]):
        if row["against the same seed"] is not None and row["threshold"]:
            name = f"{_name(row)} {row['threshold']:g}"
            lines.setdefault(name, []).append((row["restores"], 100 * row["against the same seed"]))
    spread = noise(known)["deviation"] if known else None
    return plot.Panel(
        f"{workload}: how much worse (grey: deviation over seeds)",
        "restores",
        "%",
        [plot.Line(name, *zip(*points, strict=True)) for name, points in lines.items()],
        band=(-100 * spread, 100 * spread) if spread else None,
    )


def _shown(workload: str, records: Sequence[Record]) -> list[tuple[str, Record]]:
    """Runs of seed 0 that fit in one panel: those with the most usual number of restores."""
    out = []
    for record in records:
        settings = record["settings"]
        if settings["workload"] == workload and settings["seed"] == 0 and settings["restores"] in (1, 2, 10):
            out.append((f"{_name(settings)} {settings['threshold']:g}", record))
    return out


def _ratios(workload: str, records: Sequence[Record]) -> plot.Panel:
    lines = []
    for name, record in _shown(workload, records):
        ratios = [save["weights raw"] / save["weights stored"] for save in record["saves"]]
        lines.append(plot.Line(name, [save["step"] for save in record["saves"]], ratios))
    return plot.Panel(f"{workload}: ratio of the weights, checkpoint by checkpoint", "step", "x", lines, log=True)


def _curves(workload: str, records: Sequence[Record]) -> plot.Panel:
    lines = []
    for record in bases(records).get(workload, {}).values():
        lines.append(plot.Line("uninterrupted", *zip(*record["curve"], strict=True)))
    lines += [plot.Line(name, *zip(*record["curve"], strict=True)) for name, record in _shown(workload, records)]
    return plot.Panel(f"{workload}: quality on the search's held-out part", "step", "quality", lines)


def write(records: Sequence[Record], path: Path) -> None:
    """Print the tables; write `path`.json, `path`.html and perhaps `path`.png."""
    if not records:
        print("nothing was run yet")
        return
    found, known = rows(records), bases(records)
    noises = {workload: noise(runs) for workload, runs in known.items()}
    print()
    for workload, one in noises.items():
        spread = f"deviation {_percent(one['deviation'])} %, {one['seeds']} seeds"
        print(f"{workload}, uninterrupted: {one['mean']:.4f}, {spread}")
    if found:
        print(f"\n{measured_table(found)}\n\n{paper_table()}\n")
    if ten := ten_restores(records):
        print(f"{ten}\n")
    print(
        "paper, ResNet-152 by restores:",
        ", ".join(f"{n}: {worse:+.2f} %" for n, worse in published_numbers.RESTORES.items()),
    )
    print(
        "paper, ResNet-152 by threshold:",
        ", ".join(f"{t}: {d:+.2f} %, {x}x" for t, (d, x) in published_numbers.THRESHOLDS.items()),
    )
    harmless = [row["bit-identical"] for row in found if row["restores"] == 0 or row["system"] == "lossless"]
    verdict = "no such run" if not harmless else "yes" if all(harmless) else "NO"
    print(f"saving alone, and lossless restores, left the training bit-identical: {verdict}\n")
    summary = {
        "noise": noises,
        "rows": found,
        "paper": published_numbers.RECOVERY,
    }
    path.with_suffix(".json").write_text(json.dumps(summary, indent=1))
    plot.write(panels(records, found), path, "Failure recovery")
