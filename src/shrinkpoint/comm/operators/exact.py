"""Bytes as they are: what everything else is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint.comm.operators.base import PLAIN, Context, Operator
from shrinkpoint.comm.operators.flat import words


@dataclass(frozen=True)
class Exact(Operator):
    """The tensor's own bytes, in row-major order: nothing is lost, not even the payload of a nan."""

    @property
    def spec(self) -> str:
        return "exact"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        return math.prod(shape) * dtype.itemsize

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        values = words(self.checked(wire, out, context), out.dtype)
        out.detach().copy_(values.view(out.shape))
        return out
