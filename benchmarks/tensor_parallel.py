"""What compressing the all-reduces of tensor parallelism costs in quality, and what it is worth in time.

    python benchmarks/tensor_parallel.py quality            # trainings of a GPT, an hour on one core; resumable
    python benchmarks/tensor_parallel.py messages           # what ranks compute for an all-reduce, half a minute
    python benchmarks/tensor_parallel.py time               # as root, five minutes on two idle cores
    python benchmarks/tensor_parallel.py quality --quick    # toys, seconds

Quality: the byte-level GPT of wire_text.py is fine-tuned with attention and perceptron of each block split over ranks,
in one process with the bits of real ranks (tensor_parallel_model.py): in the forward pass partial activations are
summed twice a block, in the backward pass partial gradients of inputs. Both are compressed before they are added, and
so are the sums.

Messages: the least processor time of encoding, adding and decoding at one rank, and the rate of a link below which that
is less than the time it saves.

Time: real gloo processes in network namespaces (link_net.py), torch's DTensor and styles of tensor parallelism, alone
and compressed (tensor_parallel_worker.py). Results go to results/tensor_parallel.json; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import link_net
import tensor_parallel_model
import torch
import wire_text
import workloads
from lossless_speed import machine
from tensor_parallel_model import Messages
from wire_task import Task

SPECS = ("q8:64", "q4:64", "n4:64", "bf16")
WAYS = {"both": (True, True), "forward": (True, False), "backward": (False, True)}
WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
CASES = ("compute alone", "torch", "exact", "bf16", "q8:64", "q4:64", "n4:64")
LINKS = ("0:0", "100:0", "100:5", "1000:0", "1000:5", "10000:0", "10000:5")
FEW_LINKS = ("1000:0", "1000:5", "10000:0")
"""Mbit/s:milliseconds; 0 is without a limit."""
DECIDING = ("", "q8:64 both 4", "q4:64 both 4")
"""Run with three seeds."""


def jobs() -> list[tuple[str, int]]:
    """Compressor, direction and ranks of each training, "" uncompressed, with its seed; what decides comes first."""
    names = [f"{spec} {way} {ranks}" for ranks in (4, 2) for spec in SPECS for way in WAYS]
    first = [(name, seed) for seed in range(3) for name in DECIDING[:2]] + [(DECIDING[2], seed) for seed in range(3)]
    return first + [(name, 0) for name in names if name not in DECIDING]


def train(task: Task, name: str, seed: int) -> dict[str, Any]:
    """Train once; the loss of held-out data with compressed messages on and off, and errors of the messages."""
    spec, way, ranks = name.split() if name else ("", "both", 2)
    workloads.seed_everything(seed, torch.get_num_threads())
    torch.utils.deterministic.fill_uninitialized_memory = False
    forward, backward = (Messages(int(ranks), spec if is_on else "") for is_on in WAYS[way])
    course, began = task.build(seed), time.perf_counter()
    start = course.model.state_dict()
    shape = tensor_parallel_model.shape_of(course.model)
    model = tensor_parallel_model.split(tensor_parallel_model.gpt(shape, start), forward, backward)
    optimizer, scheduler = wire_text.optimized(model, wire_text.FINE_PEAK, 20, task.steps, 0.1)
    course = replace(course, model=model, optimizer=optimizer, scheduler=scheduler)
    losses = [task.advance(course, course.stream.draw()) for _ in range(task.steps)]
    found: dict[str, Any] = {"on": task.test(model)}
    errors = {
        f"{way}, {hop}": stats.relative_error
        for way, one in (("forward", forward), ("backward", backward))
        for hop, stats in one.stats.items()
    }
    forward.enabled = False
    found |= {"off": task.test(model), "errors": errors, "train loss": losses[:: max(1, task.steps // 50)]}
    return {**found, "seconds": time.perf_counter() - began}


def quality(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    wire_text.STEPS, wire_text.BATCH, wire_text.EPOCHS = args.pretraining, args.batch, args.epochs
    task = wire_text.task(args.data, args.cache, quick=args.quick)
    figures["task"] = {
        **task.facts,
        "steps": task.steps,
        "pretraining": args.pretraining,
        "machine": machine(),
        "date": date.today().isoformat(),
    }
    done = figures.setdefault("quality", {})
    for name, seed in jobs():
        key = f"{name or 'uncompressed'}, seed {seed}"
        if key in done or (args.only and not set(args.only) & {*name.split(), "none" if not name else ""}):
            continue
        done[key] = train(task, name, seed)
        write(args.out, figures)
        print(f"{key:34} on {done[key]['on']:.4f} off {done[key]['off']:.4f}, {done[key]['seconds']:.0f} s", flush=True)


def steps(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Time real ranks on every link."""
    if refusal := link_net.refusal():
        sys.exit(f"network namespaces with limited links are not permitted here ({refusal})")
    job = {"kind": "tensor", "rounds": args.rounds, "steps": args.steps, "warm": 1}
    job |= {"blocks": 1, "width": args.width, "inner": 64, "head_width": 16, "batch": 8, "length": 128}
    job["cases"] = [{"name": name, "forward": "" if name == "torch" else name} for name in CASES]
    figures["job"] = {**job, "machine": machine(), "date": date.today().isoformat()}
    for world, link in [(2, link) for link in LINKS] + [(4, link) for link in FEW_LINKS]:
        key = f"{world} ranks, {link}"
        figures.setdefault("time", {})[key] = on_link({**job, "world": world}, link, args.timeout)
        write(args.out, figures)
        best = figures["time"][key]
        print(key, {name: round(row["seconds"], 4) for name, row in best.items()}, flush=True)


