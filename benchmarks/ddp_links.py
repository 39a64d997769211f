"""Time of a training step of replicas on links of several rates and latencies: ours, and what torch has.

    python benchmarks/ddp_links.py                                  # about half an hour on two idle cores
    python benchmarks/ddp_links.py --worlds 2 --links 100:0 1000:5 --only none q4:64

Real gloo processes in network namespaces (link_net.py, which takes root) train a perceptron whose backward pass takes
about as long as a message. A step without any communication is timed as well. Cases take turns in every round, and the
figures are medians over all steps. Results go to results/ddp_links.json; links that are not measured again stay.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import link_net

WORKER = Path(__file__).with_name("link_worker.py")
LINKS = ("100:0", "100:5", "100:30", "1000:0", "1000:5", "1000:30", "10000:0")
CASES = ("compute alone", "none", "bf16 hook", "PowerSGD 4", "q8:64", "q4:64")


def measure(args: argparse.Namespace, world: int, link: str) -> dict[str, Any]:
    """Medians of the seconds of a step of each case, and bytes that the first rank sends in it."""
    mbps, delay_ms = (float(number) for number in link.split(":"))
    job = {"kind": "ddp", "world": world, "rounds": args.rounds, "steps": args.steps, "warm": 3}
    job |= {"parameters": args.parameters, "rows": args.rows, "bucket_mb": args.bucket_mb}
    job["cases"] = [{"name": name, "forward": "" if name == "none" else name} for name in args.only]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with link_net.Network(world, delay_ms, mbps) as network:
        if not delay_ms:
            network.shape(mbps)
        job["address"] = network.address(0)
        commands = [[sys.executable, str(WORKER), json.dumps(job | {"rank": rank})] for rank in range(world)]
        outputs = network.run(commands, env=environment, timeout=args.timeout)
    reports = [json.loads(text.splitlines()[-1]) for text in outputs]
    cases = {}
    for name in args.only:
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
        best = min(cases[name]["seconds"] for name in ("none", "bf16 hook") if name in cases)
        for name, row in cases.items():
            print(f"  {name:16} {row['seconds']:8.3f} s {row['seconds'] / best:7.2f}x {row['sent'] / 1e6:8.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--links", nargs="+", default=LINKS, help="Mbit/s:milliseconds")
    parser.add_argument("--only", nargs="+", default=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--parameters", type=int, default=1 << 22)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--bucket-mb", type=float, default=2)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one link")
    parser.add_argument("--out", type=Path, default=Path("results/ddp_links.json"))
    args = parser.parse_args()
    link_net.leave_on_signals()
    if refusal := link_net.refusal():
        sys.exit(f"network namespaces with limited links are not permitted here ({refusal})")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"links": {}}
    figures |= {name: getattr(args, name) for name in ("parameters", "rows", "bucket_mb", "rounds", "steps")}
    for world in args.worlds:
        for link in args.links:
            figures["links"][f"{world} ranks, {link}"] = measure(args, world, link)
            args.out.write_text(json.dumps(figures, indent=1))
            print(f"  {world} ranks, {link}: done", file=sys.stderr, flush=True)
    show(figures)


if __name__ == "__main__":
    main()
