"""What compression on the wire is worth in time: shaped links between processes, and the speed of the operators.

    python -m lab.studies.link.run                          # all of it, about a quarter of an hour on two idle cores
    python -m lab.studies.link.run --only speed --repeats 9
    python -m lab.studies.link.run --smoke                  # small sizes, to see that it runs

Pipelines run in network namespaces (hosts.py), which takes root; where there can be none
they are skipped with a message. Results go to results/link.json, part by part: what is not measured again stays.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lab.studies.harness import environment, program
from lab.studies.link import hosts, speed, table

RATES = (0, 10000, 1000, 100)
"""Mbit/s; 0 is without a limit."""
PARTS = ("speed", "pipeline", "stages")
Pair = tuple[str, str]
CASES: dict[str, Pair] = {
    "none": ("", ""),
    "bf16": ("bf16", "bf16"),
    "q8:64": ("q8:64", "q8:64"),
    "q4:64 / q8:64": ("q4:64", "q8:64"),
    "q4:64": ("q4:64", "q4:64"),
    "n3:64": ("n3:64", "n3:64"),
}
FEW = {name: CASES[name] for name in ("none", "bf16", "q8:64", "q4:64")}


def pipeline(args: argparse.Namespace) -> dict[str, Any]:
    """Two stages, all operators."""
    return {name: _pipeline(args, 2, name, CASES) for name in args.schedules}


def stages(args: argparse.Namespace) -> dict[str, Any]:
    """Four stages on a bridge; on two cores they share them, so that computing takes more of a step."""
    return {"1F1B": _pipeline(args, 4, "1F1B", FEW)}


def _pipeline(args: argparse.Namespace, world: int, schedule: str, cases: dict[str, Pair]) -> dict[str, Any]:
    sizes = {"width": args.width, "inner": args.inner, "batch": args.batch, "length": args.length}
    job = {"kind": "pipeline", "schedule": schedule, "micro_batches": args.micro_batches, **sizes}
    return _measured(args, job | {"world": world}, cases)


def _measured(args: argparse.Namespace, job: dict[str, Any], cases: dict[str, Pair]) -> dict[str, Any]:
    """Seconds of the steps, and bytes, of every rate and case."""
    job |= {"rounds": args.rounds, "steps": args.steps, "warm": 1}
    job["cases"] = [{"name": name, "forward": f, "backward": b} for name, (f, b) in cases.items()]
    results: dict[str, Any] = {"machine": speed.machine(), "date": date.today().isoformat(), "job": job}
    results["rates"] = {}
    with hosts.Network(job["world"]) as network:
        for mbps in args.rates:
            network.shape(mbps or None)
            reports = _run(network, job | {"address": network.address(0)}, args.timeout)
            results["rates"][str(mbps)] = [{name: rank[name] for name in cases} for rank in reports]
            print(
                f"  {job['kind']}, {job['world']} processes, {mbps or 'no limit'} Mbit/s: done",
                file=sys.stderr,
                flush=True,
            )
    table.evaluate(results)
    return results


def _run(network: hosts.Network, job: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    variables = environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    ranks = [json.dumps(job | {"rank": rank}) for rank in range(job["world"])]
    commands = [program("lab.studies.link.worker", text) for text in ranks]
    return [json.loads(text.splitlines()[-1]) for text in network.run(commands, env=variables, timeout=timeout)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rates", nargs="+", type=int, default=RATES, help="Mbit/s; 0: no limit")
    parser.add_argument("--schedules", nargs="+", choices=("1F1B", "GPipe"), default=("1F1B", "GPipe"))
    parser.add_argument("--rounds", type=int, default=3, help="of all cases in turns")
    parser.add_argument("--steps", type=int, default=4, help="of every case in every round, after one that warms up")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=32, help="dimensions within a block")
    parser.add_argument("--repeats", type=int, default=15, help="of every timing of an operator")
    parser.add_argument("--core", type=int, default=0, help="that operators are timed on")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one rate")
    parser.add_argument("--smoke", action="store_true", help="small sizes, few steps, two rates")
    parser.add_argument("--out", type=Path, default=Path("results/link.json"))
    args = parser.parse_args()
    if args.smoke:
        args.rates, args.rounds, args.steps, args.repeats = (0, 200), 1, 2, 3
        args.batch, args.width, args.timeout = 2, 256, 150
    return args


def main() -> None:
    args = arguments()
    hosts.leave_on_signals()
    refusal = hosts.refusal()
    torch.set_num_threads(1)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for part in args.only:
        if part != "speed" and refusal:
            print(f"{part}: skipped, network namespaces with limited links are not permitted here ({refusal})")
            continue
        try:
            figures[part] = {"speed": speed.speeds, "pipeline": pipeline, "stages": stages}[part](args)
        except RuntimeError as error:
            failed.append(f"{part}: {error}")
            figures.pop(part, None)
        args.out.write_text(json.dumps(figures, indent=1))
    table.show(figures, args.only)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
