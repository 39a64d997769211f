"""Time of a training step between two hosts of 100 Mbit/s: alone, with every gradient averaged, and with local steps.

    python benchmarks/local_steps_link.py ../shared/data            # about three minutes on two idle cores, as root

Two gloo processes in network namespaces (link_net.py) train a GPT of 834,304 parameters, 512 tokens a step, on a core
each. All cases take turns, whole rounds at a time. A step's mean has its share of the exchange that ends its round;
the median is that of single steps, of which most have no exchange. Both are those of the slower rank. Results go to
results/local_steps_link.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from datetime import date, timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

import link_net
import torch
import torch.distributed as dist
from link_worker import end_with_parent
from local_steps import BASELINE, METHODS, Local, Replica
from local_steps_tasks import Text
from lossless_speed import machine
from torch import nn

from shrinkpoint_lab.demo.workload import GPTConfig

ALONE = "no communication"
EVERY = 30
NAMES = (BASELINE, "DiLoCo, momentum .3", "DiLoCo, momentum .3, q4:64", "SparseLoCo")
CASES: dict[str, Local | str | None] = {ALONE: None, "q4:64": "q4:64"} | {name: METHODS[name] for name in NAMES}


class LargerText(Text):
    """The same task with the sizes of a step that takes a core some tens of milliseconds."""

    shape, batch = GPTConfig(layers=4, width=128, heads=4, context=64, dropout=0.0), 8


def measure(task: Text, settings: Local | str | None, rounds: int) -> dict[str, Any]:
    """Seconds of the steps of some rounds, and bytes that this rank sent in them; one round before does not count."""
    torch.manual_seed(0)
    model, optimizer = task.build(1e-4)
    replica, generator = Replica(model, optimizer, settings), torch.Generator().manual_seed(dist.get_rank())
    seconds: list[float] = []
    for number in range((rounds + 1) * EVERY):
        if number == EVERY:
            dist.barrier()
            sent = link_net.sent_bytes()
        began = time.perf_counter()
        optimizer.zero_grad()
        task.loss(replica.parallel, task.draw(generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        replica.step()
        seconds.append(time.perf_counter() - began)
    sent = link_net.sent_bytes() - sent
    dist.barrier()
    return {"seconds": seconds[EVERY:], "sent": sent}


def run_rank(args: argparse.Namespace) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = link_net.DEVICE
    dist.init_process_group("gloo", f"tcp://{args.address}:29500", timedelta(seconds=60), rank=args.rank, world_size=2)
    task = LargerText(args.data)
    turns = [{name: measure(task, CASES[name], args.rounds) for name in args.only} for _ in range(args.turns)]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(turns))


def summarize(reports: list[list[dict[str, Any]]], name: str) -> dict[str, float]:
    """Of the reports of both ranks: per step, of the slower rank."""
    ranks = [[turn[name] for turn in report] for report in reports]
    means = [max(mean(one["seconds"]) for one in turn) for turn in zip(*ranks, strict=True)]
    steps = [
        max(pair) for turn in zip(*ranks, strict=True) for pair in zip(*(one["seconds"] for one in turn), strict=True)
    ]
    return {
        "mean": median(means),
        "least mean": min(means),
        "largest mean": max(means),
        "median": median(steps),
        "steps": len(steps),
        "sent": sum(one["sent"] for one in ranks[0]) / len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a directory with tinyshakespeare; without it the standard library")
    parser.add_argument("--mbps", type=float, default=100)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="in a turn, beside one that does not count")
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--out", type=Path, default=Path("results/local_steps_link.json"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args)
        return
    link_net.leave_on_signals()
    if refusal := link_net.refusal():
        sys.exit(f"network namespaces with limited links are not permitted here ({refusal})")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with link_net.Network(2) as network:
        network.shape(args.mbps)
        command = [sys.executable, __file__, str(args.data), "--turns", str(args.turns), "--rounds", str(args.rounds)]
        command += ["--only", *args.only, "--address", network.address(0)]
        outputs = network.run([[*command, "--rank", str(rank)] for rank in range(2)], env=environment, timeout=600)
    reports = [json.loads(output.splitlines()[-1]) for output in outputs]
    cases = {name: summarize(reports, name) for name in args.only}
    figures = {"mbps": args.mbps, "every": EVERY, "turns": args.turns, "rounds": args.rounds, "cases": cases}
    parameters = sum(one.numel() for one in LargerText(args.data).build(1e-4)[0].parameters())
    figures |= {"parameters": parameters, "machine": machine(), "date": date.today().isoformat()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=1))
    base = cases[args.only[0]]["mean"]
    for name, row in cases.items():
        times = f"{1e3 * row['mean']:8.1f} ms {row['mean'] / base:6.2f}x, median {1e3 * row['median']:.1f} ms"
        print(f"  {name:30}{times:40}{row['sent'] / 1e3:9.2f} KB")


if __name__ == "__main__":
    main()
