"""Relative errors between a state and its decoded copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint.tensors.compare import same_bits
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

ROLE_GROUPS: Mapping[str, tuple[Role, ...]] = {
    "W": (Role.PARAMETER, Role.MASTER),
    "m": (Role.MOMENT1,),
    "v": (Role.MOMENT2,),
}
"""Roles of the weights (W), the first moments (m) and the second moments (v)."""
DEFAULT_EPS = 1e-8
"""The epsilon of Adam where a state does not record it."""


@dataclass(frozen=True)
class Distortion:
    """Relative errors of a decoded state: L2 norm of the error over that of the original, over all tensors of a group.

    Attributes:
        weights: error of the weights; None if the state has none.
        moment1: error of the first moments; None if the state has none.
        moment2: error of the second moments; None if the state has none.
        update: error of Adam's direction `m / (sqrt(v) + eps)`, which decides the next step; None without moments.
        exact: every tensor of the state came back bit for bit.
    """

    weights: float | None
    moment1: float | None
    moment2: float | None
    update: float | None
    exact: bool

    @classmethod
    @torch.no_grad()
    def measure(cls, original: FlatState, decoded: Mapping[str, Tensor]) -> Distortion:
        """Compares the decoded tensors of a state with the original."""
        pairs = {
            group: [
                (original.tensors[name], decoded[name]) for name, info in original.infos.items() if info.role in roles
            ]
            for group, roles in ROLE_GROUPS.items()
        }
        errors = {group: _relative_error(tensors) for group, tensors in pairs.items()}
        return cls(
            weights=errors["W"],
            moment1=errors["m"],
            moment2=errors["v"],
            update=_relative_error(_adam_updates(original, decoded)),
            exact=all(same_bits(tensor, decoded[name]) for name, tensor in original.tensors.items()),
        )


def _adam_updates(original: FlatState, decoded: Mapping[str, Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    """Pairs of Adam's direction of each parameter, from the original and from the decoded moments."""
    for info in original.optimizer_info.values():
        if info.moment1 is None or info.moment2 is None:
            continue
        eps = info.eps or DEFAULT_EPS
        original_update = _adam_update(original.tensors[info.moment1], original.tensors[info.moment2], eps)
        decoded_update = _adam_update(decoded[info.moment1], decoded[info.moment2], eps)
        if original_update.shape == decoded_update.shape:
            yield original_update, decoded_update


def _adam_update(moment1: Tensor, moment2: Tensor, eps: float) -> Tensor:
    return moment1.double() / (moment2.double().sqrt() + eps)


def _relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """L2 norm of the error over that of the original, over pairs (original, decoded); None without a float tensor."""
    squared_error = squared_norm = 0.0
    has_floats = False
    for original, decoded in pairs:
        if not original.is_floating_point():
            continue
        has_floats = True
        wide = original.detach().to("cpu", torch.float64)
        squared_error += float((wide - decoded.detach().to("cpu", torch.float64)).square().sum())
        squared_norm += float(wide.square().sum())
    if not has_floats:
        return None
    if squared_norm > 0:
        return math.sqrt(squared_error / squared_norm)
    return 0.0 if squared_error == 0 else math.inf
