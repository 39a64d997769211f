"""Rivals at the same rise: bits a weight against what they do to the loss, all on the same chains of checkpoints.

    make rivals                                            # once: a Python with the rivals' packages
    python benchmarks/rate_distortion.py                   # gpt, three seeds: 20 minutes on an idle core
    python benchmarks/rate_distortion.py --only fisher     # methods whose name contains one of these
    python benchmarks/rate_distortion.py --workloads "resnet adamw" --seeds 0
    python benchmarks/rate_distortion.py --report          # tables of what is there; --seeds 0: of one seed alone
    python benchmarks/rate_distortion.py --quick           # a toy, of what needs no other package

A training is recorded without loss; every method then writes the same checkpoints, each as the one after the one
before it, and what comes back is evaluated at once. Each finished run is a line of results/rate_distortion.jsonl and
is not run again unless the code has changed: a rival's by `rate_distortion_rivals.py`, ours by all that decides what
a save writes. The summary goes to benchmarks/results/rate_distortion.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import fisher
import rate_distortion_curves as curves
import torch
import workloads
from lossless_report import table
from lossless_speed import machine
from rate_distortion_curves import Point
from rate_distortion_methods import Chain, Coded, Method, Package, methods, model_weights
from run_log import Ledger, version
from workloads import Workload

from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint_lab.bench.series import SeriesEntry

HERE = Path(__file__).resolve().parent
RISES = (0.02, 0.1, 1.0)
"""Per cent: about 0, and two that somebody may accept."""
KEPT = 0.6
"""Retention below which a small rise says little: a checkpoint that stays behind has the loss of an average over
time."""
Row = dict[str, Any]


def recording(name: str, seed: int, options: argparse.Namespace) -> Chain:
    """The checkpoints of one training: from a file of an earlier time, or trained now and kept there."""
    workload = workloads.named(name, options.data, quick=options.quick)
    start, every, count = (8, 4, 3) if options.quick else (options.start, options.interval, options.checkpoints)
    found = fisher.recorded(workload, seed, start, every, count, options.recordings)
    model = workload.build(seed).model

    def evaluate(state: Any) -> float:
        model.load_state_dict(state["model"])
        return workload.evaluate(model)

    entries = [SeriesEntry(step, {"model": weights, "optimizer": optimizer}) for step, weights, optimizer in found]
    return Chain(entries, evaluate, workload.higher_is_better)


class Measure:
    """Runs methods on one chain."""

    def __init__(self, chain: Chain, workload: Workload) -> None:
        self._chain, self._workload = chain, workload
        self._weights = [model_weights(one.state) for one in chain.entries]
        self._quality = [chain.evaluate(one.state) for one in chain.entries]
        self._counts = sum(x.numel() for x in self._weights[0].values())
        self._raw = sum(x.numel() * x.element_size() for x in flatten(chain.entries[0].state).tensors.values())

    def rows(self, method: Method) -> list[Row]:
        """A row for each checkpoint."""
        out: list[Row] = []
        before: Coded | None = None
        first: tuple[int, Coded] | None = None
        for place, coded in enumerate(method.kind.run(self._chain)):
            if coded is not None:
                first = first or (place, coded)
                out.append(self._row(place, coded, before, first))
            before = coded
        return out

    def _row(self, place: int, coded: Coded, before: Coded | None, first: tuple[int, Coded]) -> Row:
        weights, original = self._weights[place], self._chain.entries[place].state["model"]
        model = {name: coded.weights.get(name, x) for name, x in original.items()}  # tied ones share what is decoded
        quality = self._chain.evaluate({"model": self._tied(model, original, coded)})
        row: Row = {
            "step": self._chain.entries[place].step,
            "keyframe": coded.keyframe,
            "bits": 8 * coded.weight_bytes / self._counts,
            "state": None if coded.state_bytes is None else coded.state_bytes / self._raw,
            "rise": self._workload.degradation(quality, self._quality[place]),
            "error": curves.relative_error(weights, coded.weights),
            "seconds": [coded.encode, coded.evaluate, coded.decode],
        }
        start, begun = first
        if place > start:
            row["retention"] = curves.retained(self._weights[start], weights, begun.weights, coded.weights)
        if coded.buffer_bytes is not None:
            row["buffers"] = 8 * coded.buffer_bytes / self._counts
        if before is not None:
            last, matrices = self._weights[place - 1], [name for name, x in weights.items() if x.ndim > 1]
            chosen = [{name: x[name] for name in matrices} for x in (last, weights, before.weights, coded.weights)]
            row["step retention"] = curves.retained(*chosen)
            row["matrix error"] = curves.relative_error(chosen[1], chosen[3])
            row["bound"] = curves.gaussian_bound(last, weights, before.weights, coded.weights)
        return {key: round(x, 6) if isinstance(x, float) else x for key, x in row.items()}

    def _tied(self, model: Row, original: Mapping[str, torch.Tensor], coded: Coded) -> Row:
        places = {x.data_ptr(): coded.weights[name] for name, x in original.items() if name in coded.weights}
        return {name: places.get(original[name].data_ptr(), x) for name, x in model.items()}


def measure_all(options: argparse.Namespace) -> None:
    """All that the ledger has not yet, a line each; a rival that fails has its error there."""
    ledger = Ledger(options.ledger, options.any_version)
    for name in options.workloads:
        workload = workloads.named(name, options.data, quick=options.quick)
        for seed in options.seeds:
            todo = []
            for place, method in enumerate(methods()):
                settings = {"workload": name, "seed": seed, "method": method.name, "quick": options.quick}
                if chosen(method, options) and options.seeds.index(seed) < method.seeds:
                    ours = version("rate_distortion_methods.py") if not isinstance(method.kind, Package) else None
                    code = ours or version("rate_distortion_rivals.py", core=False)
                    if ledger.find(settings, code) is None:
                        todo.append((place, method, settings, code))
            if not todo:
                continue
            measure = Measure(recording(name, seed, options), workload)
            for _, method, settings, code in todo:
                began = time.perf_counter()
                try:
                    found: Row = {"rows": measure.rows(method)}
                except (RuntimeError, ImportError, ValueError) as error:
                    found = {"error": str(error)}
                found |= {"rival": method.rival, "setting": method.setting, "at": date.today().isoformat()}
                ledger.add(settings, code, found)
                print(
                    f"{name} {seed}: {method.name}: {time.perf_counter() - began:.0f} s {found.get('error', '')}",
                    flush=True,
                )


def chosen(method: Method, options: argparse.Namespace) -> bool:
    if options.quick and not method.quick:
        return False
    return not options.only or any(part in method.name for part in options.only)


def newest(ledger: Ledger, *, quick: bool) -> list[Row]:
    """The last line of each setting, of any code."""
    found = {json.dumps(one["settings"], sort_keys=True): one for one in ledger.records()}
    names = {method.name for method in methods()}
    return [one for one in found.values() if one["settings"]["quick"] == quick and one["settings"]["method"] in names]


def summarize(records: Sequence[Row]) -> list[Row]:
    """A row for each workload and method: of deltas, over all seeds; of all checkpoints, where a method has no
    deltas."""
    out = []
    for key in dict.fromkeys((one["settings"]["workload"], one["settings"]["method"]) for one in records):
        group = [one for one in records if (one["settings"]["workload"], one["settings"]["method"]) == key]
        row: Row = {
            "workload": key[0],
            "rival": group[0]["rival"],
            "setting": group[0]["setting"],
            "at": group[-1]["at"],
        }
        group.sort(key=lambda one: one["settings"]["seed"])
        row["seeds"] = [one["settings"]["seed"] for one in group]
        saves = [save for one in group for save in one.get("rows", [])]
        if not saves:
            out.append(row | {"error": group[0]["error"]})
            continue
        deltas = [save for save in saves if not save["keyframe"]]
        means = {name: statistics.mean(save[name] for save in deltas) for name in ("bits", "rise", "error")}
        apart = [[save for save in one["rows"] if not save["keyframe"]] for one in group if "rows" in one]
        row |= {"bits": means["bits"], "rise": 100 * means["rise"], "error": means["error"]}
        row |= {"worst": 100 * max(save["rise"] for save in deltas)}
        row["bits by seed"] = [statistics.mean(save["bits"] for save in seed) for seed in apart]
        row["rise by seed"] = [100 * statistics.mean(save["rise"] for save in seed) for seed in apart]
        row["worst by seed"] = [100 * max(save["rise"] for save in seed) for seed in apart]
        row["keyframe bits"] = statistics.mean(save["bits"] for save in saves if save["keyframe"])
        row["retention"] = statistics.mean(save["retention"] for save in deltas)
        for name in ("step retention", "matrix error", "buffers"):
            known = [save[name] for save in deltas if name in save]
            row |= {name: statistics.mean(known)} if known else {}
        states = [save["state"] for save in deltas if save["state"] is not None]
        row["state x"] = 1 / statistics.mean(states) if states else None
        bounds = [save["bound"] for save in deltas if save.get("bound") is not None and save["bound"] == save["bound"]]
        row["bound"] = statistics.mean(bounds) if bounds and means["error"] else None
        row["seconds"] = [statistics.median(save["seconds"][n] for save in deltas) for n in range(3)]
        out.append({name: _short(value) for name, value in row.items()})
    return out


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(x) for x in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def points(rows: Sequence[Row], rival: str) -> list[Point]:
    """Of what a rival wrote, those points that keep up with the training."""
    found = [row for row in rows if row["rival"] == rival and "bits" in row and row["retention"] >= KEPT]
    return [Point(row["bits"], row["rise"], row["setting"]) for row in found]


def report(rows: Sequence[Row], megabytes: float) -> str:
    """Tables of one workload: at equal rises, and of every setting."""
    lines = []
    for rival in dict.fromkeys(row["rival"] for row in rows if not row["rival"].endswith("others")):
        found = points(rows, rival)
        cells = []
        for rise in RISES:
            at = curves.bits_at(found, rise)
            cells.append("never" if at is None else f"{'~' * (at.how == 'between')}{at.bits:.3g} ({at.name})")
        lines.append([rival, *cells])
    head = ["bits a weight and save at a rise of at most", *(f"{rise:g} %" for rise in RISES)]
    every = []
    for row in rows:
        if "error" in row and "bits" not in row:
            every.append([row["rival"], row["setting"], row["error"], *[""] * 8])
            continue
        encode, evaluate, decode = row["seconds"]
        every.append(
            [
                row["rival"],
                row["setting"],
                str(len(row["seeds"])),
                f"{row['keyframe bits']:.2f}",
                f"{row['bits']:.3f}",
                "-" if row["bound"] is None else f"{row['bound']:.3f}",
                f"{row['rise']:+.3f}",
                f"{row['worst']:+.3f}",
                f"{row['retention']:.2f}",
                "-" if row["state x"] is None else f"{row['state x']:.1f}",
                f"{encode / megabytes:.3f} {evaluate / megabytes:.3f} {decode / megabytes:.3f}",
            ]
        )
    columns = ["", "setting", "seeds", "key bits", "bits", "bound", "rise %", "worst %", "retention", "state x"]
    return table(head, lines) + "\n\n" + table([*columns, "s per MB: encode, evaluate, decode"], every)


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return run.stdout.strip()


def write(rows: Sequence[Row], sizes: Mapping[str, float], path: Path) -> None:
    """The summary as JSON, a row a line."""
    head = {"machine": machine(), "commit": commit(), "date": date.today().isoformat(), "megabytes": dict(sizes)}
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    fields = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + fields + ' "rows": [\n' + text + "\n ]\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=["gpt"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[], help="methods whose name contains one of these")
    parser.add_argument("--start", type=int, default=320, help="step of the first checkpoint")
    parser.add_argument("--interval", type=int, default=50, help="steps between two")
    parser.add_argument("--checkpoints", type=int, default=7)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--recordings", type=Path, default=Path("results/recordings"), help="kept here: 155 MB a gpt")
    parser.add_argument("--ledger", type=Path, default=Path("results/rate_distortion.jsonl"))
    parser.add_argument("--any-version", action="store_true", help="runs of older code count")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="a toy, of what needs no other package")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rate_distortion.json")
    options = parser.parse_args()
    if not options.quick and not options.report and not options.data.is_dir():
        parser.error(
            f"{options.data} is not there: rises would be measured on another text; set --data or SHRINKPOINT_DATA"
        )
    torch.set_num_threads(1)
    if options.quick:
        options.seeds = options.seeds[:1]
    if not options.report:
        measure_all(options)
    records = newest(Ledger(options.ledger), quick=options.quick)
    if options.report:
        records = [one for one in records if one["settings"]["seed"] in options.seeds]
    rows = summarize(records)
    sizes = {}
    for name in dict.fromkeys(row["workload"] for row in rows):
        workload = workloads.named(name, options.data, quick=options.quick)
        sizes[name] = round(sum(4 * x.numel() for x in workload.build(0).model.parameters()) / 1e6, 3)
        print(f"\n{name}\n\n" + report([row for row in rows if row["workload"] == name], sizes[name]))
    write(rows, sizes, options.out)
    print("written:", options.out)


if __name__ == "__main__":
    main()
