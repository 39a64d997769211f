"""Work beside the caller's is done after what it depends on, and before what must not change it."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint.tensors.flat_state import copy_on_devices, flatten, snapshot
from shrinkpoint.tensors.memory import SideStreams


def test_tensors_in_host_memory_need_no_streams():
    streams, x = SideStreams(), torch.arange(5)
    streams.fork([x])
    with streams.use():
        y = x + 1
    streams.join()
    streams.synchronize()
    assert y.tolist() == [1, 2, 3, 4, 5]


def test_a_copy_where_the_state_is_has_memory_of_its_own_and_the_same_bits():
    nan = torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32)
    state = flatten(
        {"a": nan, "b": torch.arange(6).reshape(2, 3).t(), "empty": torch.empty(0, 3), "scalar": torch.tensor(1)}
    )
    copy = copy_on_devices(state)
    assert copy is not None and list(copy.tensors) == list(state.tensors)
    for name, tensor in state.tensors.items():
        found = copy.tensors[name]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and found.is_contiguous()
        assert found.contiguous().numpy().tobytes() == tensor.contiguous().numpy().tobytes()
        assert not tensor.numel() or found.data_ptr() != tensor.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_the_caller_enqueues_later_waits_until_a_state_was_read():
    streams, x = SideStreams(), torch.zeros(1 << 24, device="cuda")
    torch.cuda._sleep(100_000_000)
    x.add_(1)
    state = flatten({"x": x})
    streams.fork(state.tensors.values())
    with streams.use():
        copy = snapshot(state, wait=False)
    streams.join()
    x.add_(1)
    streams.synchronize()
    assert bool((copy.tensors["x"] == 1).all()) and bool((x == 2).all())
