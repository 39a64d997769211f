"""Gradients in steps of the shared second moment: bits of each hop, and what training loses.

    python -m lab.studies.gradients.moments              # about fifteen minutes on two cores
    python -m lab.studies.gradients.moments --quick      # the same code in some seconds
    python -m lab.studies.gradients.moments --report     # the tables of what was written
    python -m lab.studies.gradients.moments --tasks gpt --before 0 --steps 400 --only none q4:64 "v0.7 after 100"

Real processes on gloo train a small GPT on text and a ResNet-20 on images with AdamW. All ways to send gradients start
from one trained state of their seed and see the same batches. So the loss of held-out data, the mean of four
evaluations, is compared with that of uncompressed gradients, batch by batch. Bits are those of messages behind the
steps in which "v0.7" sends as "q4:64" does.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lab.studies.harness import default_data, fork_ranks, machine
from lab.studies.workloads import cosine, evaluating, fingerprint, shuffled
from lab.studies.workloads.image import CROP, ResNet, augmented, cifar, classify, normal
from lab.studies.workloads.text import drawn, loss_of, text, windows
from shrinkpoint.comm import compress_ddp, moment_allreduce
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

NAMES = ("none", "q4:64", "q3:64", "q2:64", "v0.5", "v0.7", "v1")
WARMUP = 20
"""Steps that "v0.7" sends as "q4:64", unless its row names another number: the state has second moments already."""
SETTLED = WARMUP + 10
"""Steps before bits are counted: the scales of steps have found their size."""
EVALUATIONS = 4
PEAKS = {"gpt": 2e-3, "images": 2e-3}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What ranks train.

    Attributes:
        model: makes the model of a seed.
        batch: of a seed and a step, for all ranks.
        loss: of a model on a batch.
        test: the loss of held-out data, in nats.
        before: steps of the state that all start from.
    """

    model: Callable[[int], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    test: Callable[[nn.Module], float]
    before: int


def gpt(data: Path) -> Task:
    """A GPT of 0.12 M parameters: 16 windows of 32 bytes a rank."""
    _, whole = text(data)
    shape = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
    cut = int(0.9 * len(whole))
    held = windows(whole[cut:], shape.context, 768)

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(shape)

    def batch(seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        return drawn(whole[:cut], 16 * dist.get_world_size(), shape.context, generator)

    return Task(model, batch, lambda net, pair: net(*pair), lambda net: loss_of(net, held), 400)


def images(data: Path) -> Task:
    """A ResNet-20 of 0.27 M parameters on crops of CIFAR-10: 16 images a rank."""
    pixels, classes = cifar(data, "train")
    held, labels = cifar(data, "test")
    pairs = [
        (normal(x[:, :, 4:28, 4:28]), y) for x, y in zip(held[:1000].split(250), labels[:1000].split(250), strict=True)
    ]

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ResNet(3).to(memory_format=torch.channels_last)

    def batch(seed: int, step: int) -> Batch:
        chosen = shuffled(len(classes), 16 * dist.get_world_size(), step, seed)
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        return augmented(pixels[chosen], generator, CROP), classes[chosen]

    def test(net: nn.Module) -> float:
        with evaluating(net):
            return fmean(float(classify(net, pair)) for pair in pairs)

    return Task(model, batch, classify, test, 300)


TASKS: dict[str, Callable[[Path], Task]] = {"gpt": gpt, "images": images}


def train(
    task: Task, name: str, seed: int, span: range, end: int, peak: float, state: Any = None
) -> tuple[dict[str, Any], Any]:
    """One training of this rank; what is returned is alike on all, but for seconds.

    Args:
        end: the step at which the learning rate is a tenth of its peak.
        state: of model and optimizer at the first step; None to begin.

    Returns:
        The figures, and the state after the last step.
    """
    rank, net = dist.get_rank(), task.model(seed)
    name, _, warmup = name.partition(" after ")
    moment_allreduce.WARMUP_STEPS = int(warmup or WARMUP)
    optimizer = torch.optim.AdamW(net.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    if state is not None:
        net.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    replicas = DDP(net, bucket_cap_mb=2)
    handle = None if name == "none" else compress_ddp(replicas, name, optimizer=optimizer)
    factor, losses, began = cosine(20, end, 0.1), [], [0, 0, 0]
    points = {span.stop - 1 - at * len(span) // (2 * EVALUATIONS) for at in range(EVALUATIONS)}
    for step in span:
        if handle is not None and step == span.start + SETTLED:
            began = counted(handle)
        for group in optimizer.param_groups:
            group["lr"] = peak * factor(step)
        size = len((batch := task.batch(seed, step))[1]) // dist.get_world_size()
        optimizer.zero_grad()
        task.loss(replicas, tuple(side[rank * size : (rank + 1) * size] for side in batch)).backward()  # type: ignore[arg-type]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step in points and state is not None:
            losses.append(task.test(net) if rank == 0 else 0.0)
    prints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(nn.ParameterList(net.parameters())))
    figures = {"loss": fmean(losses) if losses else None, "equal": len(set(prints)) == 1}
    if handle is not None:
        raw, *wires = (after - before for after, before in zip(counted(handle), began, strict=True))
        figures["bits"] = [32 * wire / raw for wire in wires]
    return figures, (copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()))


def counted(handle: Any) -> list[int]:
    """Bytes of tensors on one hop, and of the messages of both."""
    first, second = (handle.link_stats[hop] for hop in ("first hop", "second hop"))
    return [first.raw_bytes, first.wire_bytes, second.wire_bytes * first.raw_bytes // max(1, second.raw_bytes)]


def of_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.ranks)
    rows: dict[str, dict[str, Any]] = {}
    for kind in args.tasks:
        task = TASKS[kind](args.data)
        before, steps = (8, SETTLED + 8) if args.quick else (task.before, args.steps)
        before = before if args.before is None else args.before
        for seed in args.seeds:
            _, state = train(task, "none", seed, range(before), before + steps, PEAKS[kind])
            for name in args.only:
                span = range(before, before + steps)
                figures, _ = train(task, name, seed, span, span.stop, PEAKS[kind], state)
                rows.setdefault(kind, {}).setdefault(name, []).append(figures)
                if rank == 0:
                    print(kind, seed, name, figures, file=sys.stderr, flush=True)
            if rank == 0:
                document = {"ranks": args.ranks, "steps": steps, "seeds": args.seeds, "torch": torch.__version__}
                document |= {"machine": machine(), "date": date.today().isoformat(), "tasks": rows}
                args.out.write_text(json.dumps(document, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def report(document: Mapping[str, Any]) -> None:
    """A table for each task: mean rise over seeds, each seed's, and bits."""
    for kind, rows in document["tasks"].items():
        plain = [run["loss"] for run in rows["none"]]
        print(
            f"\n| {kind}: loss {fmean(plain):.4f} | bits: first hop, second hop | times fewer | rise, nats | by seed |"
        )
        print("|---|---|---|---|---|")
        for name, runs in rows.items():
            rises = [run["loss"] - loss for run, loss in zip(runs, plain, strict=True)]
            if name == "none":
                continue
            bits = [fmean(run["bits"][hop] for run in runs) for hop in (0, 1)]
            error = stdev(rises) / len(rises) ** 0.5 if len(rises) > 1 else 0.0
            each = ", ".join(f"{rise:+.4f}" for rise in rises)
            equal = "" if all(run["equal"] for run in runs) else " RANKS DIFFER"
            cells = (
                f"{bits[0]:.2f}, {bits[1]:.2f}",
                f"{64 / sum(bits):.1f}",
                f"{fmean(rises):+.4f} ± {error:.4f}",
                each,
            )
            print(f"| `{name}`{equal} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=[*TASKS])
    parser.add_argument(
        "--only", nargs="*", default=[*NAMES], help='rows, first none; "v0.7 after 5": 5 steps of q4:64'
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--before", type=int, help="steps of the state that all start from")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, default=Path("results/gradient_moments.json"))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.report and fork_ranks(args.ranks, lambda rank, folder: of_rank(rank, args, folder)):
        sys.exit(1)
    report(json.loads(args.out.read_text()))


if __name__ == "__main__":
    main()
