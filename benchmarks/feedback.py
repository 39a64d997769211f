"""Rounding with error feedback, for one file alone: what it gains on a GPT and a published ResNet-56, and its time.

    python benchmarks/feedback.py                       # gpt, seeds 0 to 2; resnet; speed
    python benchmarks/feedback.py --only gpt --seeds 0

GPT: the state after 480 of 640 steps, calibrated on 12 batches of training text, measured on held-out text. ResNet-56:
the published weights, calibrated on 256 training images, measured on 500 and 2000 others; what a budget of 5 % made of
them is then fine-tuned to Fashion-MNIST (`transfer_learning.py`, where rivals are; a minute or more a seed). Speed:
blocks of GPT-2's shapes, in pairs. Writes results/feedback.json, after every row.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transfer_learning
import workload_image
import workload_text
import workloads
from lossless_report import table
from lossless_speed import machine
from torch import Tensor
from torch.nn import functional as F

import shrinkpoint as sp
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

Row = dict[str, Any]
ERRORS = (0.3, 0.6, 1.1, 2.0)
HEAD = ["", "weights x", "rise, or points lost", "on other data", "fine-tuned %", "save s"]


def saved(state: Any, scheme: Any) -> tuple[Any, Any, Row]:
    """The state as a reader gets it, the report of its save, and how long that took, also of the processor."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is what is measured
        began = time.perf_counter(), time.process_time()
        report = sp.save(state, f"{folder}/a.safetensors", scheme=scheme)
        times = {"seconds": time.perf_counter() - began[0], "processor seconds": time.process_time() - began[1]}
        return sp.load(f"{folder}/a.safetensors"), report, times


def gpt(data: Path, seed: int, steps: int, errors: Sequence[float] = ERRORS) -> Iterator[Row]:
    workload = workloads.named("gpt", data, quick=False)
    course = workload.build(seed)
    for _ in range(steps):
        workload.advance(course)
    fresh, (_, text) = workload.build(seed).model, workload_text.text(data)
    part, generator = text[: int(len(text) * (1 - workload_text.HELD_OUT))], torch.Generator().manual_seed(5)
    batches = [workload_text.drawn(part, 16, 64, generator) for _ in range(12)]

    def calibrate(state: Any) -> Iterator[Tensor]:
        fresh.load_state_dict(state["model"])
        return (fresh(*batch) for batch in batches)

    def forward_only(state: Any) -> None:
        fresh.load_state_dict(state["model"])
        with torch.no_grad():
            for batch in batches:
                fresh(*batch)

    def evaluate(state: Any) -> float:
        fresh.load_state_dict(state["model"])
        return workload.evaluate(fresh)

    weights = {"model": copy.deepcopy(course.model.state_dict())}
    whole = {**weights, "optimizer": copy.deepcopy(course.optimizer.state_dict())}
    base, base_test = workload.evaluate(course.model), workload.test(course.model)
    plans: list[tuple[str, Any, Any]] = [
        (f"plain, Adam's state, {e}", whole, sp.Fisher(relative_error=e)) for e in (0.3, 0.6)
    ]
    for name, state in (("Adam's state", whole), ("the weights alone", weights)):
        schemes = [(e, sp.Fisher(relative_error=e, calibrate=calibrate)) for e in errors]
        plans += [(f"feedback, {name}, {e}", state, scheme) for e, scheme in schemes]
    if tuple(errors) == ERRORS:
        plans += [
            (f"feedback, no losses, {e}", weights, sp.Fisher(relative_error=e, calibrate=forward_only))
            for e in (0.3, 0.6)
        ]
        plans += [
            (f"inshrinkerator {t:.1%}", weights, sp.Inshrinkerator(threshold=t, evaluate=evaluate))
            for t in (0.001, 0.003)
        ]
    for name, state, scheme in plans:
        loaded, report, times = saved(state, scheme)
        fresh.load_state_dict(loaded["model"])
        rises = workload.evaluate(fresh) - base, workload.test(fresh) - base_test
        row = {"name": f"gpt {seed}: {name}", "weights x": report.weights_ratio, **times}
        yield row | {"rise": rises[0], "other": rises[1]}


