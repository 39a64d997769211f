"""States of a trainer and of a model that follows it."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.tensors.dtypes import as_bits


def weights(seed: int = 0, size: int = 300) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator).bfloat16()
    return {"matrix": matrix, "bias": torch.randn(size, generator=generator), "count": torch.tensor(seed)}


def stepped(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Some of the values changed a little, as training does."""
    generator = torch.Generator().manual_seed(seed)
    moved = torch.rand(state["matrix"].shape, generator=generator) < 0.01
    bits = state["matrix"].view(torch.int16)
    matrix = torch.where(moved, bits + 1, bits).view(torch.bfloat16)
    return {"matrix": matrix, "bias": state["bias"] * 1.0001, "count": state["count"] + 1}


def zeros_like(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def assert_same(live: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    assert live.keys() == state.keys()
    for name, tensor in state.items():
        assert live[name].dtype == tensor.dtype and live[name].shape == tensor.shape
        assert torch.equal(as_bits(live[name].contiguous()), as_bits(tensor.contiguous())), name
