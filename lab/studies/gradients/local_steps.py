"""Local steps of 2 to 8 ranks beside DDP: what the outer step makes of more ranks, at the same number of steps.

    python -m lab.studies.gradients.local_steps                    # hours on two cores; resumable
    python -m lab.studies.gradients.local_steps --ranks 8 --tasks gpt --seeds 0 --only ddp 30/1/0.9/q4:64
    python -m lab.studies.gradients.local_steps --quick            # the same code in some seconds
    python -m lab.studies.gradients.local_steps --report           # the table of what was written

Real processes on gloo train a small GPT on text and a ResNet-8 on images. A row is "ddp", which averages every
gradient, or the rounds of LocalSteps: steps, outer learning rate, outer momentum ("-": the default, by ranks and
steps), and compressor. All rows of a seed have the same learning rates and batches; each rank draws its own. The GPT
begins with weights that one process has trained. The loss is that of data no rank trained on, after the last step;
running averages of BatchNorm are averaged for it.
Runs that are in the results are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from lab.studies.harness import default_data, fork_ranks, machine
from lab.studies.workloads import cosine, evaluating, fingerprint
from lab.studies.workloads.image import CROP, ResNet, augmented, cifar, classify, normal
from lab.studies.workloads.text import drawn, loss_of, text, windows
from shrinkpoint.comm import LocalSteps, OuterSGD
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

ROWS = ("ddp", "30/1/-/q4:64", "30/0.7/0.3/q4:64")
STEPS, WARMUP = 900, 30
FIRST_STEPS, FIRST_BATCH = 2000, 8
"""Steps of the weights that the GPT begins with, and windows of each."""
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What ranks train.

    Attributes:
        build: makes the model and its optimizer, after the seed is set.
        draw: makes a batch of a rank.
        loss: of a model on a batch.
        test: the loss of held-out data, in nats.
        floor: the last learning rate over the peak.
        clip: the largest norm of a rank's gradient; None for any.
    """

    build: Callable[[], tuple[nn.Module, Optimizer]]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    test: Callable[[nn.Module], float]
    floor: float
    clip: float | None = None


def gpt(data: Path, first_steps: int) -> Task:
    """A GPT of 0.12 M parameters: 4 windows of 64 bytes a rank; AdamW at 3e-3."""
    _, whole = text(data)
    shape = GPTConfig(layers=2, width=64, heads=4, context=64, dropout=0.0)
    cut = int(0.9 * len(whole))
    held = windows(whole[cut:], shape.context, 512)

    def build() -> tuple[nn.Module, Optimizer]:
        model = GPT(shape)
        return model, torch.optim.AdamW(model.param_groups(0.1), lr=3e-3, betas=(0.9, 0.95))

    def draw(generator: torch.Generator, size: int = 4) -> Batch:
        return drawn(whole[:cut], size, shape.context, generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(*batch)
        return out

    def first_state() -> dict[str, Tensor]:
        torch.manual_seed(1000)
        model, optimizer = build()
        generator = torch.Generator().manual_seed(1000)
        for step in range(first_steps):
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 3e-3 * min(1.0, (step + 1) / WARMUP)
            optimizer.zero_grad()
            loss(model, draw(generator, FIRST_BATCH)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return model.state_dict()

    first = first_state()

    def continued() -> tuple[nn.Module, Optimizer]:
        model, optimizer = build()
        model.load_state_dict(first)
        return model, optimizer

    return Task(continued, draw, loss, lambda model: loss_of(model, held), floor=0.1, clip=1.0)


def images(data: Path, _: int) -> Task:
    """A ResNet-8 of 75,290 parameters from scratch: 32 crops of CIFAR-10 a rank; SGD at 0.05, momentum 0.9."""
    pixels, classes = cifar(data, "train")
    held, labels = cifar(data, "test")
    pairs = [(normal(x[:, :, 4:28, 4:28]), y) for x, y in zip(held.split(250), labels.split(250), strict=True)]

    def build() -> tuple[nn.Module, Optimizer]:
        model = ResNet(1, stem=2).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(classes), (32,), generator=generator)
        return augmented(pixels[chosen], generator, CROP), classes[chosen]

    def test(model: nn.Module) -> float:
        with evaluating(model):
            return fmean(float(classify(model, pair)) for pair in pairs)

    return Task(build, draw, classify, test, floor=0.0)


TASKS: dict[str, Callable[[Path, int], Task]] = {"gpt": gpt, "images": images}


def train(task: Task, row: str, seed: int, steps: int) -> dict[str, Any]:
    """One run of this rank; the figures of rank 0 count."""
    torch.manual_seed(seed)
    model, optimizer = task.build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(WARMUP, steps, task.floor))
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    parallel, local = model, None
    if row == "ddp":
        parallel = DDP(model, broadcast_buffers=False)
    else:
        every, lr, momentum, compressor = row.split("/")
        outer = OuterSGD(float(lr), None if momentum == "-" else float(momentum))
        local = LocalSteps(model, optimizer, int(every), outer=outer, compressor=compressor)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(parallel, task.draw(generator)).backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        if local is None:
            optimizer.step()
        else:
            local.step()
        scheduler.step()
    prints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(nn.ParameterList(model.parameters())))
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())
    figures = {"loss": task.test(model), "equal": len(set(prints)) == 1, "steps": steps}
    if local is not None:
        figures["bytes a step"] = sum(stats.wire_bytes for stats in local.link_stats.values()) / steps
    return figures


