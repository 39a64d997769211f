"""What a failure costs: the tables of docs/scheme_studies.md out of the result that is committed.

    python -m lab.studies.rework.table            # writes them between the two marks of docs/scheme_studies.md
    python -m lab.studies.rework.table --check    # says whether they are what the result gives

`run.py` makes the courses, `harness/results.py` keeps what its report finds as results/rework.json. A course is a
model, a data set and an optimizer, with as many seeds as were run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from lab.studies.harness import DOCS, RESULTS, document_tables
from lab.studies.rework import trainings

DOCUMENT = DOCS / "scheme_studies.md"
RESULT = RESULTS / "rework.json"
SYSTEMS = {
    "lossless": "lossless",
    **{f"lc x={x}": f"lc-checkpoint, {x} bit{'s' * (x > 1)}" for x in (1, 2, 3, 4)},
    **{f"lc paper x={x}": f"lc-checkpoint, {x} bit{'s' * (x > 1)}, `paper=True`" for x in (1, 2, 3, 4)},
    "scar largest": "scar, largest (= topn)",
    "scar round robin": "scar, round robin",
    "scar random": "scar, random",
}
"""Their names in documents."""
RIVAL = "scar largest"
MODELS = {"mlr": "MLR", "lenet": "LeNet-5", "alexnet": "AlexNet-like", "mf": "MF, made here"}
MODELS |= {trainings.MOVIELENS: "MF, MovieLens"}
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam"}
ARMS = {
    "partial": "only the lost values, from the same checkpoints",
    "scar": "from scar with 1/8 every 12 iterations",
    "lc": "from lc-checkpoint with 3 bits every 12",
}
LOST = {"0.25": "1/4 lost", "0.5": "1/2 lost", "0.75": "3/4 lost", "1.0": "all lost"}

Row = Mapping[str, Any]


def tables(result: Row) -> str:
    """All tables, as they stand between the marks."""
    return "\n\n".join((schemes(result), models(result), partial(result), bound(result)))


def schemes(result: Row) -> str:
    """A line a scheme: ratios, rework, what is beyond a lossless checkpoint's, and SCAR's rework beside it."""
    num_failures = sum(row["failures"] for row in result["rows"] if row["system"] == "lossless")
    head = ["scheme", "ratio of what is quantized", "of all weights", "rework", "extra", f"given up of {num_failures}"]
    lines = []
    for system, name in SYSTEMS.items():
        rows = _of(result, system)
        extra = [row["extra"][0] for row in rows]
        times = [one["speed-up"] for one in result["speed-ups"] if one["system"] == system and one["speed-up"]]
        pooled = _mean(_of(result, RIVAL), "rework") / _mean(rows, "rework")
        lines.append(
            [
                name,
                _range(row["ratio of the quantized"] for row in rows),
                _range(row["ratio"] for row in rows),
                f"{_mean(rows, 'rework'):.1f}",
                "0" if system == "lossless" else f"{fmean(extra):+.1f} ± {stdev(extra) / len(extra) ** 0.5:.1f}",
                str(sum(row["given up"] for row in rows)),
                f"{pooled:.1f}" if "scar" not in system else "1" if system == RIVAL else "",
                _range(times) if times else "",
            ]
        )
    return _table([*head, "SCAR's rework / its", "by course"], lines)


def models(result: Row) -> str:
    """A line a model and optimizer, data sets together: rework by scheme, and the undisturbed run's own wait."""
    shown = ("lossless", *(f"lc x={x}" for x in (1, 2, 3, 4)), RIVAL)
    head = ["model, optimizer", "noise", "rework: lossless", "1 bit", "2 bits", "3 bits", "4 bits", "scar"]
    lines = []
    for name, belongs in _kinds():
        waits = [one["wait"] or 0.0 for one in result["courses"] if belongs(one["course"])]
        means = {system: _mean(_of(result, system, belongs), "rework") for system in shown}
        ratio = means[RIVAL] / means["lc x=3"]
        lines.append([name, f"{fmean(waits):.1f}", *(f"{mean:.1f}" for mean in means.values()), f"{ratio:.1f}"])
    return _table([*head, "scar / lc, 3 bits"], lines)


def partial(result: Row) -> str:
    """Rework saved where a part is lost, in per cent of restoring everything from checkpoints far apart."""
    lines = []
    for arm, name in ARMS.items():
        cells = []
        for lost in LOST:
            saved = [100 * row[arm][lost]["saving"] for row in result["partial"]]
            cells.append("0" if max(map(abs, saved)) < 0.5 else f"{fmean(saved):.0f} ({_range(saved)})")
        sizes = [one for label, one in _sizes(result).items() if label.startswith(arm)]
        lines.append([name, *cells, _range(sizes[0], 2) if sizes else "1"])
    return _table(["rework saved, %", *LOST.values(), "bytes of a full checkpoint"], lines)


def _sizes(result: Row) -> dict[str, list[float]]:
    labels = result["partial"][0]["bytes"]
    return {label: [row["bytes"][label] for row in result["partial"]] for label in labels}


def bound(result: Row) -> str:
    """What failures cost beside SCAR's bound, the undisturbed run's own wait taken off."""
    shown = {"lossless": "lossless", "lc x=3": "lc-checkpoint, 3 bits", "lc x=2": "2 bits", RIVAL: "scar, largest"}
    waits = {one["course"]: one["wait"] or 0.0 for one in result["courses"]}
    lines = []
    for model, name in MODELS.items():
        cells = []
        for system in shown:
            rows = _of(result, system, lambda course, model=model: _is_of(course, model))
            cost = fmean(row["rework"][0] - waits[row["course"]] for row in rows)
            known = [row["bound"] for row in rows if row["bound"] is not None]
            cells.append(f"{cost:.1f}, {fmean(known):.1f}")
        lines.append([name, *cells])
    num_failures = sum(row["failures"] for row in _of(result, "lossless"))
    within = [str(sum(row["within the bound"] for row in _of(result, system))) for system in shown]
    lines.append([f"failures of {num_failures} within it", *within])
    return _table(["iterations: cost, bound", *shown.values()], lines)


def _kinds() -> list[tuple[str, Callable[[str], bool]]]:
    """Models with each optimizer, and whether a course is one of them."""
    return [
        (f"{name}, {title}", lambda course, model=model, kind=kind: _is_of(course, model) and course.endswith(kind))
        for model, name in MODELS.items()
        for kind, title in OPTIMIZERS.items()
    ]


def _is_of(course: str, model: str) -> bool:
    workload = course.rpartition(", ")[0]
    return workload == model or (model != "mf" and workload.startswith(f"{model} "))


def _of(result: Row, system: str, belongs: Callable[[str], bool] = lambda _: True) -> list[Row]:
    return [row for row in result["rows"] if row["system"] == system and belongs(row["course"])]


def _mean(rows: Iterable[Row], key: str) -> float:
    return fmean(row[key][0] for row in rows)


def _range(values: Iterable[float], digits: int | None = None) -> str:
    """The least and the largest, with as many digits as they need."""
    ends = [min(known := list(values)), max(known)]
    texts = [f"{end:.{digits if digits is not None else 0 if abs(end) >= 9.95 else 1}f}" for end in ends]
    return " to ".join(texts)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *(f"| {' | '.join(x)} |" for x in lines)]
    )


if __name__ == "__main__":
    result = json.loads(RESULT.read_text())["result"]
    document_tables.main(__doc__, __file__, {DOCUMENT: tables(result)})