def resnet(data: Path, seeds: list[int]) -> Iterator[Row]:
    task = transfer_learning.resnet_to_fashion(56, data, quick=False)
    model = workload_image.pretrained(data, 56).eval()
    images, classes = workload_image.cifar(data, "test")
    train, labels = workload_image.cifar(data, "train")
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:256]

    def other(state: Any) -> float:
        model.load_state_dict(state)
        return workload_image.accuracy(model, (images[500:2500], classes[500:2500]))

    def calibrate(state: Any) -> Iterator[Tensor]:
        model.load_state_dict(state)
        return (F.cross_entropy(model(workload_image.normal(train[i])), labels[i]) for i in chosen.split(64))

    budget = sp.Fisher(budget="5%", calibrate=calibrate, evaluate=task.source, higher_is_better=True)
    plans = [("feedback, 5 %", budget)]
    plans += [(f"feedback, {e}", sp.Fisher(relative_error=e, calibrate=calibrate)) for e in (0.6, 0.7)]
    base, base_other, budgeted = task.source(task.state), other(task.state), dict[str, Any]()
    rows = []
    for name, scheme in plans:
        loaded, report, times = saved(task.state, scheme)
        role = report.roles["parameter"]
        row = {"name": f"resnet-56: {name}", "weights x": role.raw / role.stored, "rise": base - task.source(loaded)}
        row |= {"other": base_other - other(loaded), **times}
        budgeted = budgeted or loaded
        rows.append(row)
        yield row
    for seed in seeds:
        target = transfer_learning.fine_tune(task, budgeted, seed)["target"]
        rows[0]["target"] = [*rows[0].get("target", []), target]
        yield rows[0]


def speed(layers: int) -> Iterator[Row]:
    """GPT-2's blocks, with a vocabulary of bytes; weights as they are initialised, and Adam's state."""
    model = GPT(GPTConfig(layers=layers, width=768, heads=12, context=64, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters())
    with sp.Activations(model) as seen:
        x = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0))
        model(x[:, :-1], x[:, 1:]).backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    schemes = {
        "plain": sp.Fisher(relative_error=0.6),
        "feedback": sp.Fisher(relative_error=0.6, activations=seen),
    }
    runs: dict[str, list[Row]] = {name: [] for name in schemes}
    for _ in range(5):
        for name, scheme in schemes.items():
            _, report, times = saved(state, scheme)
            runs[name].append({"weights x": report.weights_ratio, **times})
    for name, rows in runs.items():
        yield {"name": f"{layers} blocks of GPT-2: {name}"} | {key: min(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--only", nargs="*", default=["gpt", "resnet", "speed"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--errors", nargs="*", type=float, default=list(ERRORS), help="other ones: without the rivals")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/feedback.json"))
    options = parser.parse_args()
    workloads.seed_everything(0, options.threads)
    found = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    for row in found["rows"]:  # of older files, in which all are of one machine
        row.setdefault("cpu", found["machine"]["cpu"])
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "gpt": lambda: chain.from_iterable(
            gpt(options.data, seed, options.steps, options.errors) for seed in options.seeds
        ),
        "resnet": lambda: resnet(options.data, options.seeds),
        "speed": lambda: speed(options.layers),
    }
    for name in options.only:
        for row in parts[name]():
            rows = {known["name"]: known for known in found["rows"]}
            rows[row["name"]] = {**row, "cpu": machine()["cpu"]}
            found = {"machine": machine(), "rows": [*rows.values()]}
            options.out.write_text(json.dumps(found, indent=1))
    cells = [
        [
            row["name"],
            f"{row['weights x']:.2f}",
            *(f"{row[key]:+.4f}" if key in row else "-" for key in ("rise", "other")),
            " ".join(f"{value:.2f}" for value in row.get("target", ())) or "-",
            f"{row['seconds']:.1f}",
        ]
        for row in found["rows"]
    ]
    print(table(HEAD, cells))


if __name__ == "__main__":
    main()
