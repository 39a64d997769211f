"""Systems that measure, at several thresholds and numbers of restores: a table of docs/scheme_studies.md.

    python benchmarks/threshold_tables.py            # writes it between the two marks of docs/scheme_studies.md
    python benchmarks/threshold_tables.py --check    # says whether it is what the results give

Of the committed runs of `lossy_recovery.py` (results/recovery.json). Ten restores at 1 % of every scheme, with several
seeds, are in `restores_tables.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import document_tables
from restores_tables import DOCUMENT, RESULT, mean, signed, with_error

HEAD = (
    "| workload, scheme | threshold | restores | at once: worst | final | weights x | best x | whole state x "
    "| least retention |\n|---|---|---|---|---|---|---|---|---|"
)
SYSTEMS = ("inshrinkerator", "inshrinkerator, paper", "qd", "cnr")
WORKLOADS = ("gpt", "resnet")

Run = Mapping[str, Any]
Key = tuple[int, int, float, int]


def table(document: Run) -> str:
    """A line for each workload, system, threshold and number of restores: the means of its seeds."""
    cpu = document["machine"]["cpu"]
    groups: dict[Key, list[Run]] = {}
    for run in document["runs"]:
        if run["cpu"] == cpu and "deltas" in run and (key := _key(run["settings"])) is not None:
            groups.setdefault(key, []).append(run)
    return "\n".join((HEAD, *(_row(key, groups[key]) for key in sorted(groups))))


def _key(settings: Mapping[str, Any]) -> Key | None:
    """Where a run stands in the table; None if it is of another."""
    name = settings["system"] + (", paper" if settings["paper"] else "")
    if settings["workload"] not in WORKLOADS or name not in SYSTEMS or settings["optimizer"] != "exact":
        return None
    place = WORKLOADS.index(settings["workload"]), SYSTEMS.index(name)
    return *place, -settings["threshold"], settings["restores"]


def _row(key: Key, runs: Sequence[Run]) -> str:
    workload, system, threshold, restores = key
    sign = -1 if runs[0]["higher is better"] else 1
    rises = [sign * change for run in runs for change in run.get("change of the evaluation at each restore, %", ())]
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
    cells = [
        f"{WORKLOADS[workload]}, {SYSTEMS[system]}",
        f"{-100 * threshold:g} %",
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
    document_tables.main(__doc__, "threshold_tables", {DOCUMENT: table(json.loads(RESULT.read_text()))})
