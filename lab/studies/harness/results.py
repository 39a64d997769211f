"""The small part of a result that documents quote, as JSON under benchmarks/results/, which is committed.

    python -m lab.studies.harness.results results/recovery.jsonl results/wire.jsonl results/codes.json

A ledger (NAME.jsonl) becomes one row a run: its settings, its quality, its sizes, and, where it was restored, by how
much the evaluation changed at each restore and how far it was from the uninterrupted run later, or the errors of its
messages. Curves and single saves are left out. A document (NAME.json) is taken as it is.
Each file says the commit, the machine and the dates of its runs, each row its processor. Runs of a file that is there
already stay, unless the same settings were run again on the same processor.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lab.studies.harness import REPO, RESULTS

COMMANDS = {
    "chaos": "python benchmarks/crash_points.py",
    "comparison": "python -m benchmarks.comparison.run",
    "fine_tunes": "python -m lab.studies.transfer.fine_tunes",
    "frameworks": "python -m benchmarks.frameworks.run",
    "gradient_moments": "python -m lab.studies.gradients.moments",
    "gradient_moments_scratch": "python -m lab.studies.gradients.moments",
    "kill": "python benchmarks/crash_recovery.py",
    "link_latency": "python -m lab.studies.link.latency",
    "link_moments": "python -m lab.studies.link.latency",
    "local_steps_ranks": "python -m lab.studies.gradients.local_steps",
    "lossless": "python -m benchmarks.lossless.run",
    "replicas": "python -m lab.studies.gradients.run",
    "scale": "python benchmarks/scale.py",
    "sharded_sync": "python -m lab.studies.weight_sync.run",
}
"""The command that writes a result, where it is not the study of its name up to an underscore or a hyphen."""
Record = Mapping[str, Any]
MAX_BYTES = 128 << 10
"""Of one committed file: it is read in a diff."""
COPIED = (
    *("quality", "ratio weights", "ratio full", "overhead", "on", "off", "bits", "bits of the last epoch", "start"),
    *("bins", "base", "target", "source", "source base"),
    *("bytes", "ratio", "rise", "rise error", "base loss", "tuned loss", "accuracy", "tuned accuracy"),
)
"""Keys of a ledger's record that a row takes as they are."""


def row(record: Mapping[str, Any], records: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The fields of one run of a ledger that documents may quote; `records` are all runs of that ledger."""
    out = {"settings": record["settings"], "date": record.get("at"), "code": record["version"]}
    if "machine" in record:
        out["cpu"] = record["machine"]["cpu"]
    out |= {key: rounded(record[key]) for key in COPIED if record.get(key) is not None}
    retentions = [save["retention"] for save in record.get("saves", ()) if save["retention"] is not None]
    if retentions:
        out["retention"] = {"least": rounded(min(retentions)), "median": rounded(median(retentions))}
    if record.get("links"):
        errors = {name: link["relative_error"] for name, link in record["links"].items()}
        out["relative error of messages"] = {name: rounded(error) for name, error in errors.items()}
    restores = record.get("restores", ())
    if restores:
        out["change of the evaluation at each restore, %"] = [rounded(change(restore), 4) for restore in restores]
    if record.get("saves"):
        out |= rounded(facts(record, uninterrupted(record, records)))
    return out


def uninterrupted(record: Record, records: Iterable[Record]) -> Record | None:
    """The last run of this workload, seed and processor that nothing was saved in."""
    found = None
    for other in records:
        same = all(other["settings"][key] == record["settings"][key] for key in ("workload", "seed", "quick"))
        if same and other["settings"]["system"] == "none" and other["machine"]["cpu"] == record["machine"]["cpu"]:
            found = other
    return found


def facts(record: Record, base: Record | None) -> dict[str, Any]:
    """What a table needs of one run with saves.

    Args:
        record: a line of the ledger of `run.py`.
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


def _behind(record: Record, base: Record) -> dict[str, float]:
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


def change(restore: Mapping[str, float]) -> float:
    """Change of the evaluation right after loading, in per cent of its value before."""
    return 100 * (restore["after"] - restore["before"]) / abs(restore["before"])


def rounded(value: Any, digits: int = 5) -> Any:
    """Rounds every number of a nest to so many digits: more than any document quotes."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    return [rounded(inner, digits) for inner in value] if isinstance(value, list | tuple) else value


def summary(source: Path, earlier: Mapping[str, Any], code: str) -> dict[str, Any]:
    """The committed form of one result of the commit `code`."""
    study = f"python -m lab.studies.{re.split('[-_]', source.stem)[0]}.run"
    head = {"command": COMMANDS.get(source.stem, study), "commit": code}
    if source.suffix == ".json":
        return {**head, "result": rounded(json.loads(source.read_text()))}
    records = [json.loads(line) for line in source.read_text().splitlines() if line]
    cpu = earlier.get("machine", {}).get("cpu")  # of rows that do not name theirs
    before = [{"cpu": cpu, **run} if cpu and "cpu" not in run else run for run in earlier.get("runs", ())]
    runs = [*before, *(row(record, records) for record in records)]
    rows = {(json.dumps(run["settings"], sort_keys=True), run.get("cpu")): run for run in runs}
    return {**head, "machine": records[-1]["machine"], "runs": list(rows.values())}


def commit() -> str:
    """The commit of the tree that this script is in."""
    answer = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=REPO, capture_output=True, text=True)
    return answer.stdout.strip()


def text(document: Mapping[str, Any]) -> str:
    """JSON with one run, or one top-level entry, a line, so that a diff shows what changed."""
    lines = []
    for key, value in document.items():
        if key == "runs":
            inner = ",\n".join("  " + json.dumps(run) for run in value)
        elif key == "result":
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
            continue
        ends = "[]" if key == "runs" else "{}"
        lines.append(f" {json.dumps(key)}: {ends[0]}\n{inner}\n {ends[1]}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--commit", help="that ran; default: of this tree")
    args = parser.parse_args()
    for source in args.sources:
        target = RESULTS / f"{source.stem}.json"
        earlier = json.loads(target.read_text()) if target.exists() else {}
        data = text(summary(source, earlier, args.commit or commit()))
        if len(data) > MAX_BYTES:
            sys.exit(f"{source}: {len(data)} bytes; a committed result has at most {MAX_BYTES}")
        target.parent.mkdir(exist_ok=True)
        target.write_text(data)
        print(f"{target.relative_to(REPO)}: {len(data)} bytes")


if __name__ == "__main__":
    main()
