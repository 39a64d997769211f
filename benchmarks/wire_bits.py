"""Whether a run of wire.py gives the same bits twice on one processor, and with other instruction sets.

    python benchmarks/wire_bits.py

The first steps of `n3:64` / `q4:64` on images, each time in a process of its own: twice as they are, with oneDNN held
to SSE 4.1, and with torch's own loops without AVX2. Prints a digest of the model after 1, 10 and all steps. Writes
results/wire_bits.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import wire
import wire_task
import workloads
from lossless_report import table
from lossless_speed import machine
from wire_grid import Job

JOB = Job("image", 0, "n3:64", "q4:64")
VARIABLES: dict[str, dict[str, str]] = {
    "as it is": {},
    "again": {},
    "oneDNN to SSE 4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "torch without AVX2": {"ATEN_CPU_CAPABILITY": "default"},
}
"""By name, what the environment of the process has besides."""


def digests(steps: int, data: Path, quick: bool) -> dict[str, Any]:
    """Digests of the model after 1, 10 and `steps` steps, and the last loss."""
    task = wire_task.named(JOB.task, data, Path(), quick=quick)
    play = wire.Play(JOB, replace(task, test=lambda _: 0.0))
    found, loss = {}, 0.0
    for step in range(1, steps + 1):
        drawn = play.course.stream.draw()
        play.points.set_sample_ids(drawn[2])
        loss = task.advance(play.course, drawn)
        if step in (1, 10, steps):
            found[f"step {step}"] = workloads.fingerprint(play.course.model)
    return {"digests": found, "loss": loss, "instructions of torch": torch.backends.cpu.get_cpu_capability()}


def in_process(variables: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """`digests` in a process of its own, whose environment has these variables."""
    command = [sys.executable, __file__, "--alone", "--steps", str(args.steps), "--data", str(args.data)]
    command += ["--quick"] if args.quick else []
    answer = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("results/wire_bits.json"))
    parser.add_argument("--quick", action="store_true", help="a toy")
    parser.add_argument("--alone", action="store_true", help="one process of it, as JSON on standard output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.alone:
        print(json.dumps(digests(args.steps, args.data, args.quick)))
        return
    runs = {name: in_process(variables, args) for name, variables in VARIABLES.items()}
    lines = [[name, *run["digests"].values(), f"{run['loss']:.6f}"] for name, run in runs.items()]
    print(table(["process", *runs["again"]["digests"], "last loss"], lines))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"job": str(JOB), "steps": args.steps, "machine": machine(), **runs}, indent=1))


if __name__ == "__main__":
    main()
