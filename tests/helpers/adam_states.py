"""States as Adam leaves them, with moments that a test has chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.flatten import flatten


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def squares(*shape: int, seed: int = 0, octaves: float = 2.0) -> Tensor:
    """As second moments are: rows and columns differ by so many octaves, and there is noise."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randn(n, generator=generator) * octaves for n in (shape[0], shape[-1]))
    noise = torch.randn(shape, generator=generator) / 2
    return 1e-6 * torch.exp2(rows.reshape(-1, *[1] * (len(shape) - 1)) * (len(shape) > 1) + columns + noise)


def adam(
    weights: Mapping[str, Tensor], v: Mapping[str, Tensor] | None = None, m: Mapping[str, Tensor] | None = None,
    *, step: int = 10_000, betas: tuple[float, float] = (0.9, 0.999),
) -> dict[str, Any]:  # fmt: skip
    """A model with an optimizer; what is not given of the moments is made up."""
    state = {}
    for i, (name, x) in enumerate(weights.items()):
        second = squares(*x.shape, seed=i) if v is None else v[name]
        first = normal(*x.shape, seed=i + 100, scale=0.1) * second.sqrt() if m is None else m[name]
        state[i] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
    group = {"lr": 1e-3, "betas": betas, "eps": 1e-8, "weight_decay": 0.01, "params": [*range(len(weights))]}
    return {"model": dict(weights), "optimizer": {"state": state, "param_groups": [group]}}


def known_of(state: dict[str, Any], recorded: Mapping[str, Tensor] | None = None) -> dict[str, Curvature]:
    """What is known of every weight of a state, by its name in the model."""
    flat = flatten(state)
    return {
        name: Curvature.from_state(f"model/{name}", x, flat, recorded or {}) for name, x in state["model"].items()
    }  # fmt: skip


def second_of(flat: FlatState, i: int) -> Tensor:
    return flat.tensors[f"optimizer/state/{i}/exp_avg_sq"]
