"""Ten restores in a run, scheme by scheme: the tables of docs/scheme_studies.md out of the results that are committed.

    python benchmarks/restores_tables.py            # writes them between the two marks of docs/scheme_studies.md
    python benchmarks/restores_tables.py --check    # says whether they are what the results give

`lossy_recovery.py` makes the runs, `summarize.py` keeps what `facts` finds in each as results/recovery.json. A row is
one scheme on one workload; above zero is worse, whatever the workload's quality is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

import document_tables
from workloads import REPO

DOCUMENT = REPO / "docs" / "scheme_studies.md"
RESULT = REPO / "benchmarks" / "results" / "recovery.json"
WORKLOADS = {
    "gpt": "Text from scratch: a GPT of 1.84 M parameters, AdamW, 640 steps, 40 checkpoints",
    "resnet": "Images from scratch: ResNet-20 of .27 M parameters, SGD, 1248 steps, 32 checkpoints",
    "reader": "A fine-tuning: a pre-trained reader of 2.2 M parameters learns SST-2, AdamW, 700 steps, 28 checkpoints",
}
ORDER = ("lossless", "fisher", "inshrinkerator", "qd", "cnr", "gobo", "lc-checkpoint", "scar", "topn", "excp")
"""Of the schemes in a table."""
THRESHOLD = 0.01
"""Of what measures; others are in `threshold_tables.py`."""
HEAD = (
    "| scheme | bits of a weight | state x | at once: mean, worst | next checkpoint | before the next restore "
    "| final | retention: least, median | save, restore s |\n|---|---|---|---|---|---|---|---|---|"
)

Run = Mapping[str, Any]


def uninterrupted(record: Run, records: Iterable[Run]) -> Run | None:
    """The last run of this workload, seed and processor that nothing was saved in."""
    found = None
    for other in records:
        same = all(other["settings"][key] == record["settings"][key] for key in ("workload", "seed", "quick"))
        if same and other["settings"]["system"] == "none" and other["machine"]["cpu"] == record["machine"]["cpu"]:
            found = other
    return found


def facts(record: Run, base: Run | None) -> dict[str, Any]:
    """What a table needs of one run with saves.

    Args:
        record: a line of the ledger of `lossy_recovery.py`.
        base: the uninterrupted run of its seed on its processor.

    Returns:
        Bits of a weight, the largest ratio of the weights and the ratio of the whole state, of what is not a keyframe;
        median seconds of a save and of a restore; and the distance from `base` in per cent of it, above zero worse: of
        the evaluation at the first checkpoint after a restore and at the last before the next one (means), and of the
        quality at the end.
    """
    deltas = [save for save in record["saves"] if not save["keyframe"]]
    total = {key: sum(save[key] for save in deltas) for key in ("weights raw", "weights stored", "raw", "stored")}
    found: dict[str, Any] = {
        "higher is better": record["facts"]["higher_is_better"],
        "deltas": {
            "bits of a weight": 32 * total["weights stored"] / total["weights raw"],
            "best ratio of the weights": max(save["weights raw"] / save["weights stored"] for save in deltas),
            "ratio of the state": total["raw"] / total["stored"],
        },
        "seconds": {"save": median(save["seconds"] for save in deltas)},
    }
    if record["restores"]:
        found["seconds"]["restore"] = median(restore["seconds"] for restore in record["restores"])
    if base is not None:
        found["against the uninterrupted run, %"] = _behind(record, base)
    return found


def _behind(record: Run, base: Run) -> dict[str, float]:
    sign = -1 if record["facts"]["higher_is_better"] else 1
    final = {"final": 100 * sign * (record["quality"] - base["quality"]) / abs(base["quality"])}
    if not record["restores"]:
        return final
    mine, other = dict(record["curve"]), dict(base["curve"])
    points = [restore["step"] for restore in record["restores"]]
    steps = sorted(mine)
    first, last = [], []
    for point, end in zip(points, [*points[1:], steps[-1]], strict=True):
        after = [step for step in steps if point < step <= end]
        first.append(after[0])
        last.append(after[-1])
    away = {step: 100 * sign * (mine[step] - other[step]) / abs(other[step]) for step in {*first, *last}}
    return {"next": fmean(away[step] for step in first), "last": fmean(away[step] for step in last), **final}


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
    return f" (uninterrupted runs of {len(ends)} seeds differ by {deviation(ends):.1f} %)"


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
    name, _, arguments = settings["system"].partition("(")
    written = f"{name}, `{arguments[:-1]}`" if arguments else name
    return f"{written}, {100 * settings['threshold']:g} %" if settings["threshold"] else written


def mean(runs: Iterable[Run], part: str, key: str) -> float:
    return fmean(run[part][key] for run in runs)


def with_error(values: Sequence[float]) -> str:
    """The mean and, of several values, its standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return signed(fmean(values)) + error


def signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.2f}"


if __name__ == "__main__":
    document_tables.main(__doc__, "restores_tables", {DOCUMENT: tables(json.loads(RESULT.read_text()))})
