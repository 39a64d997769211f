"""Memory for many tensors in a few large blocks, out-of-memory errors, side streams of copies, and default devices."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.errors import PolicyError

TENSOR_ALIGN = 64  # Tensors start at multiples of this number of bytes, as those that torch allocates
_HEADER = 64  # Bytes that the native pool puts before a block; the two together fill whole pages
_MIN_BLOCK, _MAX_BLOCK = 1 << 20, 1 << 25
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and usage of a control group, versions 2 and 1, where a container sees its own."""
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_OUT_OF_MEMORY = re.compile("OutOfMemoryError|MemoryError|out of memory|can't allocate memory|not enough memory")
"""torch raises an OutOfMemoryError for some devices, and a RuntimeError for others and for the host."""


_callers_device: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)
"""The default device of the caller of a function that is `host_by_default`; None: theirs holds."""

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)
"""Settings of a process that change the numbers of training, each with what reads and what sets it."""


@contextmanager
def host_by_default() -> Iterator[None]:
    """Make tensors without a device on the host, also where the caller has set another default (`torch.device`)."""
    device = torch.get_default_device()
    if device.type == "cpu":
        yield
        return
    token = _callers_device.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _callers_device.reset(token)


@contextmanager
def callers_default() -> Iterator[None]:
    """Give a function of the caller the default device that the caller has set, and undo what it sets for the process:
    default dtype and device, number of threads, deterministic algorithms."""
    device, place = _callers_device.get(), _default_device_context()
    token = _callers_device.set(None)  # within that function, what is `host_by_default` has another caller
    settings = [(get(), get, put) for get, put in _SETTINGS]
    try:
        with device or nullcontext():
            yield
    finally:
        _callers_device.reset(token)
        for value, get, put in settings:
            if get() != value:
                put(value)
        if _default_device_context() is not place:
            torch.set_default_device(None if place is None else place.device)


def _default_device_context() -> Any:
    """What `torch.set_default_device` has set in this thread; None if nothing, or if this torch has no such place."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def is_out_of_memory(error: Exception) -> bool:
    """True if an error says that a device or the host has no memory left; also one that another rank sent as text."""
    kinds = (MemoryError, RuntimeError, PolicyError)
    return isinstance(error, kinds) and _OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}") is not None


def available_bytes() -> int:
    """Bytes of memory that this process can still take, as far as the system says so; 0 if it does not."""
    limits: list[int] = []
    with suppress(OSError, ValueError, LookupError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) << 10)
    for limit, usage in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # "max" is no number
            limits.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
    if not limits and hasattr(os, "sysconf"):
        with suppress(OSError, ValueError):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    if sys.platform == "linux":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(limits, default=0))


class Arena:
    """Allocates memory for the tensors of a state in a few large blocks; safe to use from several threads.

    Most tensors are much smaller than a huge page; allocated one by one, the page faults of their memory cost more
    than copying or decoding them. The native buffer pool asks for huge pages where these come fast, and reuses freed
    blocks for the next file of a chain.

    Block sizes double from 1 MiB to 32 MiB, so a small state uses little memory. An array that was allocated keeps its
    whole block alive, which costs nothing when all tensors of a state are used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: Bytes = np.empty(0, np.uint8)
        self._next_size = _MIN_BLOCK

    def allocate(self, nbytes: int) -> Bytes:
        """Return an uninitialized uint8 array of exactly `nbytes`, aligned to 64 bytes."""
        rounded = -(-nbytes // TENSOR_ALIGN) * TENSOR_ALIGN
        if rounded > self._next_size // 2:
            return _native.empty(nbytes)
        with self._lock:
            if rounded > self._block.nbytes:
                self._block = _native.empty(self._next_size - _HEADER)
                self._next_size = min(2 * self._next_size, _MAX_BLOCK)
            block, self._block = self._block[:nbytes], self._block[rounded:]
        return block


class SideStreams:
    """A stream for each CUDA device of some tensors, beside the stream that the caller uses there.

    Where all tensors are in host memory there are none, and nothing here does anything.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def fork(self, tensors: Iterable[Tensor]) -> None:
        """Let what is enqueued on these streams wait for all that the caller has enqueued until now.

        Args:
            tensors: that will be read there; their memory is not given to other tensors before.
        """
        on_devices = [tensor for tensor in tensors if tensor.is_cuda]
        for device in {tensor.device for tensor in on_devices}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        for tensor in on_devices:
            tensor.record_stream(self._streams[tensor.device])

    def join(self) -> None:
        """Let what the caller enqueues from now on wait, on the devices, for all that these streams have been given."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let this thread enqueue its work on these streams."""
        if not self._streams:
            yield
            return
        with ExitStack() as stack, torch.cuda.device(torch.cuda.current_device()):
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def synchronize(self) -> None:
        """Wait until all that these streams have been given is done, so that the host may read its results."""
        for stream in self._streams.values():
            stream.synchronize()


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Wait until what this thread has enqueued on the tensors' CUDA devices is done."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
