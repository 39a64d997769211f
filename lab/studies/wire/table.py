"""The tables of docs/wire_studies.md, "The study", out of the results that are committed.

    python -m lab.studies.wire.table            # writes them between the two marks of docs/wire_studies.md
    python -m lab.studies.wire.table --check    # says whether they are what the results give

results/wire.json has the runs whose log was kept, results/wire-2026-11-21.json those of the first study as its tables
had them. Runs of one pair of operators on one processor are a row. Of two sets of runs on one processor the one with
more seeds is shown, and the later where they are as many; a row of an older processor stays until the newer one has
its seeds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.studies.harness import DOCS, RESULTS, document_tables
from lab.studies.wire import grid

DOCUMENT = DOCS / "wire_studies.md"
FILES = tuple(RESULTS / name for name in ("wire-2026-11-21.json", "wire.json"))
"""From the oldest on."""
TASKS = {"image": ("Image", "top-1, %", 1), "still": ("Image without crops and mirrors", "top-1, %", 1)}
TASKS |= {"wide": ("Image, half of ResNet-18's width", "top-1, %", 1), "text": ("Text", "nats a byte", 4)}
SECTIONS = {
    "range": "uncompressed; one range a tensor, as the paper",
    "groups": "ranges for 64 values, and others at about their bytes",
    "topk": "TopK",
    "feedback": "feedback",
}
HEAD = "| forward / backward | bits | on | off | run |\n|---|---|---|---|---|"

Run = Mapping[str, Any]
Key = tuple[str, str, str, float]
"""Task, forward, backward, and the share of steps before compression begins."""


def read(paths: Iterable[Path] = FILES) -> list[Run]:
    """All runs, each with the processor that it ran on."""
    return [run for path in paths if path.exists() for run in json.loads(path.read_text())["runs"]]


def key(run: Run) -> Key:
    settings = run["settings"]
    return settings["task"], settings["forward"], settings["backward"], settings.get("warmup", 0.0)


def section(pair: grid.Pair) -> str:
    """The key of `SECTIONS` of a pair of operators."""
    if any(re.match("aq|ef", spec) for spec in pair):
        return "feedback"
    if any(spec.startswith(("top", "same")) for spec in pair):
        return "topk"
    return "range" if all(re.fullmatch(r"(q\d)?", spec) for spec in pair) else "groups"


def batches(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of one key that are shown, one list a row, each by seed; runs are given from the oldest on."""
    sets: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        sets.setdefault((run["cpu"], run.get("code", "")), {})[run["settings"]["seed"]] = run
    by_cpu: dict[str, dict[int, Run]] = {}
    for (cpu, _), found in sets.items():
        if len(found) >= len(by_cpu.get(cpu, ())):
            by_cpu.pop(cpu, None)
            by_cpu[cpu] = found
    kept = list(by_cpu.values())
    shown = [one for at, one in enumerate(kept) if not any(one.keys() <= later.keys() for later in kept[at + 1 :])]
    return [[found[seed] for seed in sorted(found)] for found in shown]


def row(runs: Sequence[Run], digits: int) -> str:
    """A line of a table: the runs of a pair of operators, by seed."""
    settings = runs[0]["settings"]
    pair = settings["forward"], settings["backward"]
    name = _named(pair, settings.get("warmup", 0.0))
    bits = " / ".join(f"{runs[0]['bits'][way]:.2f}" for way in ("forward", "backward"))
    qualities = [", ".join(_quality(run.get(way), digits) for run in runs) for way in ("on", "off")]
    seeds = [run["settings"]["seed"] for run in runs]
    some = "" if seeds == list(range(len(seeds))) else f", seed {', '.join(map(str, seeds))}"
    return f"| {name} | {bits} | {' | '.join(qualities)} | {max(run['date'] for run in runs)[:10]}{some} |"


def _quality(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def tables(runs: Sequence[Run]) -> str:
    """All tables, as they stand between the marks."""
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    out = []
    for task, (title, unit, digits) in TASKS.items():
        for name, heading in SECTIONS.items():
            keys = sorted((one for one in groups if one[0] == task and _place(one) == name), key=_order)
            lines = [row(batch, digits) for one in keys for batch in batches(groups[one])]
            if lines:
                heading = title if task in grid.ONE_TABLE else f"{title}: {heading}"
                out.append("\n".join((f"**{heading}** ({unit})\n", HEAD, *lines)))
    return "\n\n".join((*out, missing(runs)))


def missing(runs: Sequence[Run]) -> str:
    """How much of the grid was run, and a line a task with the operators that were with no seed."""
    jobs = grid.grid(False)
    known = {(*_today(key(run)), run["settings"]["seed"]) for run in runs}
    made = sum((job.task, *job.pair, job.warmup, job.seed) in known for job in jobs)
    out = [f"Of the {len(jobs)} runs of the grid {made} are in these tables. With no seed were run:\n"]
    for task, (title, *_) in TASKS.items():
        absent = {(job.pair, job.warmup): None for job in jobs if job.task == task}
        for one in known:
            if one[0] == task:
                absent.pop(((one[1], one[2]), one[3]), None)
        if absent:
            out.append(f"* {title}: {'; '.join(_named(*at) for at in absent)}.")
    return "\n".join(out)


def _today(one: Key) -> Key:
    """A key in today's spelling: what `warmup=epoch` of AQ-SGD asked for is now what it does by itself."""
    return one[0], one[1].replace(", warmup=epoch", ""), one[2], one[3]


def _named(pair: grid.Pair, warmup: float) -> str:
    name = " / ".join(f"`{spec}`" if spec else "-" for spec in pair)
    return f"{name}, after {warmup:.0%} of the steps" if warmup else name


def _place(one: Key) -> str:
    return "range" if one[0] in grid.ONE_TABLE else section((one[1], one[2]))


def _order(one: Key) -> tuple[float, int, str]:
    """Where a row stands in its table: as in the grid, those with a warm-up last."""
    pairs = [pair for part in grid.parts_of(one[0]).values() for pair in part]
    pair = _today(one)[1:3]
    places = {known: place for place, known in reversed(list(enumerate([grid.PLAIN, *pairs])))}
    return one[3], places.get(pair, len(pairs) + 1), one[1]


if __name__ == "__main__":
    document_tables.main(__doc__, __file__, {DOCUMENT: tables(read())})
