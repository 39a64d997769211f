"""Local steps beside averaging every gradient: bytes and losses of a GPT on a text, at the same number of tokens.

    python benchmarks/local_steps.py ../shared/data                 # about forty minutes on two idle cores
    python benchmarks/local_steps.py ../shared/data --steps 60 --seeds 1 --only "bf16 hook" SparseLoCo

Real gloo processes train the byte-level GPT of workload_text.py, smaller, each on windows of its own. The learning rate
warms up and falls by a cosine, the same for every method. Bytes are those that the kernel counts on the loopback
interface of a network namespace of the run's own, headers and what ranks agree on included; where there can be none
(it takes root), those of our ledger. The loss is that of text no rank trained on, after the last step, at the global
weights. Results go to results/local_steps.json; what is there for another method, seed or number of ranks stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from gradient_compression import bf16_under_another_name, counters, namespace
from lossless_speed import machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload_text import drawn, text, windows
from workloads import Batch, cosine, evaluating

from shrinkpoint.comm import LocalSteps, OuterSGD, compress_ddp
from shrinkpoint.demo.workload import GPT, GPTConfig

SHAPE = GPTConfig(layers=4, width=128, heads=4, context=64, dropout=0.0)
BATCH = 8
"""Windows of a rank in a step."""
PEAK = 2e-3
SPARSE = "ef(top{share}:4096:q2:64, decay=0.95)"
METHODS: dict[str, dict[str, Any] | str] = {
    "bf16 hook": "bf16 hook",
    "q4:64": "q4:64",
    "DiLoCo": {},
    "DiLoCo, q4:64": {"compressor": "q4:64"},
    "SparseLoCo": {"compressor": SPARSE.format(share="3.125"), "outer": OuterSGD(1.0, 0.0)},
    "SparseLoCo, half the share": {"compressor": SPARSE.format(share="1.5625"), "outer": OuterSGD(1.0, 0.0)},
    "local averages": {"outer": OuterSGD(1.0, 0.0)},
}
"""DDP's hooks by their names, and arguments of LocalSteps."""


class Text:
    """Windows of a text that ranks train on, and others that none does."""

    def __init__(self, data: Path) -> None:
        self.name, whole = text(data)
        cut = int(0.9 * len(whole))
        self._train, self.held_out = whole[:cut], windows(whole[cut:], SHAPE.context, 512)

    def draw(self, generator: torch.Generator) -> Batch:
        return drawn(self._train, BATCH, SHAPE.context, generator)


def train(words: Text, method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run, as this rank sees it."""
    rank, settings = dist.get_rank(), METHODS[method]
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=PEAK, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(20, args.steps, 0.1))
    local, parallel, ledgers = None, model, None
    if isinstance(settings, dict):
        local = LocalSteps(model, optimizer, every=args.every, **settings)
        ledgers = dict(local.link_stats)
    else:
        parallel, ledgers = replicate(model, settings)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    began = counters(ledgers, args.private)
    for _ in range(args.steps):
        optimizer.zero_grad()
        parallel(*words.draw(generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step() if local is None else local.step()
        scheduler.step()
    ended = counters(ledgers, args.private)
    wire, kernel, seconds = (after - before for after, before in zip(ended, began, strict=True))
    with evaluating(model):
        inputs, targets = words.held_out
        loss = mean(model(*part).item() for part in zip(inputs.split(64), targets.split(64), strict=True))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (loss, wire))
    return {
        "loss": loss,
        "equal": len({one for one, _ in ranks}) == 1,
        "ledger": sum(one for _, one in ranks) / args.steps if ledgers else None,
        "kernel": kernel / args.steps if args.private else None,
        "seconds": seconds / args.steps,
    }


def replicate(model: nn.Module, hook: str) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model with gradients that are averaged at each step, and our ledgers if they are ours."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=2)
    if hook == "bf16 hook":
        parallel.register_comm_hook(None, bf16_under_another_name)
        return parallel, None
    return parallel, dict(compress_ddp(parallel, hook).link_stats)


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.part)
    row = train(Text(args.data), args.only[0], args.seed, args)
    if rank == 0:
        args.out.write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def fork_ranks(args: argparse.Namespace) -> int:
    """All ranks of one run, forked: importing torch takes as long as a short run."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(args.part):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    run_rank(rank, args, folder)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
        return max(os.waitpid(child, 0)[1] for child in children) > 0


def measure(args: argparse.Namespace, method: str, world: int, seed: int) -> dict[str, Any]:
    inside = namespace()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "GLOG_minloglevel": "2"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        command = [sys.executable, __file__, str(args.data), "--part", str(world), "--seed", str(seed)]
        command += ["--steps", str(args.steps), "--every", str(args.every), "--only", method, "--out", str(out)]
        subprocess.run([*inside, *command, *(["--private"] if inside else [])], check=True, env=environment)
        row: dict[str, Any] = json.loads(out.read_text())
        return row


def show(figures: dict[str, Any]) -> None:
    """A table for each number of ranks; bytes are those of all ranks together."""
    for world, methods in figures["ranks"].items():
        print(f"\n{world} ranks, {figures['steps']} steps, {figures['every']} in a round; KB a step, all ranks")
        plain = [(run["kernel"] or 0) for run in methods.get("bf16 hook", {}).values()]
        for method, runs in methods.items():
            sent = [run["kernel"] or run["ledger"] or 0 for run in runs.values()]
            fewer = f"{mean(plain) / mean(sent):8.1f}x" if plain and mean(sent) else f"{'':9}"
            losses = "  ".join(f"{run['loss']:.4f}" for run in runs.values())
            equal = "" if all(run["equal"] for run in runs.values()) else "  NOT EQUAL"
            print(f"  {method:28}{mean(sent) / 1e3:10.2f}{fewer}  {losses}{equal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a directory with tinyshakespeare; without it the standard library")
    parser.add_argument("--worlds", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--every", type=int, default=30, help="steps of a round")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--only", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--out", type=Path, default=Path("results/local_steps.json"))
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--private", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        sys.exit(fork_ranks(args))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"ranks": {}}
    parameters = sum(one.numel() for one in GPT(SHAPE).parameters())
    figures |= {"machine": machine(), "date": date.today().isoformat(), "parameters": parameters}
    figures |= {"text": text(args.data)[0], "steps": args.steps, "every": args.every, "batch": BATCH}
    for seed in args.seeds:
        for world in args.worlds:
            for method in args.only:
                began = time.perf_counter()
                row = measure(args, method, world, seed)
                figures["ranks"].setdefault(str(world), {}).setdefault(method, {})[str(seed)] = row
                args.out.write_text(json.dumps(figures, indent=1))
                took = time.perf_counter() - began
                print(f"{world} ranks, seed {seed}, {method}: {row['loss']:.4f}, {took:.0f} s", file=sys.stderr)
    show(figures)


if __name__ == "__main__":
    main()
