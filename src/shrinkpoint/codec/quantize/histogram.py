"""What a quantizer takes of a histogram: plain numbers, whoever counted them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor

Numbers: TypeAlias = Tensor | npt.NDArray[Any]
"""The values of a histogram's cells, or their counts: 1-d, on any device."""


def wide(x: Numbers) -> Tensor:
    """float64, on the CPU."""
    return torch.as_tensor(x).detach().to("cpu", torch.float64)
