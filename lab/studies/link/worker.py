"""One rank of a measurement on a link: run by run.py inside a namespace, prints one JSON object.

Every case is built anew in every round, so that all of them meet the same minutes. A pipeline's step is timed from one
barrier to the next; replicas wait for each other by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.nn.parallel import DistributedDataParallel

from lab.studies.link import hosts, model
from shrinkpoint.comm import moment_allreduce
from shrinkpoint.comm.ddp import compress_ddp
from shrinkpoint.comm.pipeline import compress_pipeline

NO_SYNC, TWO_LEVELS = "compute alone", ", two levels"
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
INTERLEAVED = {"Interleaved1F1B": ScheduleInterleaved1F1B, "LoopedBFS": ScheduleLoopedBFS}
Job = tuple[Callable[[], float | None], Callable[[], dict[str, float]]]
"""A step that gives the loss where it is known, and the account so far."""


def bf16_under_another_name(state: Any, bucket: Any) -> Any:
    """What torch refuses on gloo by its name, and what works there."""
    return bf16_compress_hook(state, bucket)


bf16_under_another_name.__annotations__ = {}  # torch compares them with types, and these are words


@contextlib.contextmanager
def pipeline(job: dict[str, Any], case: dict[str, Any]) -> Iterator[Job]:
    """A stage of the GPT on each rank, or two; forward + backward + update of all micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    is_interleaved = job["schedule"] in INTERLEAVED
    count = 2 * world if is_interleaved else world
    torch.manual_seed(rank)
    stages = {index: model.Stage(index, count, job["width"], job["inner"]) for index in range(rank, count, world)}
    shape = (job["batch"], job["length"])
    wide = torch.zeros(*shape, job["width"], requires_grad=True)
    words, logits = (
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(*shape, model.VOCABULARY, requires_grad=True),
    )
    built = [
        PipelineStage(
            stage,
            index,
            count,
            torch.device("cpu"),
            input_args=(wide if index else words,),
            output_args=(logits if index == count - 1 else wide,),
        )
        for index, stage in stages.items()
    ]
    make = {**SCHEDULES, **INTERLEAVED}[job["schedule"]]
    schedule = make(built if is_interleaved else built[0], job["micro_batches"], loss_fn=model.loss)
    stage = nn.ModuleList(stages.values())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    wire = None
    if case["forward"]:
        wire = compress_pipeline(schedule, forward=case["forward"], backward=case["backward"])
    sending = [f"{index} forward" for index in stages] + [f"{index - 1} backward" for index in stages]
    data = model.tokens((job["batch"] * job["micro_batches"], job["length"] + 1), 0)

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(data[:, :-1].contiguous())
        elif rank == world - 1:
            schedule.step(target=data[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(one) for one in losses) / len(losses) if losses else None

    try:
        yield (
            step,
            lambda: {} if wire is None else account(wire.link_stats(), sending),
        )
    finally:
        if wire is not None:
            wire.detach()


@contextlib.contextmanager
def averaging(job: dict[str, Any], case: dict[str, Any]) -> Iterator[Job]:
    """A perceptron of `parameters` weights on each rank, few rows of data: gradients are what a step takes."""
    torch.manual_seed(0)
    side = round((job["parameters"] / 4) ** 0.5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(side, side), nn.Tanh()) for _ in range(4)))
    hook, handle = case["forward"], None
    kind = torch.optim.AdamW if job.get("optimizer") == "adamw" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    # torch's PowerSGD stops with an error on gloo if there is more than one bucket
    parallel = DistributedDataParallel(model, bucket_cap_mb=1000 if hook == "PowerSGD 4" else job.get("bucket_mb", 25))
    if hook == "fp16 hook":
        parallel.register_comm_hook(None, fp16_compress_hook)
    elif hook == "bf16 hook":
        parallel.register_comm_hook(None, bf16_under_another_name)
    elif hook == "PowerSGD 4":
        parallel.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook)
    elif hook and hook != NO_SYNC:
        is_two_levels = hook.endswith(TWO_LEVELS)
        spec, _, numel = hook.removesuffix(TWO_LEVELS).partition(", segments of ")
        options = {"segment_numel": int(numel)} if numel else {}
        options |= {"ranks_per_node": job["per_node"]} if is_two_levels else {}
        handle = compress_ddp(parallel, spec, optimizer=optimizer, **options)
    rows = torch.randn(2, job["rows"], side, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> float:
        with parallel.no_sync() if hook == NO_SYNC else contextlib.nullcontext():
            loss = (parallel(rows[0]) - rows[1]).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    yield step, lambda: {} if handle is None else account(handle.link_stats, list(handle.link_stats))


KINDS = {"pipeline": pipeline, "ddp": averaging}


def measure(job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step after the warm-up, and in sum over them what the kernel and the ledgers counted."""
    with KINDS[job["kind"]](job, case) as (step, ledgers):
        is_stepped = case["forward"].startswith("v")  # sends otherwise at first, and then finds its scales
        for _ in range(moment_allreduce.WARMUP_STEPS + 10 if is_stepped else job["warm"]):
            step()
        dist.barrier()
        before, counted = ledgers(), hosts.sent_bytes()
        seconds, loss = [], None
        for _ in range(job["steps"]):
            began = time.perf_counter()
            loss = step()
            if job["kind"] == "pipeline":
                dist.barrier()
            seconds.append(time.perf_counter() - began)
        sent = hosts.sent_bytes() - counted
        spent = {key: value - before[key] for key, value in ledgers().items()}
        return {"seconds": seconds, "sent": sent, "ledger": spent, "loss": loss}


def account(ledgers: dict[str, Any], sending: list[str]) -> dict[str, float]:
    """In sum: bytes of what this rank sends, seconds of all that it does."""
    sent = [one for name, one in ledgers.items() if name in sending]
    sums = {"raw": sum(one.raw_bytes for one in sent), "wire": sum(one.wire_bytes for one in sent)}
    times = {way: sum(getattr(one, f"{way}_seconds") for one in ledgers.values()) for way in ("encode", "decode")}
    return {**sums, **times}


def end_with_parent() -> None:
    """Linux kills this process when run.py is no more, however that ended."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    moment_allreduce.WARMUP_STEPS = 20  # which are not timed
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.DEVICE
    address = f"tcp://{job['address']}:29500"
    dist.init_process_group("gloo", address, timedelta(seconds=60), rank=job["rank"], world_size=job["world"])
    seen: dict[str, list[Any]] = {case["name"]: [] for case in job["cases"]}
    for _ in range(job["rounds"]):
        for case in job["cases"]:
            seen[case["name"]].append(measure(job, case))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