def on_link(job: dict[str, Any], link: str, timeout: float) -> dict[str, Any]:
    """Medians of the seconds of a step of each case, and the bytes that the first rank sends in it."""
    mbps, delay_ms = (float(number) for number in link.split(":"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with link_net.Network(job["world"], delay_ms, mbps) as network:
        if not delay_ms:
            network.shape(mbps or None)
        job = {**job, "address": network.address(0)}
        commands = [[sys.executable, str(WORKER), json.dumps({**job, "rank": rank})] for rank in range(job["world"])]
        reports = [
            json.loads(text.splitlines()[-1]) for text in network.run(commands, env=environment, timeout=timeout)
        ]
    cases = {}
    for name in CASES:
        times = [
            max(each)  # a step is as long as the slowest rank's
            for rounds in zip(*(report[name] for report in reports), strict=True)
            for each in zip(*(one["seconds"] for one in rounds), strict=True)
        ]
        sent = sum(one["sent"] for one in reports[0][name]) / len(times)
        cases[name] = {"seconds": median(times), "least": min(times), "steps": len(times), "sent": sent}
    return cases


def messages(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Time what one rank computes for an all-reduce of 2^20 values: the least processor time of many turns."""
    rows: dict[str, Any] = {}
    for ranks, dtype in product((2, 4), (torch.float32, torch.bfloat16)):
        values = torch.randn(ranks, (1 << 20) // ranks, generator=torch.Generator().manual_seed(0)).to(dtype)
        works = {spec: tensor_parallel_model.rank_work(values, spec) for spec in SPECS}
        seconds: dict[str, list[float]] = {spec: [] for spec in SPECS}
        for _, spec in product(range(args.repeats), SPECS):
            began = time.process_time()
            works[spec]()
            seconds[spec].append(time.process_time() - began)
        raw = 2 * (ranks - 1) * values[0].nbytes  # of both hops
        for spec, work in works.items():
            least, sent = min(seconds[spec]), work()
            gbit = 8e-9 * (raw - sent) / least
            key = f"{ranks} ranks, {str(dtype).removeprefix('torch.')}, {spec}"
            rows[key] = {"seconds": least, "raw": raw, "sent": sent, "pays below Gbit/s": gbit}
            print(f"{key:28} {1e3 * least:7.2f} ms, {raw / sent:.2f} times fewer, pays below {gbit:.1f} Gbit/s")
    figures["messages"] = {"rows": rows, "machine": machine(), "date": date.today().isoformat()}
    write(args.out, figures)


def write(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("quality", "messages", "time"))
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--cache", type=Path, default=Path("results/wire"), help="of the pre-trained model")
    parser.add_argument("--only", nargs="*", help="of quality: these compressors, directions or numbers of ranks")
    parser.add_argument("--pretraining", type=int, default=wire_text.STEPS, help="steps of it")
    parser.add_argument("--batch", type=int, default=wire_text.BATCH, help="of pre-training and fine-tuning")
    parser.add_argument("--epochs", type=int, default=wire_text.EPOCHS, help="of fine-tuning")
    parser.add_argument("--rounds", type=int, default=2, help="of time: all cases in turns")
    parser.add_argument("--steps", type=int, default=4, help="of time: of every case in every round")
    parser.add_argument("--repeats", type=int, default=25, help="turns of messages")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--timeout", type=float, default=200, help="seconds for one link")
    parser.add_argument("--quick", action="store_true", help="toys: does it all run?")
    parser.add_argument("--out", type=Path, default=Path("results/tensor_parallel.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    link_net.leave_on_signals()
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    {"quality": quality, "messages": messages, "time": steps}[args.part](args, figures)


if __name__ == "__main__":
    main()
