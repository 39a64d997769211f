"""Many ranks, predicted and checked: what `dcp.save` through `Writer` costs at 8 B, 70 B and 1 T parameters.

    python benchmarks/scale_out.py                # half an hour on 2 idle cores, 10 GB of memory
    python benchmarks/scale_out.py --add          # what the result has measured of a model is not measured again
    python benchmarks/scale_out.py --ranks 1 2 --repeats 1 --coordinated 4 8 16 --largest 64

Constants come from saves and loads of three GPTs with AdamW on 1, 2, 4 and 8 real ranks (`scale_out_run.py`): one that
is mostly an embedding, one of many small tensors, one of few large ones; and from the code of the coordinator on plans
that are made up (`scale_out_plans.py`). The model (`scale_out_model.py`) then says what two GPTs between these cost on
so many ranks, and the coordinator of four times as many. Every run is made three times, in rounds, and its figures are
medians. Every figure is printed beside the measured one. Last comes the table for the three sizes. Its bandwidths are
stated, not measured; its bytes are those of simulated training states, ten steps apart.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scale_out_model import (
    Cluster,
    Linear,
    Operation,
    Row,
    calibrate,
    compare,
    coordinator_seconds,
    forecast,
    measured,
    median,
    predict,
)
from scale_out_plans import MODELS, Job, coordinate, look_at_directory, numel
from scale_out_run import run_ranks
from scale_states import GPTShapes, training_states

CALIBRATED, CHECKED = ("12M", "17M", "55M"), ("30M", "24M")
GPTS = {
    "tiny": GPTShapes(2, 64, vocabulary=1000),  # for tests, as is the next
    "tiny deep": GPTShapes(3, 32, vocabulary=500),
    "12M": GPTShapes(4, 256, vocabulary=32000),
    "17M": GPTShapes(16, 288, vocabulary=4000),
    "55M": GPTShapes(3, 1024, vocabulary=16000),
    "30M": GPTShapes(6, 384),
    "24M": GPTShapes(8, 448, vocabulary=10000),
}
DEPTHS = {"lossless": 5, "fisher": 19}
"""Bases of a chain's last delta: a lossless chain ends where its files have four times the bytes of the state."""
LIMIT = 0.2
TORCH_PARTS = ("unpickle plans", "torch's global plan", "pickle plans", "pickle metadata")
OUR_PARTS = ("our global plan", "unpickle results", "finish")


def make_states(folder: Path, model: str, steps: int) -> Path:
    """Three states of a model as files; those that are there are kept."""
    exists = (folder / "2.safetensors").exists()
    for number, state in enumerate(() if exists else training_states(GPTS[model], 3, steps)):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / f"{number}.safetensors")
    return folder


def figures_of(model: str, run: Sequence[Row]) -> Iterator[Row]:
    """A row for each operation of a run: its figures, and what it is of."""
    for operation in [row["operation"] for row in run[0]["rows"]]:
        yield {"model": model, "ranks": len(run), "operation": operation, **measured(run, operation)}


def constants_of(calibrated: Sequence[str], rows: Sequence[Row], cores: int, *, alone: bool) -> dict[str, Operation]:
    """Of each operation: of one rank, which goes its own ways, or of more."""
    rows = [row for row in rows if row["model"] in calibrated and (row["ranks"] == 1) == alone]
    names = dict.fromkeys(row["operation"] for row in rows)
    shaped = [(tuple(GPTS[row["model"]].shapes()), row["ranks"], row) for row in rows]
    return {name: calibrate([one for one in shaped if one[2]["operation"] == name], name, cores) for name in names}


def checks(calibrated: Sequence[str], rows: Sequence[Row], cores: int) -> Iterator[Row]:
    """Every figure of every run of the other models, predicted and measured."""
    constants = {alone: constants_of(calibrated, rows, cores, alone=alone) for alone in (True, False)}
    for row in (row for row in rows if row["model"] not in calibrated):
        model, ranks, name = (row[key] for key in ("model", "ranks", "operation"))
        figures = predict(constants[ranks == 1][name], name, tuple(GPTS[model].shapes()), ranks, cores)
        about = {"model": model, "ranks": ranks, "operation": name}
        yield from ({**about, **figure} for figure in compare(figures, row))


