"""How long a save holds up the loop, and how much memory it takes, on the demo's model.

    python benchmarks/save_latency.py

Rounds of: train a few steps, then save the same state with each method in turn (each save waited for before the next
begins, outside the clock), so that all methods see the same machine in the same minutes. Beside the stall, the rate of
training while a background save runs. Memory is measured in a process of its own per method: the high-water mark of
the resident set during a save over its value before, in multiples of the state's bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.optim import AdamW

import shrinkpoint as sp
from shrinkpoint_lab.bench.systems import resident_bytes
from shrinkpoint_lab.demo.workload import GPT, Batches, GPTConfig, stdlib_text

METHODS = ("background", "sync", "torch.save", "torch.save + fsync", "clone")
RESET_PEAK = Path("/proc/self/clear_refs")


class Run:
    """The demo's training, a step at a time."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(GPTConfig(layers=layers, width=width))
        self.optimizer = AdamW(self.model.param_groups(0.1), lr=1e-3, betas=(0.9, 0.95))
        self.batches = Batches(stdlib_text(), size=8, context=128, seed=0)
        self.step = 0

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(*self.batches.draw())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def nbytes(self) -> int:
        """Bytes of the state, the tied head once."""
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in [*self.model.parameters(), *moments])


def torch_save(state: dict[str, Any], path: Path, *, sync: bool) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def clone(nest: Any) -> Any:
    """Every tensor copied to new memory."""
    if isinstance(nest, dict):
        return {key: clone(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return [clone(value) for value in nest]
    return nest.detach().clone() if isinstance(nest, torch.Tensor) else nest


class Savers:
    """One method of saving each by name: a call that holds up the loop, and one that waits for what is in flight."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.managers = {
            name: sp.CheckpointManager(folder / name, background=name == "background") for name in METHODS[:2]
        }
        plain = folder / "state.pt"
        self.plain: dict[str, Callable[[], object]] = {
            "torch.save": lambda: torch_save(run.state, plain, sync=False),
            "torch.save + fsync": lambda: torch_save(run.state, plain, sync=True),
            "clone": lambda: clone(run.state),
        }

    def save(self, method: str) -> None:
        if method in self.plain:
            self.plain[method]()
        else:
            self.managers[method].save(self.run.step, model=self.run.model, optimizer=self.run.optimizer)

    def wait(self, method: str) -> None:
        if method in self.managers:
            self.managers[method].wait()

    def close(self) -> None:
        for manager in self.managers.values():
            manager.close()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def stalls(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every save by method; the first round (keyframes, cold buffers) is kept apart."""
    torch.set_num_threads(2)
    run = Run(args.layers, args.width)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    quiet, busy, committed = [], [], []
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        savers = Savers(run, Path(folder))
        for _ in range(args.rounds + 1):
            quiet.append(timed(lambda: run.advance(args.steps)) / args.steps)
            for method in METHODS[1:]:
                seconds[method].append(timed(partial(savers.save, method)))
                savers.wait(method)
            began = time.perf_counter()
            seconds["background"].append(timed(lambda: savers.save("background")))
            busy.append(timed(lambda: run.advance(1)))
            savers.wait("background")
            committed.append(time.perf_counter() - began)
        savers.close()
    return {
        "seconds": seconds,
        "median step, nothing in flight": median(quiet[1:]),
        "median first step after a background save": median(busy[1:]),
        "median from a background save to its commit, that step included": median(committed[1:]),
    }


def peak(method: str, layers: int, width: int) -> dict[str, float]:
    """Peak resident bytes beyond those before the first save, for a keyframe and the delta after it."""
    torch.set_num_threads(2)
    run = Run(layers, width)
    run.advance(3)
    with tempfile.TemporaryDirectory() as folder:
        savers = Savers(run, Path(folder))
        before = resident_bytes("VmRSS")
        result: dict[str, float] = {"state": run.nbytes}
        for kind in ("keyframe", "delta"):
            RESET_PEAK.write_text("5")
            savers.save(method)
            savers.wait(method)
            result[kind] = (resident_bytes("VmHWM") - before) / run.nbytes
            run.advance(1)
        result["kept"] = (resident_bytes("VmRSS") - before) / run.nbytes
        savers.close()
    return result


def apart(args: argparse.Namespace, *part: str, **environment: str) -> dict[str, Any]:
    """Run one part of this in a process of its own, whose OpenMP threads sleep while they wait (see the demo)."""
    sizes = [x for name in ("rounds", "steps", "layers", "width") for x in (f"--{name}", str(getattr(args, name)))]
    command = [sys.executable, __file__, *sizes, "--out", str(args.out), *part]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **environment}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    figures: dict[str, Any] = json.loads(output)
    return figures


def show(figures: dict[str, Any]) -> None:
    measured = figures["stalls"]
    print(f"state: {figures['bytes'] / 1e6:.1f} MB, {figures['rounds']} saves, torch {torch.__version__}\n")
    print(f"{'stall of the loop':22}{'first':>10}{'median':>10}{'worst':>10}   seconds")
    for method, values in measured["seconds"].items():
        print(f"{method:22}{values[0]:10.4f}{median(values[1:]):10.4f}{max(values[1:]):10.4f}")
    print()
    for name, value in measured.items():
        if isinstance(value, float):
            print(f"{name}: {value:.3f} s")
    print(f"\n{'peak memory':22}{'keyframe':>10}{'delta':>10}{'kept':>10}   x the state, beyond the state itself")
    for method, row in figures["peaks"].items():
        print(f"{method:22}{row['keyframe']:10.2f}{row['delta']:10.2f}{row['kept']:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of training before each round")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--out", type=Path, default=Path("results/stall.json"))
    parser.add_argument("--part", choices=("stalls", *METHODS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.part:
        print(json.dumps(stalls(args) if args.part == "stalls" else peak(args.part, args.layers, args.width)))
        return
    figures = {"rounds": args.rounds, "stalls": apart(args, "--part", "stalls")}
    # memory that is freed goes back to the system, so that what is resident is what is in use
    figures["peaks"] = {method: apart(args, "--part", method, MALLOC_MMAP_THRESHOLD_="65536") for method in METHODS}
    figures["bytes"] = figures["peaks"]["sync"]["state"]
    args.out.write_text(json.dumps(figures, indent=1))
    show(figures)


if __name__ == "__main__":
    main()
