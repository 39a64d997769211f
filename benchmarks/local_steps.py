"""Local steps beside averaging every gradient: bytes and losses of three trainings, at the same number of tokens.

    python benchmarks/local_steps.py ../shared/data --tasks continued image   # an hour on one core; resumable
    python benchmarks/local_steps.py ../shared/data --tasks continued --worlds 4 8 --only "bf16 hook" "SparseLoCo"
    python benchmarks/local_steps.py ../shared/data --seeds 3 --only 30/0.9/0.6/q4:64 --out results/tuning.json

Real gloo processes train what local_steps_tasks.py has, each on data of its own. All methods have the same learning
rates and the same batches. Bytes are those that the kernel counts on the loopback interface of a network namespace of
the run's own, headers and what ranks agree on included; where there can be none (it takes root), those of our ledger.
The loss is that of data no rank trained on, after the last step, at the global weights; running averages of BatchNorm
are averaged over the ranks for it, with every method (the last number of a curve is the loss with those of rank 0).
Runs that are in results/local_steps.json are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from gradient_compression import bf16_under_another_name, counters, namespace
from local_steps_tasks import TASKS, Task, average_buffers
from lossless_speed import machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import cosine

from shrinkpoint.comm import LocalSteps, OuterSGD, compress_ddp


@dataclass(frozen=True)
class Local:
    """Arguments of LocalSteps."""

    every: int = 30
    lr: float = 0.7
    momentum: float = 0.9
    compressor: str | None = None

    @classmethod
    def from_text(cls, words: str) -> Local:
        """`every/lr/momentum`, and `/compressor` if there is one."""
        every, lr, momentum, *rest = words.split("/")
        return cls(int(every), float(lr), float(momentum), rest[0] if rest else None)


BASELINE = "bf16 hook"
SPARSE = "ef(top3.125:4096:q2:64, decay=0.95)"
METHODS: dict[str, Local | str] = {
    BASELINE: BASELINE,
    "DiLoCo, momentum .3": Local(30, 0.7, 0.3),
    "DiLoCo, momentum .3, q4:64": Local(30, 0.7, 0.3, "q4:64"),
    "averages, q4:64": Local(30, 1.0, 0.0, "q4:64"),
    "SparseLoCo, every 5": Local(5, 1.0, 0.0, SPARSE),
    "SparseLoCo": Local(30, 1.0, 0.0, SPARSE),
    "DiLoCo, q4:64": Local(compressor="q4:64"),
    "DiLoCo, momentum .3, q4:64, every 5": Local(5, 0.7, 0.3, "q4:64"),
    "DiLoCo, momentum .3, q4:64, every 15": Local(15, 0.7, 0.3, "q4:64"),
    "DiLoCo, momentum .3, q4:64, every 60": Local(60, 0.7, 0.3, "q4:64"),
}
"""DDP's hooks by their names, and arguments of LocalSteps."""
LOOKS = 5
"""How often the loss is measured in a run, at equal distances."""


def settings_of(method: str) -> Local | str:
    return METHODS[method] if method in METHODS else Local.from_text(method)


