"""What a save in a `Fisher` chain costs beside an older commit of this library, in pairs of runs that take turns.

    git worktree add --detach ../before 747a671        # with a Python that has it installed, in ../before/.venv
    python benchmarks/save_pairs.py --before ../before/.venv/bin/python
    python benchmarks/save_pairs.py --before ../before/.venv/bin/python --recording results/recordings/gpt-....pt

Each run is a process of its own that writes the same states as a chain, `Fisher(relative_error=.3)`, on one thread, and
counts the deltas after the first one, when all buffers are there. A ratio is that of one pair, now to before; which of
both comes first alternates. User time leaves out what the system does (fresh pages, files), wall time does not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from lossless_speed import machine
from scale_states import MODELS, LiveState, StateHolder, make_states
from summarize import rounded

HERE = Path(__file__).resolve().parent
RELATIVE_ERROR = 0.3


def simulated(folder: Path, model: str, saves: int) -> Iterator[dict[str, Any]]:
    """What a manager is given of each state of `scale.py`, in the memory of the first."""
    live = LiveState(folder, model)
    for number in range(saves):
        live.load(number)
        yield live.objects


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The same of a training that `fisher.py` recorded."""
    for _, model, optimizer in torch.load(path, weights_only=True):
        yield {"model": StateHolder(model), "optimizer": StateHolder(optimizer)}


def one_run(states: Iterator[dict[str, Any]]) -> list[dict[str, float]]:
    """User and wall seconds and bytes of each save of a chain, with the library that this Python has."""
    import shrinkpoint as sp

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that no loss is measured: none is asked for
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scheme = sp.Fisher(relative_error=RELATIVE_ERROR)
        with sp.CheckpointManager(folder, scheme=scheme, threads=1, keyframe_every=None) as manager:
            for step, objects in enumerate(states):
                began, user = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
                report = manager.save(step, **objects, rng=False)
                user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - user
                rows.append({"user": user, "wall": time.perf_counter() - began, "bytes": report.stored_bytes})
    return rows


def in_process(python: Path, options: argparse.Namespace) -> dict[str, float]:
    """The sums over the deltas of one run after the first delta, by another Python."""
    command = [str(python), __file__, "--run", "--model", options.model, "--saves", str(options.saves)]
    command += ["--recording", str(options.recording)] if options.recording else ["--states", str(options.states)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout
    rows = json.loads(output.splitlines()[-1])[2:]
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}


def compared(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Medians of both sides, and of the ratios with their quartiles, least and largest."""
    out: dict[str, Any] = {"pairs": len(pairs)}
    for key in ("user", "wall", "bytes"):
        ratios = sorted(now[key] / before[key] for before, now in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        out[key] = {
            "before": statistics.median(before[key] for before, _ in pairs),
            "now": statistics.median(now[key] for _, now in pairs),
            "ratio": middle,
            "quartiles": [low, high],
            "range": [ratios[0], ratios[-1]],
        }
    return out


def commit(python: Path) -> str:
    """The commit of the checkout that a Python in .venv/bin belongs to."""
    where = python.absolute().parents[2]
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True)
    return answer.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the Python that has the older library, in a checkout's .venv/bin")
    parser.add_argument("--model", choices=MODELS, default="30M")
    parser.add_argument("--saves", type=int, default=5, help="of a chain of simulated states")
    parser.add_argument("--recording", type=Path, help="a recorded training, in the place of simulated states")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "save_pairs.json")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--states", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        recording = options.recording
        states = recorded(recording) if recording else simulated(options.states, options.model, options.saves)
        print(json.dumps(one_run(states)))
        return
    if options.before is None:
        parser.error("--before is missing: the Python that has the older library")
    name = options.recording.stem if options.recording else options.model
    with tempfile.TemporaryDirectory() as folder:
        options.states = Path(folder)
        if not options.recording:
            make_states(options.states, options.model, options.saves, 10)
        sides, pairs = (options.before, Path(sys.executable)), []
        for number in range(options.pairs):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            found = {side: in_process(sides[side], options) for side in order}
            pairs.append((found[0], found[1]))
            print(f"{name}, pair {number + 1}: " + ", ".join(f"{found[0][k]:.3f} {found[1][k]:.3f}" for k in found[0]))
    row = {"machine": machine(), "date": date.today().isoformat(), "before": commit(sides[0]), "now": commit(sides[1])}
    row |= rounded(compared(pairs))
    earlier = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.write_text(json.dumps(earlier | {name: row}, indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
