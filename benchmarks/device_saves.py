"""Parts of `device_all.py`: saves of states in device memory, beside torch.save, copies, and DCP's async_save.

States are those of GPTs with AdamW's moments, some simulated training steps apart (`scale_states.py`), made where they
are saved from. Figures of a save:

    stall, s         until `save` returns
    state free, s    until what the loop enqueues next may change the state: on a GPU a save is read behind it
    durable, s       until the checkpoint is on the disk; GB/s of raw state are those of it
    device memory    the peak on the device beyond what was there, in states
    host memory      the same of the resident memory of the process

"at once" is a save in the background without memory for a copy on the device.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from device_job import Job
from scale_states import MODELS, GPTShapes, StateHolder, Weight, state_dicts

import shrinkpoint as sp
from shrinkpoint_lab.bench.systems import PeakMemory

STEPS = 10
"""Simulated training steps between two saves."""
METHODS = (
    *("copy", "torch.save"),
    *("fisher, background", "lossless, background", "fisher", "lossless"),
    *("fisher, at once", "lossless, at once"),
)
"""The most valuable first."""


class DeviceState:
    """A model's and an optimizer's state dict on a device, in training."""

    def __init__(self, shapes: GPTShapes, device: torch.device, seed: int = 0) -> None:
        self._weights = {
            name: Weight(shape, torch.Generator(device).manual_seed(seed * 1_000_003 + index))
            for index, (name, shape) in enumerate(shapes.shapes())
        }
        tensors = {
            key: tensor for name, weight in self._weights.items() for key, tensor in weight.tensors(name).items()
        }
        self.state = state_dicts(shapes, tensors)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    @property
    def objects(self) -> dict[str, StateHolder]:
        """The model and the optimizer, as far as a manager asks for them."""
        return {name: StateHolder(state) for name, state in self.state.items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, without their names."""
        return list(_tensors(self.state))

    def advance(self, steps: int) -> None:
        """Training steps, in place."""
        for weight in self._weights.values():
            weight.advance(steps)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in state.values() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _tensors(value)


class Meter:
    """Clocks and memory of one operation on a state, from when it is made."""

    def __init__(self, job: Job, live: DeviceState, **names: Any) -> None:
        self._job, self._live, self._names = job, live, names
        job.synchronize()
        if job.is_cuda:
            torch.cuda.reset_peak_memory_stats(job.device)
            self._allocated = torch.cuda.memory_allocated(job.device)
        self._host = PeakMemory()
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def wait_for_loop(self) -> float:
        """Wait for what the loop's stream has been given; return the seconds since the start."""
        if self._job.is_cuda:
            torch.cuda.current_stream(self._job.device).synchronize()
        return self.seconds

    def add(self, seconds: float, **figures: Any) -> None:
        """Write the row of an operation that took so many seconds."""
        figures |= {"durable, s": seconds, "GB/s": self._live.nbytes / 1e9 / seconds}
        if self._job.is_cuda:
            beyond = torch.cuda.max_memory_allocated(self._job.device) - self._allocated
            figures["device memory, states"] = beyond / self._live.nbytes
        if (rise := self._host.rise) is not None:
            figures["host memory, states"] = rise / self._live.nbytes
        self._job.add(**self._names, **figures)


def saves(job: Job) -> None:
    """Every method on each model, the smaller one first; what then does not fit into the time is left out."""
    warnings.simplefilter("ignore")
    seconds_per_byte: dict[str, float] = {}
    for model in ("tiny",) if job.is_quick else ("350M", "1.5B"):
        live = None
        with job.attempt(model=model):
            live = DeviceState(MODELS[model], job.device)
        if live is None:
            continue
        job.add(model=model, method="state", bytes=live.nbytes, parameters=MODELS[model].parameters)
        for method in METHODS:
            names = {"model": model, "method": method}
            if not job.fits(1.3 * seconds_per_byte.get(method, 0) * live.nbytes, **names):
                continue
            folder = job.folder / "saves"
            with job.attempt(**names):
                if shutil.disk_usage(job.folder).free < 2.2 * live.nbytes:
                    raise OSError(f"no space for two states of {live.nbytes / 1e9:.1f} GB in {job.folder}")
                folder.mkdir()
                began = time.monotonic()
                _save(job, live, folder, model, method)
                seconds_per_byte[method] = (time.monotonic() - began) / live.nbytes
            shutil.rmtree(folder, ignore_errors=True)
            if job.is_cuda:
                torch.cuda.empty_cache()
        del live


