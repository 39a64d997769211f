"""Ten restores in a run with fisher, seed by seed: a table of docs/fisher_studies.md.

    python benchmarks/fisher_tables.py            # writes it between the two marks of docs/fisher_studies.md
    python benchmarks/fisher_tables.py --check    # says whether it is what the results give

Of the committed runs of `lossy_recovery.py` (results/recovery.json), on the processor of the last study.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import document_tables
from restores_tables import RESULT, deviation, signed, uninterrupted_ends
from workloads import REPO

DOCUMENT = REPO / "docs" / "fisher_studies.md"
WORKLOADS = {
    "gpt": "GPT, beta2 .95",
    "gpt .999": "GPT, beta2 .999",
    "resnet": "ResNet-20, SGD",
    "resnet adamw": "ResNet-20, AdamW",
    "reader": "reader, fine-tuned, beta2 .999",
}
"""Names in the table, in its order."""
HEAD = (
    "| workload | target | seeds | final quality, worse by % | weights x | whole state x | least retention |\n"
    "|---|---|---|---|---|---|---|"
)

Run = Mapping[str, Any]
Key = tuple[int, float, str]


def table(document: Run) -> str:
    """A line for each training and target, with a figure of each seed."""
    cpu = document["machine"]["cpu"]
    groups: dict[Key, list[Run]] = {}
    for run in document["runs"]:
        settings = run["settings"]
        is_fisher = settings["system"].startswith("fisher") and settings["restores"] == 10
        if is_fisher and settings["workload"] in WORKLOADS and run["cpu"] == cpu:
            groups.setdefault(_key(settings), []).append(run)
    noise = {workload: _noise(uninterrupted_ends(document, workload)) for workload in WORKLOADS}
    return "\n".join((HEAD, *(_row(key, groups[key], noise) for key in sorted(groups))))


def _key(settings: Mapping[str, Any]) -> Key:
    return [*WORKLOADS].index(settings["workload"]), -settings["threshold"], settings["system"]


def _row(key: Key, runs: Sequence[Run], noise: Mapping[str, str]) -> str:
    place, threshold, system = key
    workload, title = [*WORKLOADS.items()][place]
    runs = sorted(runs, key=lambda run: run["settings"]["seed"])
    error = system.partition("relative_error=")[2].rstrip(")")
    cells = [
        title,
        f"a budget of {-100 * threshold:g} %" if threshold else f"error {error}",
        ", ".join(str(run["settings"]["seed"]) for run in runs),
        ", ".join(signed(run["against the uninterrupted run, %"]["final"]) for run in runs) + noise[workload],
        ", ".join(f"{run['ratio weights']:.3g}" for run in runs),
        ", ".join(f"{run['ratio full']:.3g}" for run in runs),
        f"{min(run['retention']['least'] for run in runs):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _noise(ends: Sequence[float]) -> str:
    return f" (seeds differ by {deviation(ends):.1f})" if len(ends) > 1 else ""


if __name__ == "__main__":
    document_tables.main(__doc__, "fisher_tables", {DOCUMENT: table(json.loads(RESULT.read_text()))})
