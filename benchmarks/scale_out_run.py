"""Saves and loads of R real ranks: one process each, gloo, `dcp.save` and `dcp.load` through `Writer` and `Reader`.

A part of `scale_out.py`, which starts this file; it starts the ranks, in a network of their own where that is allowed,
so that the bytes of the loopback device are theirs. Tensors are cut by rows, as FSDP2 does. Every rank codes with one
thread. A row for each operation and rank: seconds by the clock and by the processor, memory, and what crossed between
ranks, counted where torch hands a tensor to gloo."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shrinkpoint as sp
from shrinkpoint.train.dcp import Reader, Writer, latest_valid, reset_chains
from shrinkpoint_lab.bench.systems import resident_bytes

RELATIVE_ERROR = 0.3
STATES = 3
"""A keyframe, and two deltas."""


class Traffic:
    """Counts what this rank sends and receives in collectives, as if all ranks spoke to each other directly.

    Attributes:
        calls: how often each collective was called.
        sent, received: bytes.
        messages: that this rank sends or receives, whichever are more.
    """

    def __init__(self) -> None:
        self.clear()
        module = dist.distributed_c10d
        for name in ("all_gather", "gather", "scatter", "broadcast", "all_to_all_single"):
            counted = self._count(name, getattr(module, name))
            setattr(module, name, counted)
            setattr(dist, name, counted)

    def clear(self) -> None:
        """Start from zero."""
        self.calls: Counter[str] = Counter()
        self.sent = self.received = self.messages = 0

    def row(self) -> dict[str, Any]:
        """The counts."""
        return {"calls": dict(self.calls), "sent": self.sent, "received": self.received, "messages": self.messages}

    def _count(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            others, is_root = dist.get_world_size() - 1, dist.get_rank() == 0
            self.calls[name] += 1
            if name == "all_to_all_single":
                output, sent = args[:2]
                share = 1 if len(args) > 2 else others / (others + 1)  # with sizes, nothing is sent to the rank itself
                self.sent, self.received = (
                    self.sent + int(sent.nbytes * share),
                    self.received + int(output.nbytes * share),
                )
                self.messages += others
            else:
                size = (args[1] if name == "all_gather" else args[0]).nbytes
                out, into, messages = {
                    "all_gather": (size * others, size * others, others),
                    "gather": (0, size * others, others) if is_root else (size, 0, 1),
                    "scatter": (size * others, 0, others) if is_root else (0, size, 1),
                    "broadcast": (size * others, 0, math.ceil(math.log2(others + 1))) if is_root else (0, size, 1),
                }[name]
                self.sent, self.received = self.sent + out, self.received + into
                self.messages += messages if others else 0
            return collective(*args, **kwargs)

        return call


class Meter:
    """A row for each operation of this rank."""

    def __init__(self) -> None:
        self.traffic, self.rows = Traffic(), list[dict[str, Any]]()
        self.live_bytes = 0

    def begin(self) -> None:
        """Memory counts beyond what is resident now, such as buffers that the last scheme left."""
        give_back()
        self.live_bytes = resident_bytes("VmRSS")

    def run(self, operation: str, work: Callable[[], Any]) -> Any:
        """Measure an operation of all ranks."""
        give_back()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        self.traffic.clear()
        wire, before, clock = _loopback_bytes(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        result = work()
        seconds, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_SELF)
        processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        row = {"operation": operation, "seconds": seconds, "processor_seconds": processor, **self.traffic.row()}
        row["beyond_live_bytes"] = resident_bytes("VmHWM") - self.live_bytes
        dist.barrier()
        self.rows.append(row | {"loopback_bytes": _loopback_bytes() - wire})
        return result


def give_back() -> None:
    """Give unused memory back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _loopback_bytes() -> int:
    """Bytes that the processes of this network have sent to each other, with the headers of TCP and IP."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def local_state(path: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """A rank's rows of a stored state, as `get_state_dict` of an FSDP2 model and its AdamW has them."""
    model: dict[str, Any] = {}
    slots: dict[str, dict[str, Any]] = {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            kind, name = map(sys.intern, key.split(".", 1))
            rows = file.get_slice(key)
            shape = rows.get_shape()
            size = -(-shape[0] // ranks)
            first = min(rank * size, shape[0])
            local = rows[first : min(first + size, shape[0])].clone()
            stride = torch.empty(shape, device="meta").stride()
            tensor = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
            if kind == "value":
                model[name] = tensor
            else:
                slots.setdefault(name, {"step": torch.tensor(1000.0)})[kind] = tensor
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [*slots]}
    return {"model": model, "optim": {"state": slots, "param_groups": [group]}}


def copy_into(state: dict[str, Any], values: dict[str, Any]) -> None:
    """Take other values, in place."""
    for target, source in zip(_tensors(state), _tensors(values), strict=True):
        target.copy_(source)


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    slots = [slot for each in state["optim"]["state"].values() for slot in each.values()]
    return [tensor.to_local() for tensor in (*state["model"].values(), *slots) if isinstance(tensor, DTensor)]


def measure_rank(states: Path, folder: Path) -> dict[str, Any]:
    """The rows of this rank; of rank 0 also what lies on the disk."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = local_state(states / "0.safetensors", mesh)
    meter, disk = Meter(), list[dict[str, Any]]()
    for name, scheme in (("lossless", "lossless"), ("fisher", sp.Fisher(relative_error=RELATIVE_ERROR))):
        meter.begin()
        for number in range(STATES):
            copy_into(state, local_state(states / f"{number}.safetensors", mesh))
            place = folder / name / f"step-{number}"
            kind = ("keyframe", "delta", "delta, warm")[number]
            writer = Writer(place, scheme=scheme, threads=1)
            meter.run(f"{name}, {kind}", lambda writer=writer: dcp.save(state, storage_writer=writer))
            if dist.get_rank() == 0:
                disk.append({"operation": f"{name}, {kind}", **_files(place)})
        newest = meter.run(f"{name}, latest_valid", lambda name=name: latest_valid(folder / name))
        assert newest == folder / name / f"step-{STATES - 1}"
        reset_chains()
        for tensor in _tensors(state):
            tensor.zero_()
        meter.run(f"{name}, load", lambda place=newest: dcp.load(state, storage_reader=Reader(place, threads=1)))
        reset_chains()
        if name == "lossless":
            last = local_state(states / f"{STATES - 1}.safetensors", mesh)
            assert all(torch.equal(a, b) for a, b in zip(_tensors(state), _tensors(last), strict=True))
    local_bytes = sum(tensor.nbytes for tensor in _tensors(state))
    return {"rows": meter.rows, "disk": disk, "local_bytes": local_bytes}


def _files(place: Path) -> dict[str, int]:
    payloads, links = [*place.glob("rank-*")], [*place.glob("bases/*")]
    return {
        "stored_bytes": sum(path.stat().st_size for path in payloads),
        "largest_file": max(path.stat().st_size for path in payloads),
        "manifest_bytes": (place / "shrinkpoint.json").stat().st_size,
        "metadata_file_bytes": (place / ".metadata").stat().st_size,
        "files": len(payloads) + 3,
        "links": len(links),
    }


def run_ranks(ranks: int, states: Path, folder: Path) -> list[dict[str, Any]]:
    """What each of so many processes measured, in a network of their own where the system allows that."""
    settings = json.dumps({"ranks": ranks, "states": str(states), "folder": str(folder)})
    command = [sys.executable, __file__, settings]
    has_tools = shutil.which("unshare") is not None and shutil.which("ip") is not None
    if has_tools and subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0:
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder, ranks = Path(settings["folder"]), settings["ranks"]
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(ranks):  # the import of torch is shared
        pid = os.fork()
        if pid == 0:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
            result = measure_rank(Path(settings["states"]), folder)
            (folder / f"{rank}.json").write_text(json.dumps(result))
            dist.barrier()
            dist.destroy_process_group()
            sys.stdout.flush()
            os._exit(0)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    if any(statuses):
        sys.exit("a rank failed")
    print(json.dumps([json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]))


if __name__ == "__main__":
    main()
