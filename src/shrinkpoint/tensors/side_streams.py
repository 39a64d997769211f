"""Work on CUDA devices beside what the caller enqueues there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


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
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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
