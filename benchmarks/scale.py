"""What a save and a load cost as the state grows: seconds, processor time, memory and bytes, beside others.

    python benchmarks/scale.py                    # 30, 124 and 350 M parameters, 1 and 2 threads: 1 hour, 20 GiB
    python benchmarks/scale.py --models 1M 12M 40M --repeats 5
    python benchmarks/scale.py --models 124M --repeats 1 --add    # beside the models that the results have already

States are those of GPTs with AdamW's moments, some simulated training steps apart (`scale_states.py`), read from files
so that each method sees the same. Every method runs in a process of its own (`scale_methods.py`), methods in turn and
rounds after each other, so that a change of the machine's speed meets them all; once more in the first round, for what
it holds in memory. Files are written to `--folder`, on
the disk that is to be measured. Ours brings its files to the disk (fsync); `torch.save` is measured with and without.
The last table has the figures that there are targets for (`scale_report.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from scale_methods import METHODS
from scale_report import Row, figure_table, figures, operation_table, summarize
from scale_states import MODELS, make_states

HERE = Path(__file__).resolve().parent


def measure(arguments: argparse.Namespace, model: str, method: str, threads: int, what: str) -> list[Row]:
    """One round of a method, in a process of its own; one row with an error if it fails or has no memory left.

    Args:
        what: `times`, or `memory`: memory that is freed then goes back to the system at once, so that what is resident
            is in use. That costs time which no training loop pays.
    """
    settings = {
        "states": str(arguments.folder / model),
        "model": model,
        "method": method,
        "threads": threads,
        "what": what,
    }
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": str(threads)}
    if what == "memory":
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, str(HERE / "scale_methods.py"), json.dumps(settings)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    common = {"model": model, "method": method, "threads": threads}
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return [common | {"operation": "", "error": lines[-1]}]
    result = json.loads(run.stdout.splitlines()[-1])
    return [common | {"state_bytes": result["state_bytes"]} | row for row in result["rows"]]


def measure_all(arguments: argparse.Namespace) -> Iterator[Row]:
    """All rounds of all methods."""
    for model in arguments.models:
        make_states(arguments.folder / model, model, 3, arguments.steps)
        has_chain = MODELS[model].parameters <= MODELS[arguments.max_chain].parameters
        methods = [method for method in arguments.methods if method != "chain" or has_chain]
        for number in range(arguments.repeats):
            for threads in arguments.threads:
                for method in methods:
                    for what in ("memory", "times") if number == 0 else ("times",):
                        print(f"{model}, {threads} threads, round {number + 1}: {method}, {what}", file=sys.stderr)
                        yield from measure(arguments, model, method, threads, what)


def earlier_rows(arguments: argparse.Namespace) -> list[Row]:
    """Rows of other models in results that are added to."""
    if not arguments.add or not arguments.out.exists():
        return []
    return [row for row in json.loads(arguments.out.read_text())["rows"] if row["model"] not in arguments.models]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["30M", "124M", "350M"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--steps", type=int, default=10, help="simulated training steps between saves")
    parser.add_argument("--max-chain", choices=MODELS, default="124M", help="largest model of the method chain")
    parser.add_argument("--add", action="store_true", help="to the results of other models in --out")
    parser.add_argument("--folder", type=Path, help="for states and checkpoints; a temporary one if left out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or Path(temporary)
        rows = [*earlier_rows(arguments), *summarize(measure_all(arguments))]
    found = list(figures(rows))
    print("\n".join((*operation_table(rows), "", *figure_table(found))))
    arguments.out.parent.mkdir(exist_ok=True)
    system = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    head = {"date": date.today().isoformat(), "system": system, "times": ["median", "least"]}
    lists = {
        "rows": rows,
        "figures": [figure._asdict() | {"values": [round(value, 3) for value in figure.values]} for figure in found],
    }
    arguments.out.write_text(_json_lines(head, lists))


def _json_lines(head: Row, lists: dict[str, list[Row]]) -> str:
    """JSON with one entry of each list a line."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, entries in lists.items():
        inner = ",\n".join("  " + json.dumps(entry) for entry in entries)
        parts.append(f" {json.dumps(key)}: [\n{inner}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