class Replica:
    """The model of a rank, and how it takes steps together with the others; alone without settings."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Local | str | None) -> None:
        self.model, self._optimizer, self.parallel = model, optimizer, model
        self._local: LocalSteps | None = None
        self.ledgers: dict[str, Any] | None = None
        if isinstance(settings, Local):
            outer = OuterSGD(settings.lr, settings.momentum)
            self._local = LocalSteps(model, optimizer, settings.every, outer=outer, compressor=settings.compressor)
            self.ledgers = dict(self._local.link_stats)
        elif settings is not None:
            self._average_gradients(settings)

    def _average_gradients(self, hook: str) -> None:
        self.parallel = parallel = DistributedDataParallel(self.model, bucket_cap_mb=2, broadcast_buffers=False)
        if hook == BASELINE:
            parallel.register_comm_hook(None, bf16_under_another_name)
        else:
            self.ledgers = dict(compress_ddp(parallel, hook).link_stats)

    def step(self) -> None:
        if self._local is None:
            self._optimizer.step()
        else:
            self._local.step()


def train(task: Task, settings: Local | str, args: argparse.Namespace) -> dict[str, Any]:
    """One run, as this rank sees it; what is summed over ranks is the same on all."""
    rank, steps = dist.get_rank(), args.steps or task.steps
    torch.manual_seed(args.seed)
    model, optimizer = task.build(args.peak or task.peak)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(task.warmup, steps, task.floor))
    replica = Replica(model, optimizer, settings)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    began, curve = counters(replica.ledgers, args.private), []
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        task.loss(replica.parallel, task.draw(generator)).backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        replica.step()
        scheduler.step()
        if rank == 0 and number % (steps // LOOKS) == 0:
            curve.append(task.test(model)["loss"])
    ended = counters(replica.ledgers, args.private)
    wire, kernel, _ = (after - before for after, before in zip(ended, began, strict=True))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (digest, wire))
    average_buffers(model)
    return {
        **(task.test(model) if rank == 0 else {}),
        "curve": curve,
        "equal": len({one for one, _ in ranks}) == 1,
        "ledger": sum(one for _, one in ranks) / steps if replica.ledgers else None,
        "kernel": kernel / steps if args.private else None,
        "steps": steps,
        "settings": asdict(settings) if isinstance(settings, Local) else settings,
        "date": date.today().isoformat(),
    }


def run_rank(rank: int, world: int, task: Task, settings: Local | str, args: argparse.Namespace, folder: str) -> None:
    warnings.simplefilter("ignore")
    where = f"tcp://127.0.0.1:{args.port}" if args.private else f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    row = train(task, settings, args)
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def fork(jobs: Sequence[Callable[[], None]]) -> None:
    """Call each in a process of its own, all at once: importing torch takes as long as a short run."""
    children = []
    for job in jobs:
        children.append(os.fork())
        if children[-1] == 0:
            try:
                job()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"exit codes {codes}")


def measure(task: Task, settings: Local | str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    args.port += 1
    with tempfile.TemporaryDirectory() as folder:
        fork([partial(run_rank, rank, world, task, settings, args, folder) for rank in range(world)])
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text())
        return row


def show(figures: dict[str, Any]) -> None:
    """A table for each task and number of ranks; bytes are those of all ranks together."""
    for task, found in figures["tasks"].items():
        for world, methods in sorted(found["ranks"].items(), key=lambda item: int(item[0])):
            print(f"\n{task}, {world} ranks, {found['parameters']} parameters; KB a step, all ranks")
            base = methods.get(BASELINE, {})
            for method, runs in methods.items():
                print(line(method, runs, base))


def line(method: str, runs: dict[str, Any], base: dict[str, Any]) -> str:
    """A method's bytes, its losses, and their mean difference to those of the same seeds with every gradient."""
    sent, plain = (
        mean(run["kernel"] or run["ledger"] or 0 for run in some.values()) if some else 0 for some in (runs, base)
    )
    fewer = f"{plain / sent:8.1f}x" if plain and sent else f"{'':9}"
    rises = [100 * (run["loss"] / base[seed]["loss"] - 1) for seed, run in runs.items() if seed in base]
    rise = f"{mean(rises):+7.2f} %" if rises else f"{'':9}"
    rise += f" +- {stdev(rises):.2f}" if len(rises) > 1 else f"{'':8}"
    losses = "  ".join(f"{run['loss']:.4f}" for run in runs.values())
    accuracies = "  ".join(f"{run['accuracy']:.1f}" for run in runs.values() if "accuracy" in run)
    equal = "" if all(run["equal"] for run in runs.values()) else "  NOT EQUAL"
    return f"  {method:46}{sent / 1e3:10.2f}{fewer}{rise}   {losses}   {accuracies}{equal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", type=Path, help="a directory with tinyshakespeare (without it the standard library) and cifar10"
    )
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--worlds", type=int, nargs="+", default=(2,))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--only", nargs="+", default=tuple(METHODS), help="names, or every/lr/momentum/compressor")
    parser.add_argument("--steps", type=int, help="not the task's own number; a multiple of 5")
    parser.add_argument("--peak", type=float, help="not the task's own learning rate")
    parser.add_argument("--out", type=Path, default=Path("results/local_steps.json"))
    parser.add_argument("--private", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.private and (inside := namespace()):
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "GLOG_minloglevel": "2",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        os.execvpe(inside[0], [*inside, sys.executable, *sys.argv, "--private"], environment)
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    figures |= {"machine": machine(), "date": date.today().isoformat()}
    args.port, tasks = 29500, {name: TASKS[name](args.data) for name in args.tasks}
    for task in tasks.values():
        fork([task.prepare])
    for seed, world, (name, task), method in product(args.seeds, args.worlds, tasks.items(), args.only):
        known = figures.setdefault("tasks", {}).setdefault(name, describe(task))
        runs = known["ranks"].setdefault(str(world), {}).setdefault(method, {})
        if str(seed) in runs and runs[str(seed)]["steps"] == (args.steps or task.steps):
            continue
        began, args.seed = time.perf_counter(), seed
        runs[str(seed)] = row = measure(task, settings_of(method), world, args)
        args.out.write_text(json.dumps(figures, indent=1))
        took = time.perf_counter() - began
        print(f"{name}, {world} ranks, seed {seed}, {method}: {row['loss']:.4f}, {took:.0f} s", file=sys.stderr)
    show(figures)


def describe(task: Task) -> dict[str, Any]:
    parameters = sum(one.numel() for one in task.build(task.peak)[0].parameters())
    return {"parameters": parameters, "batch": task.batch, **task.facts(), "ranks": {}}


if __name__ == "__main__":
    main()
