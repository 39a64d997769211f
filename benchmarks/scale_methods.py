"""One method of saving on one state, in a process of its own that `scale.py` starts: settings and rows are JSON.

Every operation is timed by the clock and by the processor, of which user time leaves out what the system does: giving
memory, writing files. The largest resident memory during it is taken over what was resident before, and over what was
resident when there was nothing but the live state: what a method holds from save to save counts there. Linux only."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scale_states import LiveState

import shrinkpoint as sp
from shrinkpoint import _native
from shrinkpoint_lab.bench.systems import resident_bytes

RELATIVE_ERROR = 0.3
"""Of Fisher's weights: the steps that the documents' tables are for."""
_CHAIN_LOADS = 5  # of the first and the last checkpoint of a chain, in turn


class Meter:
    """Runs operations and keeps a row of each: seconds, processor and user seconds or peak memory; bytes.

    Args:
        of_memory: measure memory and no times.
    """

    def __init__(self, live: LiveState, of_memory: bool) -> None:
        self._live, self.of_memory = live, of_memory
        _return_memory()
        self._live_bytes = resident_bytes("VmRSS")
        self.rows: list[dict[str, Any]] = []

    def run(self, operation: str, work: Callable[[], Any], size: Callable[[], int] | None = None) -> Any:
        """Measure a call.

        Args:
            size: bytes written, asked afterwards.
        """
        gc.collect()
        row: dict[str, Any] = {"operation": operation}
        if self.of_memory:
            _return_memory()
            before = resident_bytes("VmRSS")
            result = work()
            peak = resident_bytes("VmHWM")
            row["peak_states"] = max(0, peak - before) / self._live.nbytes
            row["beyond_live_states"] = max(0, peak - self._live_bytes) / self._live.nbytes
        else:
            start, clock = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            result = work()
            seconds, end = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_SELF)
            user = end.ru_utime - start.ru_utime
            row |= {
                "seconds": seconds,
                "processor_seconds": user + (end.ru_stime - start.ru_stime),
                "user_seconds": user,
            }
        self.rows.append(row | ({} if size is None else {"bytes": size()}))
        return result


def _return_memory() -> None:
    """Give unused memory back to the system and start the peak anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _size(path: Path) -> int:
    return (
        path.stat().st_size
        if path.is_file()
        else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    )


def _assert_equal(live: LiveState, loaded: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(loaded[name], tensor) for name, tensor in live.tensors.items())


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# rivals


