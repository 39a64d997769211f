"""Merge runs of `run.py` into the results that are committed.

    python -m lab.studies.fisher.run --only sizes --errors 0.34 --seed 1 --out results/fisher/sizes-1.json
    python -m lab.studies.fisher.run --only alone restores --every 50 5 --seed 1 --out results/fisher/restores-1.json
    python -m lab.studies.fisher.merge results/fisher/*.json

Chains by their error go to benchmarks/results/fisher-sizes.json, files alone and restores after every save to
fisher-restores.json; a row takes the place of one with its settings. Bits a value and ratios are means of deltas,
retention is the least and the largest. Rises of sizes are in per cent of the loss before the save, or in points where
the quality is an accuracy; "share" is the least part of the movement that values followed, a constant of the code that
ran. A restored run is "worse" by what its end lacks of the uninterrupted one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.studies.harness import RESULTS
from lab.studies.harness.results import rounded, text
from shrinkpoint.schemes.fisher.rounding import MIN_RETAINED

SIZES, RESTORES = RESULTS / "fisher-sizes.json", RESULTS / "fisher-restores.json"
EARLIER_SHARE = 0.8
"""Share of rows that name none: they were written before it was 0.93."""
Row = dict[str, Any]


def sizes(document: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each error of one run of `run.py`."""
    points = document["higher_is_better"]
    for variant, saves in document.get("sizes", {}).items():
        deltas = [save for save in saves if not save["keyframe"]]
        rises = [save["rise"] if points else 100 * save["rise"] / abs(save["quality"]) for save in saves]
        later = [rise for rise, save in zip(rises, saves, strict=True) if not save["keyframe"]]
        bits = _bits(deltas)
        settings = {"workload": document["workload"], "seed": document["seed"], "variant": variant}
        yield {
            "settings": settings | {"interval": document["interval"], "share": document.get("share", MIN_RETAINED)},
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
            "retention": _retention(deltas),
        }


def restores(document: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each variant of one run of `run.py` that is a file alone, or is restored after every save."""
    for study in ("alone", "restores", "moments"):
        found = document.get(study, {})
        for variant, result in found.items():
            head = {"workload": document["workload"], "seed": document["seed"], "study": study, "variant": variant}
            if study == "alone":
                facts = {"weights x": result[0], "rise": result[1]}
            else:
                facts = _restored(result, found, document["higher_is_better"])
            about = {"date": document["date"], "commit": document["commit"], "cpu": document["machine"]["cpu"]}
            yield {"settings": head, **about, **facts}


def _restored(result: Any, found: Mapping[str, Any], higher_is_better: bool) -> Row:
    if not isinstance(result, Mapping):  # in the middle, and at the end of the uninterrupted run
        return {"quality": result}
    deltas = [save for save in result["saves"] if not save["keyframe"]]
    change = result["quality"] - found["uninterrupted"]
    return {
        "saves": len(result["saves"]),
        "bits": _bits(deltas),
        "state x": statistics.mean(save["ratio"] for save in deltas),
        "retention": _retention(deltas),
        "quality": result["quality"],
        "worse": -change if higher_is_better else change,
    }


def _bits(deltas: Sequence[Row]) -> dict[str, float]:
    return {role: statistics.mean(save["bits"][role] for save in deltas) for role in deltas[0]["bits"]}


def _retention(deltas: Sequence[Row]) -> list[float]:
    kept = [save["retention"] for save in deltas if save["retention"] is not None]
    return [min(kept), max(kept)]


def merged(earlier: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows in the order of their settings, the new ones in the place of those with the same."""
    for row in earlier:
        if "study" not in row["settings"]:
            row["settings"].setdefault("share", EARLIER_SHARE)
    found = {json.dumps(row["settings"], sort_keys=True): row for row in [*earlier, *new]}
    return sorted(found.values(), key=_place)


def _place(row: Row) -> list[str]:
    settings = row["settings"]
    # variants of a study stay as they came: their order is that of the table
    return [settings["study"], str(settings["seed"])] if "study" in settings else [*map(str, settings.values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    options = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in options.sources]
    for path, rows in ((SIZES, sizes), (RESTORES, restores)):
        earlier = json.loads(path.read_text()) if path.exists() else {"runs": []}
        new = [rounded(row) for document in documents for row in rows(document)]
        path.write_text(text(earlier | {"runs": merged(earlier["runs"], new)}))
        print(f"{len(new)} rows; written: {path}")


if __name__ == "__main__":
    main()
