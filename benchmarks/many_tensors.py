"""What very many small tensors cost: seconds and bytes of a save and a load, beside torch.save and safetensors.

    python benchmarks/many_tensors.py

States of 1,000, 10,000 and 200,000 float32 tensors of four numbers each, in one dict. Each method in turn, with one
thread, in a process of its own; seconds are those of the process on the CPU, so that other processes weigh less, the
smallest of `--repeats`. Our file is written durably, the other two are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()
METHODS = ("shrinkpoint", "torch.save", "safetensors")
NUMBERS = 4


def state_of(count: int) -> dict[str, torch.Tensor]:
    rows = torch.randn((count, NUMBERS), generator=torch.Generator().manual_seed(0))
    return {f"layers.{i}.weight": row.clone() for i, row in enumerate(rows)}


def methods(path: Path) -> dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]]:
    """How each saves a state and loads it."""
    from safetensors.torch import load_file, save_file

    import shrinkpoint as sp

    return {
        "shrinkpoint": (lambda state: sp.save(state, path, threads=1), lambda: sp.load(path, threads=1)),
        "torch.save": (lambda state: torch.save(state, path), lambda: torch.load(path)),
        "safetensors": (lambda state: save_file(state, path), lambda: load_file(path)),
    }


def measured(method: str, count: int, repeats: int) -> dict[str, Any]:
    """One method on one state; in the process that was started for it."""
    torch.set_num_threads(1)
    saves, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        save, load = methods(path)[method]
        save({"warm": torch.zeros(4)})
        load()
        state = state_of(count)
        for _ in range(repeats):
            began = time.process_time()
            save(state)
            saved = time.process_time()
            found = load()
            loads.append(time.process_time() - saved)
            saves.append(saved - began)
        assert all(torch.equal(found[name], value) for name, value in state.items())
        size = path.stat().st_size
    raw = 4 * NUMBERS * count
    return {
        "method": method,
        "tensors": count,
        "raw_bytes": raw,
        "bytes": size,
        "bytes_a_tensor": (size - raw) / count,
        "save_seconds": min(saves),
        "load_seconds": min(loads),
    }


def line(row: dict[str, Any]) -> str:
    seconds = f"save {row['save_seconds']:7.3f} s   load {row['load_seconds']:7.3f} s"
    size = f"{row['bytes']:11,d} bytes, {row['bytes_a_tensor']:6.1f} a tensor beyond the raw ones"
    return f"{row['tensors']:8,d} {row['method']:12} {seconds}   {size}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 200_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "many_tensors.json")
    parser.add_argument("--only", nargs=2, metavar=("METHOD", "COUNT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measured(arguments.only[0], int(arguments.only[1]), arguments.repeats)))
        return
    rows = []
    for count in arguments.counts:
        for method in METHODS:
            command = [sys.executable, str(HERE), "--only", method, str(count), "--repeats", str(arguments.repeats)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(line(rows[-1]))
    arguments.out.parent.mkdir(exist_ok=True)
    system = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    arguments.out.write_text(json.dumps({"system": system, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
