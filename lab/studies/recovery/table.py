"""Tables of docs/scheme_studies.md out of the committed runs: ten restores of each scheme, and several thresholds.

    python -m lab.studies.recovery.table            # writes them between the marks of docs/scheme_studies.md
    python -m lab.studies.recovery.table --check    # says whether they are what the results give

`run.py` makes the runs, `harness/results.py` keeps what `facts` finds in each as results/recovery.json. A row is
one scheme on one workload; above zero is worse, whatever the workload's quality is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from lab.studies.harness import DOCS, RESULTS, document_tables

DOCUMENT = DOCS / "scheme_studies.md"
RESULT = RESULTS / "recovery.json"
WORKLOADS = {
    "gpt": "Text from scratch: a GPT of 1.84 M parameters, AdamW, 640 steps, 40 checkpoints",
    "resnet": "Images from scratch: ResNet-20 of 0.27 M parameters, SGD, 1248 steps, 32 checkpoints",
    "reader": "A fine-tuning: a pre-trained reader of 2.2 M parameters learns SST-2, AdamW, 700 steps, 28 checkpoints",
}
ORDER = ("lossless", "fisher", "inshrinkerator", "qd", "cnr", "gobo", "lc-checkpoint", "scar", "topn", "excp")
"""Of the schemes in a table."""
THRESHOLD = 0.01
"""Of what measures; others are in the second table."""
HEAD = (
    "| scheme | bits of a weight | state x | at once: mean, worst | next checkpoint | before the next restore "
    "| final | retention: least, median | save, restore s |\n|---|---|---|---|---|---|---|---|---|"
)
THRESHOLD_HEAD = (
    "| workload, scheme | threshold | restores | at once: worst | final | weights x | best x | whole state x "
    "| least retention |\n|---|---|---|---|---|---|---|---|---|"
)
SWEPT_SYSTEMS = ("inshrinkerator", "inshrinkerator, paper", "qd", "cnr")
SWEPT_WORKLOADS = ("gpt", "resnet")

Run = Mapping[str, Any]
Key = tuple[int, int, float, int]


def shown(document: Run) -> list[Run]:
    """The runs of the tables: ten restores, at the one threshold, on the processor of the last study."""
    cpu = document["machine"]["cpu"]
    return [run for run in document["runs"] if "deltas" in run and run["cpu"] == cpu and _plain(run["settings"])]


def _plain(settings: Mapping[str, Any]) -> bool:
    usual = (
        settings["restores"] == 10
        and settings["threshold"] in (0, THRESHOLD)
        and not settings["paper"]
        and settings["optimizer"] == "exact"
    )
    return usual and settings["workload"] in WORKLOADS


def tables(document: Run) -> str:
    """A table a workload, as they stand between the marks."""
    groups: dict[tuple[str, str, float], list[Run]] = {}
    for run in shown(document):
        settings = run["settings"]
        groups.setdefault((settings["workload"], settings["system"], settings["threshold"]), []).append(run)
    out = []
    for workload, title in WORKLOADS.items():
        keys = sorted((key for key in groups if key[0] == workload), key=lambda key: (_place(key[1]), key[1:]))
        lines = [row(groups[key]) for key in keys]
        if lines:
            out.append("\n".join((f"**{title}**{_noise(uninterrupted_ends(document, workload))}\n", HEAD, *lines)))
    return "\n\n".join(out)


def _place(system: str) -> int:
    return ORDER.index(system.partition("(")[0])


def uninterrupted_ends(document: Run, workload: str) -> list[float]:
    """The quality at the end of the uninterrupted run of each seed, on the processor of the last study."""
    cpu = document["machine"]["cpu"]
    return [
        run["quality"]
        for run in document["runs"]
        if run["settings"]["workload"] == workload and run["settings"]["system"] == "none" and run["cpu"] == cpu
    ]


def _noise(ends: Sequence[float]) -> str:
    if len(ends) < 2:
        return ""
    return f" (uninterrupted runs of {len(ends)} seeds differ by {deviation(ends):.1f}%)"


def deviation(values: Sequence[float]) -> float:
    """Standard deviation in per cent of the mean."""
    return 100 * stdev(values) / fmean(values)


def row(runs: Sequence[Run]) -> str:
    """A line of a table: one scheme on one workload, all seeds."""
    sign = -1 if runs[0]["higher is better"] else 1
    rises = [sign * change for run in runs for change in run["change of the evaluation at each restore, %"]]
    against = [run["against the uninterrupted run, %"] for run in runs]
    kept = [run["retention"] for run in runs if "retention" in run]
    retention = f"{min(one['least'] for one in kept):.2f}, {fmean(one['median'] for one in kept):.2f}" if kept else ""
    seeds = sorted(run["settings"]["seed"] for run in runs)
    some = "" if seeds == [0, 1, 2] else f" (seed {', '.join(map(str, seeds))})"
    ratio = mean(runs, "deltas", "ratio of the state")
    cells = [
        named(runs[0]["settings"]) + some,
        f"{mean(runs, 'deltas', 'bits of a weight'):.3g}",
        f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}",
        f"{signed(fmean(rises))}, {signed(max(rises))}",
        signed(fmean(one["next"] for one in against)),
        signed(fmean(one["last"] for one in against)),
        with_error([one["final"] for one in against]),
        retention,
        f"{mean(runs, 'seconds', 'save'):.2f}, {mean(runs, 'seconds', 'restore'):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def named(settings: Mapping[str, Any]) -> str:
    """A scheme as documents write it: `lc-checkpoint(bits=2)` of the harness is "lc-checkpoint, `bits=2`"."""
    name, _, arguments = document_tables.label(settings["system"]).partition("(")
    written = f"{name}, `{arguments[:-1]}`" if arguments else name
    return f"{written}, {100 * settings['threshold']:g}%" if settings["threshold"] else written


def mean(runs: Iterable[Run], part: str, key: str) -> float:
    return fmean(run[part][key] for run in runs)


def with_error(values: Sequence[float]) -> str:
    """The mean and, of several values, its standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return signed(fmean(values)) + error


def signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.2f}"


def thresholds(document: Run) -> str:
    """A line for each workload, system, threshold and number of restores: the means of its seeds."""
    cpu = document["machine"]["cpu"]
    groups: dict[Key, list[Run]] = {}
    for run in document["runs"]:
        if run["cpu"] == cpu and "deltas" in run and (key := _threshold_key(run["settings"])) is not None:
            groups.setdefault(key, []).append(run)
    return "\n".join((THRESHOLD_HEAD, *(_threshold_row(key, groups[key]) for key in sorted(groups))))


def _threshold_key(settings: Mapping[str, Any]) -> Key | None:
    """Where a run stands in the table; None if it is of another."""
    name = settings["system"] + (", paper" if settings["paper"] else "")
    if settings["workload"] not in SWEPT_WORKLOADS or name not in SWEPT_SYSTEMS or settings["optimizer"] != "exact":
        return None
    place = SWEPT_WORKLOADS.index(settings["workload"]), SWEPT_SYSTEMS.index(name)
    return *place, -settings["threshold"], settings["restores"]


def _threshold_row(key: Key, runs: Sequence[Run]) -> str:
    workload, system, threshold, restores = key
    sign = -1 if runs[0]["higher is better"] else 1
    rises = [sign * change for run in runs for change in run.get("change of the evaluation at each restore, %", ())]
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
    cells = [
        f"{SWEPT_WORKLOADS[workload]}, {SWEPT_SYSTEMS[system]}",
        f"{-100 * threshold:g}%",
        f"{restores}{seeds}",
        signed(max(rises)) if rises else "",
        with_error([run["against the uninterrupted run, %"]["final"] for run in runs]),
        f"{fmean(run['ratio weights'] for run in runs):.1f}",
        f"{mean(runs, 'deltas', 'best ratio of the weights'):.0f}",
        f"{fmean(run['ratio full'] for run in runs):.2f}",
        f"{min(run['retention']['least'] for run in runs):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    found = json.loads(RESULT.read_text())
    document_tables.main(__doc__, __file__, {DOCUMENT: {"restores": tables(found), "thresholds": thresholds(found)}})
