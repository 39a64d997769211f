"""Kill a training with a journal by SIGKILL at random moments, again and again, and compare it with one that never was.

    python benchmarks/journal_kills.py --kills 100      # four minutes on two cores

A model with BatchNorm and dropout is trained with AdamW: with `compress_ddp` on one rank and on two (gloo, `q4:64`),
with a background save every 25 steps, and with `compress_fsdp` on two, whose shards are rounded to `q4:64` and saved by
`shrinkpoint.train.dcp.Manager`. The trials run beside each other. Each process appends a line to a log when a step has
returned. A kill takes all ranks, at a random moment within the thirty steps behind a restore; on two of them one rank
goes a random moment before the other. Three of ten kills count from the start of the processes, and may interrupt a
restore. After each kill this must hold, or it counts as failed:

* the run resumes at the last step that every rank has completed, or at the next one, whose record may be there;
* all ranks resume at the same step;

and at the end weights, buffers, moments and random generators are those of a run that was never killed, bit for bit.

SIGKILL takes the process and leaves the kernel: this says nothing about a power cut. Results:
results/journal_kills.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which each process would import otherwise
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from lossless_speed import machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shrinkpoint as sp
from shrinkpoint.comm import compress_ddp, compress_fsdp
from shrinkpoint.comm.flat_gradient import local_tensor
from shrinkpoint.tensors.rng import rng_to_bytes
from shrinkpoint.train import Journal
from shrinkpoint.train.dcp import Manager

SAVE_EVERY = 25
LONGEST = 0.5
"""Seconds from the start of the processes within which three of ten runs are killed."""
STEPS = 30
"""Steps within which the others are."""
PATIENCE = 300.0
"""Seconds after which a run counts as hanging."""


def train(where: Path, kind: str, rank: int, width: int, last: int, attempt: int) -> None:
    """Resume, and train up to a step; at the end a file says what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}/rendezvous-{attempt}", rank=rank, world_size=width)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, 8))
    if kind == "fsdp":
        model = fully_shard(net, mesh=init_device_mesh("cpu", (width,)))
        compression, manager = compress_fsdp(model), Manager(where / "run")
    else:
        model = DistributedDataParallel(net)
        compression = compress_ddp(model, "q4:64", segment_numel=2000)
        manager = sp.CheckpointManager(where / "run", background=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    journal = Journal(manager, compression, update, shard_compressor="q4:64" if kind == "fsdp" else None)
    restored = journal.restore(model=model, optimizer=optimizer)
    if restored is None:
        torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
        journal.save(0, model=model, optimizer=optimizer)
    begin = 0 if restored is None else restored.step
    with Log(where / f"log-{rank}") as log:
        log.write(f"resumed {attempt} {begin}")
        for step in range(begin + 1, last + 1):
            model(torch.randn(16, 64)).square().mean().backward()
            journal.step(step)
            log.write(f"done {attempt} {step}")
            if step % SAVE_EVERY == 0:
                journal.save(step, model=model, optimizer=optimizer)
    dist.barrier()
    journal.close()
    manager.wait()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": slot for name, slot in state.items()}
    shards = {name: local_tensor(tensor.detach()) for name, tensor in tensors.items()}
    parts = {name: shard.numpy().tobytes() for name, shard in shards.items()} | rng_to_bytes()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    (where / f"final-{rank}").write_text(json.dumps(digests))


class Log:
    """A file of lines, each written by one call."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def write(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())


def lines(where: Path, rank: int, word: str, attempt: int) -> list[int]:
    """The steps of the lines that begin with a word, of one attempt or, if that is negative, of all."""
    path = where / f"log-{rank}"
    rows = [row.split() for row in path.read_text().splitlines()] if path.exists() else []
    return [int(step) for kind, number, step in rows if kind == word and attempt in (-1, int(number))]


def start(work: Callable[[int], None], width: int) -> list[int]:
    """The ids of forked processes, one a rank."""
    children = []
    for rank in range(width):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(rank)
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {error}", file=sys.stderr)
            finally:
                os._exit(code)
        children.append(pid)
    return children


def finish(children: list[int]) -> list[int]:
    """Wait, and return the exit codes; a process that hangs is killed."""
    end, codes = time.monotonic() + PATIENCE, {}
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return [codes[child] for child in children]


def kill(children: list[int], where: Path, attempt: int, chance: random.Random) -> None:
    """Kill all ranks at a random moment, in a random order, not quite together."""
    if chance.random() < 0.3:
        time.sleep(chance.uniform(0, LONGEST))
    else:
        end, steps, last = time.monotonic() + PATIENCE, chance.randint(0, STEPS), chance.randrange(len(children))
        while time.monotonic() < end:
            resumed, done = (lines(where, last, word, attempt) for word in ("resumed", "done"))
            if resumed and len(done) >= steps:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.02))
    for child in chance.sample(children, len(children)):
        os.kill(child, signal.SIGKILL)
        time.sleep(chance.choice((0, 0.001, 0.01)))


def trial(kind: str, width: int, kills: int, last: int, seed: int, seconds: float) -> dict[str, Any]:
    """Kill a run again and again, and compare its end with that of one that was not killed."""
    end = time.monotonic() + seconds
    chance, failures, found = random.Random(seed), [], {"at the last step": 0, "one later": 0}
    replayed = begun = 0
    with tempfile.TemporaryDirectory() as folder:
        whole, where = Path(folder, "whole"), Path(folder, "killed")
        whole.mkdir(), where.mkdir()
        made = kills
        for attempt in range(kills):
            if time.monotonic() > end:
                made = attempt
                break
            completed = min(max(lines(where, rank, "done", -1), default=0) for rank in range(width))
            children = start(lambda rank, a=attempt: train(where, kind, rank, width, 10**6, a), width)
            kill(children, where, attempt, chance)
            finish(children)
            at = [step for rank in range(width) for step in lines(where, rank, "resumed", attempt)]
            begun += bool(at)
            if not at:
                continue
            replayed += at[0] % SAVE_EVERY
            if len(set(at)) > 1 or at[0] not in (completed, completed + 1):
                failures.append(f"attempt {attempt}: at {at} after {completed}")
            else:
                found["at the last step" if at[0] == completed else "one later"] += 1
        completed = min(max(lines(where, rank, "done", -1), default=0) for rank in range(width))
        last = max(last, completed + 10)
        for place, attempt in ((where, made), (whole, 0)):
            codes = finish(start(lambda rank, p=place, a=attempt: train(p, kind, rank, width, last, a), width))
            if any(codes):
                failures.append(f"{place.name}: exit codes {codes}")
        for rank in range(width) if not failures else ():
            ends = [json.loads((place / f"final-{rank}").read_text()) for place in (where, whole)]
            different = [name for name in ends[0] if ends[0][name] != ends[1].get(name)]
            if different:
                failures.append(f"rank {rank} ends otherwise: {', '.join(different)}")
    counts = {
        "kind": kind,
        "ranks": width,
        "kills": made,
        "resumed": begun,
        **found,
        "replayed": replayed,
        "steps": last,
    }
    return {**counts, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each trial")
    parser.add_argument("--trials", default="ddp:1,ddp:2,fsdp:2", help="kinds and numbers of ranks")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which a trial makes no more kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/journal_kills.json"))
    args = parser.parse_args()
    begin = time.perf_counter()
    kinds = [name.split(":") for name in args.trials.split(",")]
    # processes that can fork: each trial starts its ranks
    with ProcessPoolExecutor(len(kinds), mp_context=get_context("fork")) as pool:
        jobs = [pool.submit(trial, kind, int(w), args.kills, 100, args.seed, args.seconds) for kind, w in kinds]
        trials = [job.result() for job in jobs]
    result = {"date": date.today().isoformat(), "machine": machine(), "save every": SAVE_EVERY, "trials": trials}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**result, "seconds": time.perf_counter() - begin}, indent=1))
    for row in trials:
        print(row)
    sys.exit(any(row["failures"] for row in trials))


if __name__ == "__main__":
    main()
