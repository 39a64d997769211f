"""Restores after every save, and files alone: the runs of `fisher.py --only alone restores moments`, merged.

    python benchmarks/fisher.py --only alone restores --every 50 5 --seed 1 --out results/restores/1.json
    python benchmarks/fisher.py --only moments --every 20 --seed 1 --out results/restores/moments-1.json
    python benchmarks/fisher_restores.py results/restores/*.json

A row a variant and a seed in benchmarks/results/fisher-restores.json, where rows of other settings stay. Of a chain:
bits a value by role and the mean ratio of the whole state, of deltas; the least and the largest retention; the quality
at the end, and how much worse it is than without restores. Of a file alone: the ratio of the weights, and the rise.
`fisher_tables.py` writes the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from summarize import RESULTS, rounded, text

OUT = RESULTS / "fisher-restores.json"
Row = dict[str, Any]


def rows(document: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each variant of one run of `fisher.py`."""
    for study in ("alone", "restores", "moments"):
        found = document.get(study, {})
        for variant, result in found.items():
            head = {"workload": document["workload"], "seed": document["seed"], "study": study, "variant": variant}
            facts = _alone(result) if study == "alone" else _restored(result, found, document["higher_is_better"])
            yield {
                "settings": head,
                "date": document["date"],
                "commit": document["commit"],
                "cpu": document["machine"]["cpu"],
                **facts,
            }


def _alone(result: Sequence[float]) -> Row:
    return {"weights x": result[0], "rise": result[1]}


def _restored(result: Any, found: Mapping[str, Any], higher_is_better: bool) -> Row:
    if not isinstance(result, Mapping):  # in the middle, and at the end of the uninterrupted run
        return {"quality": result}
    deltas = [save for save in result["saves"] if not save["keyframe"]]
    kept = [save["retention"] for save in deltas if save["retention"] is not None]
    change = result["quality"] - found["uninterrupted"]
    return {
        "saves": len(result["saves"]),
        "bits": {role: statistics.mean(save["bits"][role] for save in deltas) for role in deltas[0]["bits"]},
        "state x": statistics.mean(save["ratio"] for save in deltas),
        "retention": [min(kept), max(kept)],
        "quality": result["quality"],
        "worse": -change if higher_is_better else change,
    }


def merged(earlier: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, the new ones in the place of those with the same settings; those of a study and a seed together."""
    found = {json.dumps(row["settings"], sort_keys=True): row for row in [*earlier, *new]}
    return sorted(found.values(), key=lambda row: (row["settings"]["study"], row["settings"]["seed"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    earlier = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    new = [rounded(row) for path in options.sources for row in rows(json.loads(path.read_text()))]
    document = {"command": "python benchmarks/fisher.py --only alone restores moments"}
    document |= {"merged by": "python benchmarks/fisher_restores.py", "runs": merged(earlier, new)}
    options.out.write_text(text(document))
    print(f"{len(new)} rows; written: {options.out}")


if __name__ == "__main__":
    main()