def plain_copy(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """Copies of all tensors, into new memory and into memory that was used before."""
    copies = meter.run("copy", lambda: {name: tensor.clone() for name, tensor in live.tensors.items()})
    meter.run("copy again", lambda: [copies[name].copy_(tensor) for name, tensor in live.tensors.items()])


def torch_save(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """`torch.save` and `torch.load`, with the file's bytes left to the system and brought to the disk."""
    path = folder / "state.pt"
    meter.run("keyframe", partial(torch.save, live.state, path), partial(_size, path))

    def save_durably() -> None:
        torch.save(live.state, path)
        _sync(path)

    path.unlink()
    meter.run("keyframe, synced", save_durably, partial(_size, path))
    loaded = meter.run("load keyframe", partial(torch.load, path))
    assert torch.equal(loaded["model"]["norm.weight"], live.state["model"]["norm.weight"])


def safetensors(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """`safetensors.torch.save_file` and `load_file`; tensors are maps of the file, so a load also copies them all."""
    from safetensors.torch import load_file, save_file

    path = folder / "state.safetensors"
    meter.run("keyframe", partial(save_file, live.tensors, path), partial(_size, path))
    loaded = meter.run("load keyframe", lambda: {name: tensor.clone() for name, tensor in load_file(path).items()})
    _assert_equal(live, loaded)


def torch_dcp(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """`torch.distributed.checkpoint` without processes beside this one, into a directory."""
    import torch.distributed.checkpoint as dcp

    path = folder / "dcp"
    writer = partial(dcp.FileSystemWriter, path, thread_count=threads, sync_files=False)
    meter.run("keyframe", lambda: dcp.save(live.tensors, storage_writer=writer(), no_dist=True), partial(_size, path))
    loaded = {name: torch.empty_like(tensor) for name, tensor in live.tensors.items()}
    meter.run("load keyframe", lambda: dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True))
    _assert_equal(live, loaded)


def zipnn(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """ZipNN's float32 compression of each tensor's bytes, one file of blobs; it needs a copy, which it changes."""
    from zipnn import ZipNN

    def coder() -> Any:
        return ZipNN(input_format="byte", bytearray_dtype="float32", threads=threads)

    path = folder / "state.znn"
    sizes: list[int] = []

    def save() -> None:
        sizes.clear()
        with path.open("wb") as file:
            for tensor in live.tensors.values():
                sizes.append(file.write(coder().compress(bytearray(tensor.numpy().data))))

    def load() -> dict[str, torch.Tensor]:
        loaded = {}
        with path.open("rb") as file:
            for (name, tensor), size in zip(live.tensors.items(), sizes, strict=True):
                values = bytearray(coder().decompress(file.read(size)))
                loaded[name] = torch.frombuffer(values, dtype=torch.float32).reshape(tensor.shape)
        return loaded

    meter.run("keyframe", save, partial(_size, path))
    _assert_equal(live, meter.run("load keyframe", load))


# ours


def lossless(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """The lossless scheme in a store."""
    _store(meter, live, folder, threads, "lossless")


def fisher(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """`Fisher(relative_error=0.3)` in a store."""
    _store(meter, live, folder, threads, sp.Fisher(relative_error=RELATIVE_ERROR))


def avx2(method: Callable[[Meter, LiveState, Path, int], None]) -> Callable[[Meter, LiveState, Path, int], None]:
    """A method without instructions wider than AVX2, as on processors that have none."""

    def limited(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
        _native._use_simd(1)
        try:
            method(meter, live, folder, threads)
        finally:
            _native._use_simd(2)

    return limited


def _store(meter: Meter, live: LiveState, folder: Path, threads: int, scheme: Any) -> None:
    """Saves and loads of a keyframe and of the deltas after it, through the manager that a training loop uses."""
    with sp.CheckpointManager(folder / "store", scheme=scheme, threads=threads) as manager:

        def save(step: int) -> Any:
            return manager.save(step, **live.objects, rng=False)

        for step in range(_count_states(folder)):
            live.load(step)
            kind = "keyframe" if step == 0 else "delta" if step == 1 else "delta, warm"
            report = meter.run(kind, partial(save, step))
            meter.rows[-1]["bytes"] = report.stored_bytes
    _return_memory()
    for step, kind in ((0, "load keyframe"), (1, "load delta")):
        with sp.Store(folder / "store", threads=threads) as store:
            loaded = meter.run(kind, partial(store.load, step))
        del loaded


def background(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """How long saves in the background hold up the loop, lossless and Fisher; memory until the save is done."""
    for name, scheme in (("lossless", "lossless"), ("fisher", sp.Fisher(relative_error=RELATIVE_ERROR))):
        where = folder / name
        with sp.CheckpointManager(where, scheme=scheme, threads=threads, background=True) as manager:

            def save(step: int, manager: sp.CheckpointManager = manager) -> None:
                manager.save(step, **live.objects, rng=False)
                manager.wait()

            for step in range(_count_states(folder)):
                live.load(step)
                meter.run(f"{name}, {('keyframe', 'delta', 'delta, warm')[min(step, 2)]}", partial(save, step))
                if not meter.of_memory:
                    meter.rows[-1]["stall_seconds"] = manager.stall_seconds
        shutil.rmtree(where)


def chain(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """Loads of the end of a chain of 20 beside its keyframe's, lossless and Fisher; its size does not end it."""
    _load_chain(meter, live, folder, threads, "lossless", "lossless")
    fisher_chain(meter, live, folder, threads)


def fisher_chain(meter: Meter, live: LiveState, folder: Path, threads: int) -> None:
    """The same of Fisher alone."""
    _load_chain(meter, live, folder, threads, "fisher", sp.Fisher(relative_error=RELATIVE_ERROR))


def _load_chain(meter: Meter, live: LiveState, folder: Path, threads: int, name: str, scheme: Any) -> None:
    count, where = _count_states(folder), folder / name
    with sp.CheckpointManager(where, scheme=scheme, threads=threads, keyframe_every=None) as manager:
        for step in range(20):
            live.load(step % count)
            manager.save(step, **live.objects, rng=False)
    for step in [0, 19] * (1 if meter.of_memory else _CHAIN_LOADS):
        with sp.Store(where, threads=threads) as store:
            meter.run(f"{name}, load {step + 1} of 20", partial(store.load, step))
    shutil.rmtree(where)


METHODS = {
    "copy": plain_copy,
    "torch.save": torch_save,
    "safetensors": safetensors,
    "torch DCP": torch_dcp,
    "zipnn": zipnn,
    "lossless": lossless,
    "fisher": fisher,
    "lossless, AVX2": avx2(lossless),
    "fisher, AVX2": avx2(fisher),
    "background": background,
    "chain": chain,
    "fisher chain": fisher_chain,
    "fisher chain, AVX2": avx2(fisher_chain),
}


def _count_states(folder: Path) -> int:
    return len(list(folder.parent.glob("[0-9]*.safetensors")))


@contextmanager
def _work_folder(states: Path) -> Iterator[Path]:
    folder = states / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    settings = json.loads(sys.argv[1])
    threads = int(settings["threads"])
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    states = Path(settings["states"])
    live = LiveState(states, settings["model"])
    meter = Meter(live, settings["what"] == "memory")
    with _work_folder(states) as folder:
        METHODS[settings["method"]](meter, live, folder, threads)
    print(json.dumps({"state_bytes": live.nbytes, "rows": meter.rows}))


if __name__ == "__main__":
    main()