def coordinator_constants(rows: Sequence[Row]) -> dict[str, Linear]:
    """Of seconds for an entry, and of bytes, from all runs but that of the most ranks."""
    rows = sorted(rows, key=lambda row: row["ranks"])[:-1]
    entries = [row["ranks"] * row["items"] for row in rows]
    seconds = {
        name: Linear.fit(
            [((1.0, math.log2(n)), part_seconds(row, parts) / n) for n, row in zip(entries, rows, strict=True)]
        )
        for name, parts in (("torch", TORCH_PARTS), ("ours", OUR_PARTS))
    }
    memory = Linear.fit([((n, 1.0), most_resident(row)) for n, row in zip(entries, rows, strict=True)])
    return {**seconds, "memory": memory}


def part_seconds(row: Row, parts: Sequence[str]) -> float:
    """Seconds of these parts of the coordinator."""
    return sum(row["seconds"][part] for part in parts)


def most_resident(row: Row) -> int:
    """Bytes that the coordinator has after one of its parts, at most; what earlier runs left may be freed in one."""
    return max(accumulate(row["resident"].values()))


def check_coordinator(rows: Sequence[Row]) -> Iterator[Row]:
    """The coordinator of the most ranks, predicted from the others."""
    constants, row = coordinator_constants(rows), max(rows, key=lambda row: row["ranks"])
    entries = row["ranks"] * row["items"]
    truth = {
        "torch": part_seconds(row, TORCH_PARTS),
        "ours": part_seconds(row, OUR_PARTS),
        "memory": most_resident(row),
    }
    figures = {name: coordinator_seconds(constants[name], entries) for name in ("torch", "ours")}
    figures["memory"] = constants["memory"].at(entries, 1.0)
    for figure in compare(figures, truth):
        yield {"model": "8 B", "ranks": row["ranks"], "operation": "coordinator", **figure}


def table(
    constants: dict[str, Operation], coordinator: dict[str, Linear], ranks: Sequence[int], cluster: Cluster
) -> Iterator[Row]:
    """The rows of all sizes."""
    for model, shapes in MODELS.items():
        for count in ranks:
            for name in ("lossless, keyframe", "lossless, delta, warm", "fisher, keyframe", "fisher, delta, warm"):
                depth = DEPTHS[name.partition(",")[0]] if "delta" in name else 0
                row = forecast(constants[name], name, tuple(shapes), count, coordinator, cluster, depth)
                yield {"model": model, **row}


def report(document: dict[str, Any]) -> Iterator[str]:
    """The errors by figure, then the table."""
    rows = document["checks"]
    yield f"{'figure':42}{'checked':>8}{'within 20 %':>12}{'worst':>8}  where"
    for figure in dict.fromkeys(row["figure"] for row in rows):
        of_figure = [row for row in rows if row["figure"] == figure]
        worst = max(of_figure, key=lambda row: abs(row["error"]))
        within = sum(abs(row["error"]) <= LIMIT for row in of_figure)
        where = f"{worst['model']}, {worst['ranks']} ranks, {worst['operation']}"
        yield f"{figure:42}{len(of_figure):8}{within:12}{worst['error']:+8.0%}  {where}"
    for row in document["table"]:
        parts = (f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, int | float))
        yield f"{row['model']}, {row['operation']}: " + "; ".join(parts)


def measure_runs(arguments: argparse.Namespace, folder: Path, known: Sequence[Row]) -> list[Row]:
    """The figures of each run. All runs are made once in each round, so that a slow minute meets each of them once."""
    there = {(row["model"], row["ranks"]) for row in known}
    models = dict.fromkeys((*arguments.calibrated, *arguments.checked))
    missing = [(model, ranks) for model in models for ranks in arguments.ranks if (model, ranks) not in there]
    place = arguments.states or folder
    states = {model: make_states(place / model, model, arguments.steps) for model, _ in missing}
    rounds: dict[tuple[str, int], list[list[Row]]] = {one: [] for one in missing}
    for number in range(arguments.repeats):
        for (model, ranks), found in rounds.items():
            print(f"round {number + 1}: {model} on {ranks} ranks", file=sys.stderr, flush=True)
            found.append(run_ranks(ranks, states[model], folder / "run"))
            shutil.rmtree(folder / "run")
    new = [row for (model, _), found in rounds.items() for row in figures_of(model, median(found))]
    return [row for row in known if row["model"] in models] + new


