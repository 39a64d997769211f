"""What fine-tuning makes of a pre-trained state that was compressed once, without gradients, history or delta.

    python -m lab.studies.transfer.run            # every task, system and seed; stop and start it as you like
    python -m lab.studies.transfer.run --quick    # a few steps each

For each system the pre-trained state is saved with `sp.save(state, path, scheme=...)`, while the search looks at its
quality on its own task; it is read back with `sp.load` and fine-tuned from several seeds. The coarsest and the finest
setting of each space are there too, from one seed: what a search may choose lies between them. A finished run is a
line of results/transfer.jsonl. Tasks: published CIFAR-10 ResNets to Fashion-MNIST, and a language model, pre-trained
here (a minute, kept beside the ledger), to SST-2.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shrinkpoint as sp
from lab.studies import systems, workloads
from lab.studies.harness import columns, default_data
from lab.studies.harness.ledger import Ledger, version
from lab.studies.workloads import Batch, Stream
from lab.studies.workloads import image as workload_image
from lab.studies.workloads import sentence as workload_sentence
from shrinkpoint_lab.bench.systems import CallTimer

State = dict[str, Tensor]
FILES = ("workloads/__init__.py", "workloads/image.py", "workloads/sentence.py", "transfer/run.py")


@dataclass(frozen=True)
class Job:
    """One fine-tuning; system "none" starts from the state itself."""

    task: str
    system: str
    seed: int = 0
    threshold: float = 0.05
    quick: bool = False


@dataclass(frozen=True)
class Task:
    """A pre-trained model, its own quality, and what it is fine-tuned to.

    Attributes:
        state: the pre-trained state.
        source: quality of a state on the task that it was pre-trained on.
        start: a state to a model with a new head.
        stream: seed to batches.
        target: quality of a fine-tuned model, in per cent.
        optimizer: of the fine-tuned model's parameters.
    """

    name: str
    state: State = field(repr=False)
    source: Callable[[State], float] = field(repr=False)
    source_higher: bool
    start: Callable[[State], nn.Module] = field(repr=False)
    stream: Callable[[int], Stream] = field(repr=False)
    target: Callable[[nn.Module], float] = field(repr=False)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(repr=False)
    steps: int


def resnet_to_fashion(depth: int, data: Path, *, quick: bool) -> Task:
    """A published ResNet to Fashion-MNIST, 64 images a step; SGD, momentum 0.9, weight decay 5e-4, peak 0.02."""
    model = workload_image.pretrained(data, depth)
    images, classes = workload_image.cifar(data, "test")
    count = 100 if quick else 500
    seen = images[:count], classes[:count]
    (train, labels), (test, right) = workload_image.fashion(data)
    test, right = (test[:250], right[:250]) if quick else (test, right)

    def source(state: State) -> float:
        model.load_state_dict(state)
        return workload_image.accuracy(model, seen)

    def start(state: State) -> nn.Module:
        net = workload_image.ResNet((depth - 2) // 6).to(memory_format=torch.channels_last)
        net.load_state_dict({name: value for name, value in state.items() if "linear" not in name}, strict=False)
        return net

    def stream(seed: int) -> Stream:
        def draw(generator: torch.Generator, number: int) -> Batch:
            chosen = workloads.shuffled(len(labels), 64, number, seed)
            return workload_image.augmented(F.pad(train[chosen], (2, 2, 2, 2)), generator, 32), labels[chosen]

        return Stream(draw, seed)

    return Task(
        f"resnet{depth}",
        _copied(model),
        source,
        True,
        start,
        stream,
        lambda net: workload_image.accuracy(net, (test, right)),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4),
        3 if quick else {20: 300, 56: 110}[depth],
    )


def reader_to_sst2(data: Path, cache: Path, *, quick: bool) -> Task:
    """The language model to SST-2, 32 sentences a step; AdamW, weight decay 0.01, peak 5e-4."""
    reader = _pretrained(data, cache, 5 if quick else 500)

    def source(state: State) -> float:
        reader.load_state_dict(state)
        return workload_sentence.language_loss(reader, data, 8 if quick else 96)

    def start(state: State) -> nn.Module:
        fresh = workload_sentence.Reader()
        fresh.load_state_dict(state)
        return workload_sentence.Classifier(fresh)

    return Task(
        "reader",
        _copied(reader),
        source,
        False,
        start,
        lambda seed: workload_sentence.stream(data, seed, 32),
        lambda model: workload_sentence.accuracy(model, data),
        lambda model: torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01),
        3 if quick else 700,
    )


def _copied(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _pretrained(data: Path, cache: Path, steps: int) -> workload_sentence.Reader:
    path = cache / f"reader-{version('workloads/sentence.py', core=False)}-{steps}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sp.save(workload_sentence.pretrain(data, steps).state_dict(), path)
    reader = workload_sentence.Reader()
    reader.load_state_dict(sp.load(path))
    return reader.eval()


def task(name: str, data: Path, cache: Path, *, quick: bool) -> Task:
    if name == "reader":
        return reader_to_sst2(data, cache, quick=quick)
    return resnet_to_fashion(int(name.removeprefix("resnet")), data, quick=quick)


def compressed(work: Task, job: Job, threads: int) -> tuple[State, dict[str, Any]]:
    """The state as a reader of the file gets it, and what the file cost."""
    base = work.source(work.state)
    if job.system == "none":
        return work.state, {"ratio weights": None, "ratio full": None, "source": base, "source base": base}
    watch = CallTimer(work.source)
    scheme = systems.scheme(job.system, threshold=job.threshold, evaluate=watch, higher_is_better=work.source_higher)
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-transfer-") as folder:
        path = Path(folder) / "state.safetensors"
        began = time.perf_counter()
        report = sp.save(work.state, path, scheme=scheme, threads=threads)
        seconds = time.perf_counter() - began
        state = sp.load(path)
    weights = report.roles["parameter"]
    return state, {
        "ratio weights": weights.raw / weights.stored,
        "ratio full": report.ratio,
        "source": work.source(state),
        "source base": base,
        "save seconds": seconds,
        "evaluations": watch.lap(),
        "search": report.loss_report,
    }


def fine_tune(work: Task, state: State, seed: int) -> dict[str, Any]:
    """The quality after fine-tuning, and the losses on the way."""
    workloads.seed_everything(seed, torch.get_num_threads())
    model, stream, losses = work.start(state), work.stream(seed), []
    optimizer = work.optimizer(model)
    factor = workloads.cosine(max(1, work.steps // 10), work.steps, 0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    began = time.perf_counter()
    for _ in range(work.steps):
        words, labels = stream.draw()
        loss = F.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    return {"target": work.target(model), "train loss": losses[:: max(1, len(losses) // 50)], "train seconds": seconds}


def grid(args: argparse.Namespace) -> list[Job]:
    names = ("none", "lossless", *systems.SYSTEMS, systems.WIDER, systems.FISHER, *systems.ENDS)
    seeds = args.seeds[:1] if args.quick else args.seeds
    of = dict.fromkeys(("lossless", *systems.ENDS), seeds[:1])  # lossless: as from the state itself, bit for bit
    jobs = [(work, name, seed) for work in args.tasks for name in names for seed in of.get(name, seeds)]
    return [Job(*job, args.threshold, args.quick) for job in jobs]


def run(jobs: list[Job], ledger: Ledger, args: argparse.Namespace) -> None:
    """What is not done yet; each state is compressed once for all its seeds."""
    made: dict[str, Task] = {}
    states: dict[tuple[str, str], tuple[State, dict[str, Any]]] = {}
    for job in jobs:
        done, there = ledger.find(asdict(job), version(*FILES)) is not None, systems.available(job.system)
        print(f"{'done' if done else 'to do' if there else 'no such scheme yet':8}  {job}", flush=True)
        if done or not there:
            continue
        began = time.perf_counter()
        if job.task not in made:
            made[job.task] = task(job.task, args.data, ledger.path.parent / "transfer", quick=args.quick)
        key = job.task, job.system
        if key not in states:
            states[key] = compressed(made[job.task], job, args.threads)
        state, facts = states[key]
        result = {**facts, **fine_tune(made[job.task], state, job.seed), "seconds": time.perf_counter() - began}
        ledger.add(asdict(job), version(*FILES), result)
        print(f"          {result['target']:.2f} %, {time.perf_counter() - began:.0f} s", flush=True)


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of each task and system, over its seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["settings"]["task"], record["settings"]["system"]), []).append(record)
    return [_row(*key, found) for key, found in groups.items()]


def _row(work: str, system: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    targets = [record["target"] for record in found]
    first = found[0]
    return {
        "task": work,
        "system": system,
        "seeds": len(found),
        "target": fmean(targets),
        "deviation": stdev(targets) if len(targets) > 1 else None,
        **{key: first.get(key) for key in ("ratio weights", "ratio full", "source", "source base", "save seconds")},
        "trials": first.get("evaluations", {}).get("calls"),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a line for each task and system."""
    head = [
        "task, system",
        "weights x",
        "full x",
        "own task",
        "before",
        "fine-tuned %",
        "deviation",
        "trials",
        "save s",
    ]
    keys = ("ratio weights", "ratio full", "source", "source base", "target", "deviation", "trials", "save seconds")
    cells = [[f"{r['task']}, {r['system']}", *("-" if r[k] is None else f"{r[k]:.2f}" for k in keys)] for r in rows]
    print(f"\n{columns(head, cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, help="ledger; default results/transfer.jsonl")
    parser.add_argument("--tasks", nargs="*", default=["resnet56", "reader"], help="resnet20, resnet56, reader")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--threshold", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps: does it all run?")
    parser.add_argument("--any-version", action="store_true", help="runs of older code count as done")
    parser.add_argument("--report", action="store_true", help="only the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    version(*FILES)  # before anybody edits
    out = args.out or Path(f"results/transfer{'-quick' if args.quick else ''}.jsonl")
    ledger, jobs = Ledger(out, args.any_version), grid(args)
    if not args.report:
        run(jobs, ledger, args)
    found = [record for job in jobs if (record := ledger.find(asdict(job), version(*FILES)))]
    if found:
        show(summary(found))


if __name__ == "__main__":
    main()
