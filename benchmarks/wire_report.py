"""Tables, verdicts, JSON and a plot out of the runs of `wire.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import plot
import wire_findings
from lossless_report import table
from wire_findings import Row, Study
from wire_grid import ONE_TABLE, PLAIN, Pair, parts_of, shown

TITLES = {
    "bits": "uniform bits, one range a tensor (forward / backward)",
    "topk": "TopK, own places in both directions",
    "one way": "TopK in one direction",
    "same": "TopK, the gradient at the activation's places",
    "feedback": "error feedback",
    "aq": "AQ-SGD (first visits exact), gradients without",
    "groups": "one range for each 64 values",
    "equal": "the same operator in both directions, other operators",
    "reach": "8 times fewer bytes forward, 4 backward",
    "still": "without crops and mirrors",
    "wide": "half of ResNet-18's width",
}
HEAD = ["forward / backward", "seeds", "on", "off", "bits fw", "bits bw", "ratio fw", "ratio bw", "error fw", "CPU s"]


def _several(values: Sequence[float | None], digits: int) -> str:
    if any(value is None for value in values):
        return "diverged"
    return " ".join(f"{value:.{digits}f}" for value in values)


def _cells(row: Row, study: Study) -> list[str]:
    digits = 1 if study.higher else 4
    sizes = [f"{row.bits[way]:.2f}" for way in ("forward", "backward")]
    ratios = [f"{32 / row.bits[way]:.1f}" for way in ("forward", "backward")]
    error = "-" if row.error is None else f"{row.error:.3f}"
    name = f"{row.name}{'  LOST' if study.lost(row) else ''}"
    return [
        name,
        str(len(row.on)),
        _several(row.on, digits),
        _several(row.off, digits),
        *sizes,
        *ratios,
        error,
        f"{row.seconds:.0f}",
    ]


def part_table(study: Study, pairs: Sequence[Pair]) -> str | None:
    """The rows of a part of the grid that were run; None: none was."""
    found = [study.rows[pair] for pair in pairs if pair in study.rows]
    return table(HEAD, [_cells(row, study) for row in found]) if found else None


def equal_table(study: Study) -> str | None:
    """All that compresses both directions, by size: in each class of bytes the best first."""
    lines = []
    for name, rows in study.classes().items():
        for place, row in enumerate(rows):
            best = "best" if place == 0 else "as good" if not study.worse(row, rows[0]) else ""
            lines.append([f"{name}: {shown(row.pair)}", *_cells(row, study)[1:6], f"{study.away(row):+.4f}", best])
    head = ["bits a value: forward / backward", *HEAD[1:6], "on - uncompressed", ""]
    return table(head, lines) if lines else None


def panels(studies: Mapping[str, Study]) -> list[plot.Panel]:
    out = []
    for name, study in studies.items():
        if name in ONE_TABLE:
            continue
        families: dict[str, list[Row]] = {}
        for row in study.rows.values():
            if all(row.pair) and not study.lost(row):
                families.setdefault(wire_findings.family(row.pair), []).append(row)
        lines = [
            plot.Line(family, [row.size for row in rows], [row.mean("on") for row in rows], "markers")
            for family, rows in families.items()
        ]
        base = study.rows.get(PLAIN)
        band = (base.mean("on") - study.noise, base.mean("on") + study.noise) if base else None
        title = f"{name}, compression on (grey: uncompressed)"
        out.append(plot.Panel(title, "bits a value, mean of both directions", study.quality, lines, band, log_x=True))
    return out


def _print(study: Study) -> None:
    base = study.rows.get(PLAIN)
    known = f"{base.mean('on'):.4f} uncompressed, deviation {study.noise:.4f}" if base else "uncompressed not run yet"
    print(f"\n== {study.task}: {study.quality}; {known}; before the training {study.start:.4f}")
    for part, pairs in parts_of(study.task).items():
        lines = part_table(study, pairs)
        if lines:
            print(f"\n{study.task}, {TITLES[part]}\n{lines}")
    if study.warm:
        lines = table(HEAD, [_cells(row, study) for row in study.warm.values()])
        print(f"\n{study.task}, compression that begins after a warm-up\n{lines}")
    if study.task not in ONE_TABLE and (lines := equal_table(study)):
        print(f"\n{study.task}, at equal bytes\n{lines}")


def write(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Print the tables; write `path`.json, `path`.html and perhaps `path`.png."""
    if not records:
        print("nothing was run yet")
        return
    studies = wire_findings.studies(records)
    for study in studies.values():
        _print(study)
    print("\n== findings of arXiv 2401.07788, and ours; a difference counts from two standard errors on")
    found = wire_findings.findings(studies)
    for one in found:
        print(f"\n[{one['task']}] {one['claim']}\n  = {one['verdict']}")
        for line in one["because"]:
            print(f"    {line}")
    busy, wall = (median(record[f"train {kind}seconds"] for record in records) for kind in ("CPU ", ""))
    print(f"\nmedian {busy:.0f} CPU s for the training of a run, {wall:.0f} s by the clock; rough: the core was shared")
    rows = [{"task": study.task, **row.as_dict()} for study in studies.values() for row in study.all_rows()]
    path.with_suffix(".json").write_text(json.dumps({"rows": rows, "findings": found}, indent=1))
    plot.write(panels(studies), path, "The wire: quality and bytes")
