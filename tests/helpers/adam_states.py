"""States as Adam leaves them, with moments that a test has chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.schemes.fisher.curvature import Curvature, GlobalWeights, estimate_curvatures
from shrinkpoint.schemes.fisher.moment_statistics import MomentStatistics
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.dtypes import DTYPE_NAMES
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import Role, TensorInfo


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def squares(*shape: int, seed: int = 0, octaves: float = 2.0) -> Tensor:
    """As second moments are: rows and columns differ by so many octaves, and there is noise."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randn(n, generator=generator) * octaves for n in (shape[0], shape[-1]))
    noise = torch.randn(shape, generator=generator) / 2
    return 1e-6 * torch.exp2(rows.reshape(-1, *[1] * (len(shape) - 1)) * (len(shape) > 1) + columns + noise)


def adam(
    weights: Mapping[str, Tensor],
    v: Mapping[str, Tensor] | None = None,
    m: Mapping[str, Tensor] | None = None,
    *,
    step: int = 10_000,
    betas: tuple[float, float] = (0.9, 0.999),
) -> dict[str, Any]:
    """A model with an optimizer; what is not given of the moments is made up."""
    state = {}
    for i, (name, x) in enumerate(weights.items()):
        second = squares(*x.shape, seed=i) if v is None else v[name]
        first = normal(*x.shape, seed=i + 100, scale=0.1) * second.sqrt() if m is None else m[name]
        state[i] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
    group = {"lr": 1e-3, "betas": betas, "eps": 1e-8, "weight_decay": 0.01, "params": [*range(len(weights))]}
    return {"model": dict(weights), "optimizer": {"state": state, "param_groups": [group]}}


def global_weights(weights: Mapping[str, Tensor]) -> GlobalWeights:
    """Weights of a single process, by the names given."""
    infos = {
        name: TensorInfo(name, tuple(weight.shape), DTYPE_NAMES[weight.dtype], Role.PARAMETER)
        for name, weight in weights.items()
    }
    return GlobalWeights(GlobalTensors.from_state(FlatState(None, dict(weights), infos, {})), weights, weights)


def known_of(state: dict[str, Any], recorded: Mapping[str, Tensor] | None = None) -> dict[str, Curvature]:
    """The curvature of every weight of a state, by its name in the model."""
    flat = flatten(state)
    names = [f"model/{name}" for name in state["model"]]
    weights = GlobalWeights(GlobalTensors.from_state(flat), {name: flat.tensors[name] for name in names}, names)
    found = estimate_curvatures(weights, flat, recorded or {}, MomentStatistics(flat))
    return {name.removeprefix("model/"): curvature for name, curvature in found.items()}
