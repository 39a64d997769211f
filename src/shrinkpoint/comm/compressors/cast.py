"""Rounding of values to 16 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext
from shrinkpoint.comm.compressors.layout import fill_tensor, view_dtype

CAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Compressor):
    """Rounds each value to the nearest one of another dtype: infinite in "fp16" from 65520 on.

    Raises:
        PolicyError: another dtype was named.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        validate.check_choice("dtype", self.dtype, tuple(CAST_DTYPES))

    @property
    def spec(self) -> str:
        return self.dtype

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return 2 * math.prod(shape)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        narrow = tensor.detach().to(CAST_DTYPES[self.dtype], copy=True, memory_format=torch.contiguous_format)
        return narrow.view(-1).view(torch.uint8)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        values = view_dtype(self.check_message(wire, out, context), CAST_DTYPES[self.dtype])
        if out.dtype in (values.dtype, torch.float32, torch.float64):
            out.detach().copy_(values.view(out.shape))
            return out
        return fill_tensor(out, values.to(torch.float32))