def of_rank(rank: int, ranks: int, task: Task, row: str, seed: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    figures = train(task, row, seed, steps)
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def measure(task: Task, row: str, ranks: int, seed: int, steps: int) -> dict[str, Any]:
    """One run of all ranks."""
    figures: dict[str, Any] = {}

    def work(rank: int, folder: str) -> None:
        of_rank(rank, ranks, task, row, seed, steps, folder)

    def collect(folder: str) -> None:
        figures.update(json.loads(Path(folder, "figures.json").read_text()))

    if fork_ranks(ranks, work, collect=collect):
        sys.exit(1)
    return figures


def report(document: dict[str, Any]) -> None:
    """A table: rises above DDP with the same seed."""
    print("| task | ranks | row | bytes a step that a rank sends | above DDP, % (each seed) |\n|---|---|---|---|---|")
    for name, worlds in document["tasks"].items():
        for ranks, rows in worlds.items():
            plain = rows.get("ddp", {})
            for row, runs in rows.items():
                rises = [100 * (run["loss"] / plain[seed]["loss"] - 1) for seed, run in runs.items() if seed in plain]
                if row == "ddp" or not rises:
                    continue
                sent = fmean(run["bytes a step"] for run in runs.values())
                equal = "" if all(run["equal"] for run in runs.values()) else " RANKS DIFFER"
                each = ", ".join(f"{rise:+.2f}" for rise in rises)
                print(f"| {name} | {ranks} | `{row}`{equal} | {sent:.0f} | {fmean(rises):+.2f} ({each}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=[*TASKS])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[*ROWS], help='rows: "ddp", or every/lr/momentum/compressor')
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, default=Path("results/local_steps_ranks.json"))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"tasks": {}}
    if not args.report:
        torch.set_num_threads(1)
        steps, first_steps = (60, 10) if args.quick else (STEPS, FIRST_STEPS)
        tasks = {name: TASKS[name](args.data, first_steps) for name in args.tasks}
        for seed, ranks, name, row in product(args.seeds, args.ranks, tasks, args.only):
            runs = document["tasks"].setdefault(name, {}).setdefault(str(ranks), {}).setdefault(row, {})
            if str(seed) in runs and runs[str(seed)]["steps"] == steps:
                continue
            began = time.perf_counter()
            runs[str(seed)] = figures = measure(tasks[name], row, ranks, seed, steps)
            document |= {"machine": machine(), "date": date.today().isoformat()}
            args.out.write_text(json.dumps(document, indent=1))
            took = time.perf_counter() - began
            print(f"{name}, {ranks} ranks, seed {seed}, {row}: {figures['loss']:.4f}, {took:.0f} s", file=sys.stderr)
    report(document)


if __name__ == "__main__":
    main()
