"""Restores with fisher, seed by seed, and files alone: tables of docs/fisher_studies.md.

    python -m lab.studies.fisher.table            # writes them between the marks of docs/fisher_studies.md
    python -m lab.studies.fisher.table --check    # says whether they are what the results give

Ten restores in a run are the committed runs of `recovery/run.py` (results/recovery.json), on the processor of the
last study; the others those of `run.py`, which `merge.py` has merged (results/fisher-restores.json).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lab.studies.fisher import merge
from lab.studies.harness import DOCS, document_tables
from lab.studies.recovery.table import RESULT, deviation, signed, uninterrupted_ends

DOCUMENT = DOCS / "fisher_studies.md"
WORKLOADS = {
    "gpt": "GPT, beta2 0.95",
    "gpt .999": "GPT, beta2 0.999",
    "resnet": "ResNet-20, SGD",
    "resnet adamw": "ResNet-20, AdamW",
    "reader": "reader, fine-tuned, beta2 0.999",
}
"""Names in the table, in its order."""
HEAD = (
    "| workload | target | seeds | final quality, worse by % | weights x | whole state x | least retention |\n"
    "|---|---|---|---|---|---|---|"
)

ALONE_HEAD = "| one checkpoint alone | weights x | rise, nats |\n|---|---|---|"
RESTORED_HEAD = (
    "| what is changed | W bits | m bits | v bits | whole state, delta | retention | test loss above the uninterrupted "
    "run |\n|---|---|---|---|---|---|---|"
)
ROLES = ("parameter", "moment1", "moment2")

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
    error = document_tables.label(system.partition("relative_error=")[2].rstrip(")"))
    cells = [
        title,
        f"a budget of {-100 * threshold:g}%" if threshold else f"error {error}",
        ", ".join(str(run["settings"]["seed"]) for run in runs),
        ", ".join(signed(run["against the uninterrupted run, %"]["final"]) for run in runs) + noise[workload],
        ", ".join(f"{run['ratio weights']:.3g}" for run in runs),
        ", ".join(f"{run['ratio full']:.3g}" for run in runs),
        f"{min(run['retention']['least'] for run in runs):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _noise(ends: Sequence[float]) -> str:
    return f" (seeds differ by {deviation(ends):.1f})" if len(ends) > 1 else ""


def by_variant(runs: Sequence[Run], study: str) -> dict[str, list[Run]]:
    """The rows of a study by variant, each by seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run["settings"]["study"] == study:
            found.setdefault(run["settings"]["variant"], []).append(run)
    return found


def alone(runs: Sequence[Run]) -> str:
    """A line for each way to write one checkpoint, with the rise of each seed."""
    lines = []
    for variant, some in by_variant(runs, "alone").items():
        rises = ", ".join(f"{run['rise']:+.4f}" for run in some)
        lines.append(f"| {document_tables.label(variant)} | {fmean(run['weights x'] for run in some):.1f} | {rises} |")
    return "\n".join((ALONE_HEAD, *lines))


def restored(runs: Sequence[Run], study: str) -> str:
    """A line for each variant that was restored after every save, with the end of each seed."""
    variants = by_variant(runs, study)
    ends = {
        where: ", ".join(f"{run['quality']:.4f}" for run in variants[where]) for where in ("middle", "uninterrupted")
    }
    first = f"| never restored: {ends['uninterrupted']}, from {ends['middle']} | | | | | | 0 |"
    lines = [_restored_row(variant, some) for variant, some in variants.items() if variant not in ends]
    return "\n".join((RESTORED_HEAD, first, *lines))


def _restored_row(variant: str, runs: Sequence[Run]) -> str:
    bits = [[run["bits"][role] for run in runs if role in run["bits"]] for role in ROLES]
    cells = [
        document_tables.label(variant),
        *(f"{fmean(some):.3f}" if some else "-" for some in bits),
        f"{fmean(run['state x'] for run in runs):.3g}x",
        f"{min(run['retention'][0] for run in runs):.2f} to {max(run['retention'][1] for run in runs):.2f}",
        ", ".join(f"{run['worse']:+.4f}" for run in runs),
    ]
    return f"| {' | '.join(cells)} |"


def parts() -> dict[str, str]:
    """All tables, by the part of their mark."""
    runs = json.loads(merge.RESTORES.read_text())["runs"]
    tables = {"": table(json.loads(RESULT.read_text())), "alone": alone(runs)}
    return tables | {study: restored(runs, study) for study in ("restores", "moments")}


if __name__ == "__main__":
    document_tables.main(__doc__, __file__, {DOCUMENT: parts()})