def _save(job: Job, live: DeviceState, folder: Path, model: str, method: str) -> None:
    if method == "copy":
        _copy(job, live, model)
    elif method == "torch.save":
        _save_with_torch(job, live, folder / "state.pt", model)
    else:
        _save_with_manager(job, live, folder, model, method)


def _copy(job: Job, live: DeviceState, model: str) -> None:
    """Copies of all tensors: on the device, to fresh host memory, and to pinned memory that is there."""
    tensors = live.tensors
    pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=job.is_cuda) for x in tensors]
    for target, source in zip(pinned, tensors, strict=True):
        target.copy_(source)
    copies: dict[str, Callable[[], object]] = {
        "to pinned memory": lambda: [a.copy_(b, non_blocking=True) for a, b in zip(pinned, tensors, strict=True)],
        "to new host memory": lambda: [x.to("cpu", copy=True) for x in tensors],
        "on the device": lambda: [x.clone() for x in tensors],
    }
    for save, copy in copies.items():
        with job.attempt(model=model, method="copy", save=save):
            meter = Meter(job, live, model=model, method="copy", save=save)
            kept = copy()
            job.synchronize()
            seconds = meter.seconds
            meter.add(seconds, **{"stall, s": seconds, "state free, s": seconds})
            del kept


def _save_with_torch(job: Job, live: DeviceState, path: Path, model: str) -> None:
    meter = Meter(job, live, model=model, method="torch.save", save="keyframe, fsync")
    with path.open("wb") as file:
        torch.save(live.state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = meter.seconds
    meter.add(seconds, **{"stall, s": seconds, "state free, s": seconds, "ratio": live.nbytes / path.stat().st_size})


def _save_with_manager(job: Job, live: DeviceState, folder: Path, model: str, method: str) -> None:
    name, _, how = method.partition(", ")
    scheme = sp.Fisher(relative_error=0.3) if name == "fisher" else "lossless"
    no_memory = patch("shrinkpoint.tensors.flat_state._free_bytes", lambda device: 0)
    operations = ("keyframe", "delta", "delta, warm") if model == "350M" else ("keyframe", "delta")
    with (
        no_memory if how == "at once" else nullcontext(),
        sp.CheckpointManager(folder, scheme=scheme, background=bool(how)) as manager,
    ):
        for number, save in enumerate(operations):
            live.advance(STEPS if number else 0)
            meter = Meter(job, live, model=model, method=method, save=save)
            report = manager.save(number, **live.objects, rng=False)
            stall = meter.seconds
            free = meter.wait_for_loop()
            report = manager.wait() if how else report
            assert report is not None
            meter.add(meter.seconds, **{"stall, s": stall, "state free, s": free, "ratio": report.ratio})


def dcp_saves(job: Job) -> None:
    """DCP's async_save in a process, from shared memory that is pinned on a GPU: two saves of each model."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a descriptor for each tensor in shared memory
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/rendezvous", rank=0, world_size=1)
    taken = 0.0
    for model in ("tiny",) if job.is_quick else ("350M", "1.5B"):
        names = {"model": model, "method": "DCP async_save, process"}
        with job.attempt(**names):
            needed = 12 * MODELS[model].parameters
            if not job.fits(5 * taken, **names):
                continue
            for where in (Path("/dev/shm"), job.folder):
                if shutil.disk_usage(where).free < 1.1 * needed:
                    raise OSError(f"no space for a state of {needed / 1e9:.1f} GB in {where}")
            began = time.monotonic()
            _save_with_dcp(job, DeviceState(MODELS[model], job.device), names)
            taken = time.monotonic() - began
    dist.destroy_process_group()


def _save_with_dcp(job: Job, live: DeviceState, names: dict[str, str]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    stager = DefaultStager(StagingOptions(job.is_cuda, True, job.is_cuda, job.is_cuda))
    for number, save in enumerate(("first", "second")):
        live.advance(STEPS if number else 0)
        folder = job.folder / f"dcp-{number}"
        meter = Meter(job, live, **names, save=save)
        response = dcp.async_save(
            live.state,
            checkpoint_id=folder,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        stall = free = meter.seconds
        if (staging := getattr(response, "staging_completion", None)) is not None:
            staging.result()
            free = meter.seconds
        getattr(response, "upload_completion", response).result()
        seconds = meter.seconds
        stored = sum(file.stat().st_size for file in folder.iterdir())
        meter.add(seconds, **{"stall, s": stall, "state free, s": free, "ratio": live.nbytes / stored})
        shutil.rmtree(folder)
    stager.close()
