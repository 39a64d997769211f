"""What deltas of `Fisher` cost by training, seed and error: the runs of `fisher.py --only sizes`, merged.

    python benchmarks/fisher.py --only sizes --errors .34 --workload gpt --seed 1 --out results/sizes/gpt-1.json
    python benchmarks/fisher_sizes.py results/sizes/*.json

A row a chain, of its deltas, in benchmarks/results/fisher-sizes.json, where rows of other chains stay. "share" is the
least part of the movement that values followed, a constant of the code that ran. Rises are in per
cent of the loss before the save, or in points where the quality is an accuracy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lossless_report import table
from summarize import RESULTS, rounded, text

from shrinkpoint.schemes.fisher.rounding import MIN_RETAINED

ALLOWED_MEAN, ALLOWED_WORST = 0.1, 0.2
"""Per cent of the loss that a chain's deltas may raise it by in the mean, and at worst."""
EARLIER_SHARE = 0.8
"""Of rows without a share, all of which were written before it was .93."""
Row = dict[str, Any]


def rows(document: Mapping[str, Any], share: float) -> Iterator[Row]:
    """One row for each error of one run of `fisher.py`."""
    for variant, saves in document["sizes"].items():
        deltas = [save for save in saves if not save["keyframe"]]
        points = document["higher_is_better"]
        rises = [save["rise"] if points else 100 * save["rise"] / abs(save["quality"]) for save in saves]
        later = [rise for rise, save in zip(rises, saves, strict=True) if not save["keyframe"]]
        kept = [save["retention"] for save in deltas if save["retention"] is not None]
        bits = {role: statistics.mean(save["bits"][role] for save in deltas) for role in deltas[0]["bits"]}
        settings = {"workload": document["workload"], "seed": document["seed"], "variant": variant}
        yield {
            "settings": settings | {"interval": document["interval"], "share": document.get("share", share)},
            "date": document["date"],
            "commit": document["commit"],
            "machine": f"{document['machine']['cores']} cores of {document['machine']['cpu']}",
            "deltas": len(deltas),
            "keyframe bits": next((save["bits"]["parameter"] for save in saves if save["keyframe"]), None),
            "bits": bits,
            "weights x": 32 / bits["parameter"],
            "state x": 1 / statistics.mean(1 / save["ratio"] for save in deltas),
            "unit of rises": "points" if points else "% of the loss",
            "mean rise": statistics.mean(later),
            "worst rise": max(later),
            "rise of the keyframe": rises[0] if saves[0]["keyframe"] else None,
            "retention": [min(kept), max(kept)],
        }


def merged(earlier: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, the new ones in the place of those with the same settings, by workload, seed and error."""
    for row in earlier:
        row["settings"].setdefault("share", EARLIER_SHARE)
    found = {json.dumps(row["settings"], sort_keys=True): row for row in [*earlier, *new]}
    return sorted(found.values(), key=lambda row: [*map(str, row["settings"].values())])


def within(row: Row) -> bool:
    """Whether a chain's rises are those that are allowed, of a loss; points of accuracy are not compared."""
    return row["mean rise"] <= ALLOWED_MEAN and row["worst rise"] <= ALLOWED_WORST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--share", type=float, default=MIN_RETAINED, help="of files that do not say")
    parser.add_argument("--out", type=Path, default=RESULTS / "fisher-sizes.json")
    options = parser.parse_args()
    earlier = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    new = [rounded(row) for path in options.sources for row in rows(json.loads(path.read_text()), options.share)]
    found = merged(earlier, new)
    document = {"command": "python benchmarks/fisher.py --only sizes", "merged by": "python benchmarks/fisher_sizes.py"}
    options.out.write_text(text(document | {"runs": found}))
    lines = [
        [
            *(str(row["settings"][key]) for key in ("workload", "seed", "variant", "share")),
            f"{row['bits']['parameter']:.3f}",
            f"{row['weights x']:.0f}",
            f"{row['state x']:.0f}",
            f"{row['mean rise']:+.2f}",
            f"{row['worst rise']:+.2f}",
            row["unit of rises"],
            "yes" if within(row) else "no",
        ]
        for row in found
    ]
    head = ["workload", "seed", "", "share", "W bits", "weights x", "state x", "mean rise", "worst", "of", "allowed"]
    print(table(head, lines))
    print("written:", options.out)


if __name__ == "__main__":
    main()