def measure_coordinator(ranks: int, place: Path, *, repeats: int, collect: bool = True) -> Row:
    """The coordinator of so many ranks, each time in a process of its own, as memory is used again within one."""
    print(f"the coordinator of {ranks} ranks", file=sys.stderr, flush=True)
    rows, job = [], Job(MODELS["8 B"], ranks)
    for _ in range(repeats):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            rows.append(pool.submit(coordinate, job, place, collect=collect).result())
        shutil.rmtree(place)
    return dict(median(rows))


def measure(arguments: argparse.Namespace, folder: Path, known: Sequence[Row]) -> dict[str, Any]:
    """All runs, and all simulated coordinators."""
    figures = measure_runs(arguments, folder, known)
    place = arguments.memory / f"shrinkpoint-{os.getpid()}"
    of_coordinator = partial(measure_coordinator, place=place, repeats=arguments.repeats)
    coordinators = [of_coordinator(ranks) for ranks in arguments.coordinated]
    uncollected = of_coordinator(sorted(arguments.coordinated)[-2], collect=False)
    print(f"a directory of {arguments.largest} ranks", file=sys.stderr, flush=True)
    directory = look_at_directory(Job(MODELS["8 B"], arguments.largest), place)
    shutil.rmtree(place)
    return {"figures": figures, "coordinators": coordinators, "uncollected": uncollected, "directory": directory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrated", nargs="+", choices=GPTS, default=CALIBRATED, help="constants are from these")
    parser.add_argument("--checked", nargs="*", choices=GPTS, default=CHECKED, help="and are checked on these")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="of real runs")
    parser.add_argument("--repeats", type=int, default=3, help="of each run, whose medians count")
    parser.add_argument("--add", action="store_true", help="take from --out what it has measured")
    parser.add_argument("--coordinated", type=int, nargs="+", default=[24, 96, 384], help="ranks with made-up plans")
    parser.add_argument("--largest", type=int, default=4096, help="ranks of the directory that one rank looks at")
    parser.add_argument("--table", type=int, nargs="+", default=[8, 64, 512, 4096], help="ranks of the table")
    parser.add_argument("--steps", type=int, default=10, help="simulated training steps between saves")
    parser.add_argument("--states", type=Path, help="where states are made, and kept; a temporary folder if left out")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="for small files of many ranks")
    parser.add_argument("--folder", type=Path, help="for checkpoints, on the disk that is measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scale_out.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(arguments.out.read_text())["measured"] if arguments.add else []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(arguments, Path(folder), known)
    figures, cluster, cores = results["figures"], Cluster(), len(os.sched_getaffinity(0))
    alone, constants = (constants_of(arguments.calibrated, figures, cores, alone=alone) for alone in (True, False))
    coordinator = coordinator_constants(results["coordinators"])
    document = {
        "date": date.today().isoformat(),
        "system": {"torch": torch.__version__, "python": sys.version.split()[0], "cores": cores},
        "repeats": arguments.repeats,
        "parameters": {model: GPTS[model].parameters for model in dict.fromkeys(row["model"] for row in figures)}
        | {model: numel(shapes) for model, shapes in MODELS.items()},
        "stated": asdict(cluster),
        "constants": {name: asdict(operation) for name, operation in constants.items()}
        | {f"{name}, one rank": asdict(operation) for name, operation in alone.items()}
        | {"coordinator": {name: asdict(line) for name, line in coordinator.items()}},
        "coordinators": results["coordinators"],
        "coordinator without garbage collection": results["uncollected"],
        "directory": results["directory"],
        "measured": figures,
        "checks": [*checks(arguments.calibrated, figures, cores), *check_coordinator(results["coordinators"])],
        "table": [*table(constants, coordinator, arguments.table, cluster)],
    }
    print("\n".join(report(document)))
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(to_json(document))


def to_json(document: dict[str, Any]) -> str:
    """JSON with one entry of each list a line, numbers with four digits."""
    parts = []
    for key, value in _rounded(document).items():
        if isinstance(value, list):
            parts.append(f" {json.dumps(key)}: [\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
