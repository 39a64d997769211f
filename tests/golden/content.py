"""What a golden file is, and tensors that are the same everywhere and for ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shrinkpoint.container import FileWriter


@dataclass(frozen=True)
class Golden:
    """A file to be written.

    Attributes:
        state: what it holds.
        shows: text that its recipes must contain, so that it is what its name says.
        base: the golden file it is a delta against.
        scheme: None for the default.
        spool: bytes of payload after which the writer reserves room for the header.
    """

    state: Any
    shows: tuple[str, ...] = ()
    base: str | None = None
    scheme: Any = None
    spool: int = FileWriter.spool


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optimizer_state(moment1: torch.Tensor, moment2: torch.Tensor) -> dict[str, Any]:
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
    return {
        "state": {0: {"step": torch.tensor(5.0), "exp_avg": moment1, "exp_avg_sq": moment2}},
        "param_groups": [group],
    }
