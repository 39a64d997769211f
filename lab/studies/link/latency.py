"""Time of a training step on links of several rates and latencies: of replicas and pipelines, ours and torch's.

    python -m lab.studies.link.latency                                  # three quarters of an hour on two idle cores
    python -m lab.studies.link.latency --worlds 2 --links 100:0 1000:5 --only none q4:64
    python -m lab.studies.link.latency --worlds 2 --links 100:0 300:0 1000:0 --only none q4:64 v0.7 --optimizer adamw
    python -m lab.studies.link.latency --kinds 1F1B Interleaved1F1B --worlds 2
    python -m lab.studies.link.latency --worlds 4 --per-node 2 --only none q4:64 "q4:64, two levels"

Real gloo processes in network namespaces (hosts.py, which takes root). Replicas (ddp) train a perceptron whose
backward pass takes about as long as a message; a step without any communication is timed as well. With `--per-node 2`
two ranks share a host, between which nothing is limited, and the link is that between hosts. Pipelines train run.py's
GPT. Cases take turns in every round, and the figures are medians over all steps. Results go to
results/link_latency.json; links that are not measured again stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from lab.studies.harness import environment, machine, program
from lab.studies.link import hosts

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
LINKS = ("0:0", "100:0", "100:5", "100:30", "1000:0", "1000:5", "1000:30", "10000:0")
CASES = {
    "ddp": (
        *("compute alone", "none", "bf16 hook", "PowerSGD 4", "bf16", "q8:64", "q4:64"),
        *("lowrank4(q8:64)", "lowrank16(q8:64)"),
    ),
    "pipeline": ("none", "bf16", "q8:64", "q4:64"),
}


def measure(args: argparse.Namespace, kind: str, world: int, link: str) -> dict[str, Any]:
    """Medians of the seconds of a step of each case, and bytes that the first rank sends in it."""
    mbps, delay_ms = (float(number) for number in link.split(":"))
    job = {"world": world, "rounds": args.rounds, "steps": args.steps, "warm": 3, "per_node": args.per_node}
    if kind == "ddp":
        job |= {"kind": "ddp", "parameters": args.parameters, "rows": args.rows, "bucket_mb": args.bucket_mb}
        job |= {"optimizer": args.optimizer}
    else:
        job |= {"kind": "pipeline", "schedule": kind, "micro_batches": args.micro_batches}
        job |= {"width": 1024, "inner": 32, "batch": args.batch, "length": 128}
    only = args.only or CASES[job["kind"]]
    specs = [(name, "" if name == "none" else name) for name in only]
    job["cases"] = [{"name": name, "forward": spec, "backward": spec} for name, spec in specs]
    variables = environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    with hosts.Network(world // args.per_node, delay_ms, mbps) as network:
        if not delay_ms:
            network.shape(mbps or None)
        job["address"] = network.address(0)
        commands = [program("lab.studies.link.worker", json.dumps(job | {"rank": rank})) for rank in range(world)]
        outputs = network.run(commands, env=variables, timeout=args.timeout)
    reports = [json.loads(text.splitlines()[-1]) for text in outputs]
    cases = {}
    for name in only:
        # a step is as long as the slowest rank's
        steps = [
            max(times)
            for rounds in zip(*(report[name] for report in reports), strict=True)
            for times in zip(*(one["seconds"] for one in rounds), strict=True)
        ]
        sent = sum(one["sent"] for one in reports[0][name]) / len(steps)
        cases[name] = {"seconds": median(steps), "least": min(steps), "steps": len(steps), "sent": sent}
    return cases


def show(figures: dict[str, Any]) -> None:
    for key, cases in figures["links"].items():
        print(f"\n{key}")
        rivals = [row["seconds"] for name, row in cases.items() if name in ("none", "bf16", "bf16 hook")]
        best = min(rivals, default=next(iter(cases.values()))["seconds"])
        for name, row in cases.items():
            print(f"  {name:16} {row['seconds']:8.3f} s {row['seconds'] / best:7.2f}x {row['sent'] / 1e6:8.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("ddp", *SCHEDULES), default=("ddp",))
    parser.add_argument("--worlds", type=int, nargs="+", default=(2, 4))
    parser.add_argument(
        "--per-node", type=int, default=1, help="ranks that share a host; the others are two hosts or more"
    )
    parser.add_argument("--links", nargs="+", default=LINKS, help="Mbit/s:milliseconds")
    parser.add_argument("--only", nargs="+", help="cases, such as q4:64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--parameters", type=int, default=1 << 22)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="of replicas; adamw for v0.7")
    parser.add_argument("--bucket-mb", type=float, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline's step")
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one link")
    parser.add_argument("--out", type=Path, default=Path("results/link_latency.json"))
    args = parser.parse_args()
    hosts.leave_on_signals()
    if refusal := hosts.refusal():
        sys.exit(f"network namespaces with limited links are not permitted here ({refusal})")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"links": {}}
    names = ("parameters", "rows", "bucket_mb", "optimizer", "micro_batches", "batch", "rounds", "steps")
    figures |= {name: getattr(args, name) for name in names}
    figures |= {"machine": machine(), "date": date.today().isoformat()}
    for world in args.worlds:
        if world % args.per_node or world // args.per_node < 2:
            parser.error(f"{world} ranks cannot be two hosts or more of {args.per_node} ranks")
    for kind, world, link in product(args.kinds, args.worlds, args.links):
        nodes = f" in {world // args.per_node} nodes" if args.per_node > 1 else ""
        key = f"{kind}, {world} ranks{nodes}, {link}"
        figures["links"][key] = measure(args, kind, world, link)
        figures.setdefault("dates", {})[key] = date.today().isoformat()
        figures.setdefault("processors", {})[key] = figures["machine"]["cpu"]
        args.out.write_text(json.dumps(figures, indent=1))
        print(f"  {key}: done", file=sys.stderr, flush=True)
    show(figures)


if __name__ == "__main__":
    main()
