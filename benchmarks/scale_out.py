"""Many ranks, predicted and checked: what `dcp.save` through `Writer` costs at 8 B, 70 B and 1 T parameters.

    python benchmarks/scale_out.py                # 6 minutes on 2 idle cores, 6 GB of memory
    python benchmarks/scale_out.py --ranks 1 2 --coordinated 8 16 --largest 64

Constants come from saves of a small GPT with AdamW on 2 and on 8 real ranks, and of a larger one on 2
(`scale_out_run.py`), and from the code of the coordinator on plans that are made up (`scale_out_plans.py`). The model
(`scale_out_model.py`) then says what other runs cost: the small model on 1 and 4 ranks, the larger one on 1, 4 and 8,
the coordinator of three times as many ranks. Every figure is printed beside the measured one. Last comes the table for
the three sizes. Its bandwidths are stated, not measured; its bytes are those of simulated training states, ten steps
apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scale_out_model import Cluster, Operation, Row, calibrate, compare, forecast, measured, predict
from scale_out_plans import MODELS, Job, coordinate, look_at_directory, numel
from scale_out_run import run_ranks
from scale_states import GPTShapes, training_states

SMALL, LARGE = "12M", "30M"
GPTS = {
    "tiny": GPTShapes(2, 64, vocabulary=1000),  # for tests
    SMALL: GPTShapes(4, 256, vocabulary=32000),
    LARGE: GPTShapes(6, 384),
}
CALIBRATION = ((0, 2), (0, 8), (1, 2))
"""The runs that constants are from: the first or the second model, and its ranks."""
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


def operations(run: Sequence[Row]) -> list[str]:
    """The operations of a run, in their order."""
    return [row["operation"] for row in run[0]["rows"]]


def constants_of(models: Sequence[str], runs: dict[str, dict[int, list[Row]]]) -> dict[str, Operation]:
    """Of each operation, from the runs of `CALIBRATION`; of one model from what there is of it."""
    chosen = [(models[place], ranks) for place, ranks in CALIBRATION if place < len(models)]
    calibration = [(tuple(GPTS[model].shapes()), runs[model][ranks]) for model, ranks in chosen]
    return {name: calibrate(calibration, name) for name in operations(calibration[0][1])}


def checks(models: Sequence[str], runs: dict[str, dict[int, list[Row]]], cores: int) -> Iterator[Row]:
    """Every figure of every run that the constants are not from; and of those that they are from, marked so."""
    for name, constants in constants_of(models, runs).items():
        for model in models:
            for ranks, run in runs[model].items():
                figures = predict(constants, name, tuple(GPTS[model].shapes()), ranks, cores)
                fitted = (models.index(model), ranks) in CALIBRATION
                for row in compare(figures, measured(run, name)):
                    yield {"model": model, "ranks": ranks, "operation": name, "calibration": fitted, **row}


def coordinator_constants(rows: Sequence[Row]) -> Row:
    """Seconds and bytes of the coordinator for each rank and entry, from the run of fewest ranks."""
    row = min(rows, key=lambda row: row["ranks"])
    entries = row["ranks"] * row["items"]
    return {
        "torch": sum(row["seconds"][part] for part in TORCH_PARTS) / entries,
        "ours": sum(row["seconds"][part] for part in OUR_PARTS) / entries,
        "memory": most_resident(row) / entries,
    }


def most_resident(row: Row) -> int:
    """Bytes that the coordinator has after one of its parts, at most; what earlier runs left may be freed in one."""
    return max(accumulate(row["resident"].values()))


def check_coordinator(rows: Sequence[Row]) -> Iterator[Row]:
    """The coordinator of the most ranks, predicted from that of the fewest."""
    constants, row = coordinator_constants(rows), max(rows, key=lambda row: row["ranks"])
    entries = row["ranks"] * row["items"]
    truth = {
        "torch": sum(row["seconds"][part] for part in TORCH_PARTS),
        "ours": sum(row["seconds"][part] for part in OUR_PARTS),
        "memory": most_resident(row),
    }
    for figure in compare({name: constants[name] * entries for name in truth}, truth):
        yield {"model": "8 B", "ranks": row["ranks"], "operation": "coordinator", "calibration": False, **figure}


def table(constants: dict[str, Operation], coordinator: Row, ranks: Sequence[int], cluster: Cluster) -> Iterator[Row]:
    """The rows of all sizes."""
    for model, shapes in MODELS.items():
        for count in ranks:
            for name in ("lossless, keyframe", "lossless, delta, warm", "fisher, keyframe", "fisher, delta, warm"):
                depth = DEPTHS[name.partition(",")[0]] if "delta" in name else 0
                row = forecast(constants[name], name, tuple(shapes), count, coordinator, cluster, depth)
                yield {"model": model, **row}


def report(document: dict[str, Any]) -> Iterator[str]:
    """The errors by figure, then the table."""
    rows = [row for row in document["checks"] if not row["calibration"]]
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


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs, and all simulated coordinators."""
    runs: dict[str, dict[int, list[Row]]] = {}
    for model in arguments.models:
        states = make_states((arguments.states or folder) / model, model, arguments.steps)
        runs[model] = {}
        for ranks in arguments.ranks:
            print(f"{model} on {ranks} ranks", file=sys.stderr, flush=True)
            runs[model][ranks] = run_ranks(ranks, states, folder / "run")
            shutil.rmtree(folder / "run")
    coordinators = []
    for ranks in arguments.coordinated:
        print(f"the coordinator of {ranks} ranks", file=sys.stderr, flush=True)
        coordinators.append(coordinate(Job(MODELS["8 B"], ranks), arguments.memory / f"shrinkpoint-{os.getpid()}"))
        shutil.rmtree(arguments.memory / f"shrinkpoint-{os.getpid()}")
    print(f"a directory of {arguments.largest} ranks", file=sys.stderr, flush=True)
    directory = look_at_directory(
        Job(MODELS["8 B"], arguments.largest), arguments.memory / f"shrinkpoint-{os.getpid()}"
    )
    shutil.rmtree(arguments.memory / f"shrinkpoint-{os.getpid()}")
    return {"runs": runs, "coordinators": coordinators, "directory": directory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=GPTS, default=[SMALL, LARGE], help="constants are from both")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="of real runs, 2 and 8 among them")
    parser.add_argument("--coordinated", type=int, nargs="+", default=[32, 96], help="ranks with made-up plans")
    parser.add_argument("--largest", type=int, default=4096, help="ranks of the directory that one rank looks at")
    parser.add_argument("--table", type=int, nargs="+", default=[8, 64, 512, 4096], help="ranks of the table")
    parser.add_argument("--steps", type=int, default=10, help="simulated training steps between saves")
    parser.add_argument("--states", type=Path, help="where states are made, and kept; a temporary folder if left out")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="for small files of many ranks")
    parser.add_argument("--folder", type=Path, help="for checkpoints, on the disk that is measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scale_out.json")
    arguments = parser.parse_args()
    arguments.ranks = sorted({*arguments.ranks, *(ranks for _, ranks in CALIBRATION)})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(arguments, Path(folder))
    runs, cluster, cores = results["runs"], Cluster(), len(os.sched_getaffinity(0))
    constants = constants_of(arguments.models, runs)
    coordinator = coordinator_constants(results["coordinators"])
    document = {
        "date": date.today().isoformat(),
        "system": {"torch": torch.__version__, "python": sys.version.split()[0], "cores": cores},
        "parameters": {model: GPTS[model].parameters for model in arguments.models}
        | {model: numel(shapes) for model, shapes in MODELS.items()},
        "stated": asdict(cluster),
        "constants": {name: asdict(operation) for name, operation in constants.items()} | {"coordinator": coordinator},
        "coordinators": results["coordinators"],
        "directory": results["directory"],
        "checks": [*checks(arguments.models, runs, cores), *check_coordinator(results["coordinators"])],
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
