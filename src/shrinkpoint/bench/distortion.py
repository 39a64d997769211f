"""Relative errors between a state and what came back of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

ROLE_GROUPS: Mapping[str, tuple[Role, ...]] = {
    "W": (Role.PARAMETER, Role.MASTER),
    "m": (Role.MOMENT1,),
    "v": (Role.MOMENT2,),
}
"""Weights and moments, by the letters of the tables."""
DEFAULT_EPS = 1e-8
"""Adam's, where a state does not say."""


@dataclass(frozen=True)
class Distortion:
    """Relative errors: the length of the error over the length of what was given, all tensors of a kind together.

    Attributes:
        weights, moment1, moment2: of W, m and v; None: there is none.
        update: of Adam's direction `m / (sqrt(v) + eps)`, which is what a coarse moment does to the next step; None
            where there are no such moments.
        exact: every tensor of the state came back bit by bit.
    """

    weights: float | None
    moment1: float | None
    moment2: float | None
    update: float | None
    exact: bool

    @classmethod
    @torch.no_grad()
    def measure(cls, original: FlatState, decoded: Mapping[str, Tensor]) -> Distortion:
        """Of one state."""
        kinds = {
            kind: [name for name, info in original.infos.items() if info.role in ROLE_GROUPS[kind]]
            for kind in ROLE_GROUPS
        }
        pairs = {kind: [(original.tensors[name], decoded[name]) for name in names] for kind, names in kinds.items()}
        exact = all(_equal_bits(tensor, decoded[name]) for name, tensor in original.tensors.items())
        errors = {kind: _relative_error(both) for kind, both in pairs.items()}
        return cls(errors["W"], errors["m"], errors["v"], _relative_error(_adam_updates(original, decoded)), exact)


def _adam_updates(original: FlatState, decoded: Mapping[str, Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    for facts in original.optimizer_info.values():
        if facts.moment1 is None or facts.moment2 is None:
            continue
        eps = facts.eps or DEFAULT_EPS
        states: tuple[Mapping[str, Tensor], ...] = (original.tensors, decoded)
        before, after = (_adam_update(state[facts.moment1], state[facts.moment2], eps) for state in states)
        if before.shape == after.shape:
            yield before, after


def _adam_update(moment1: Tensor, moment2: Tensor, eps: float) -> Tensor:
    return moment1.double() / (moment2.double().sqrt() + eps)


def _relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    error = length = 0.0
    known = False
    for before, after in pairs:
        if not before.is_floating_point():
            continue
        wide = before.detach().to("cpu", torch.float64)
        error += float((wide - after.detach().to("cpu", torch.float64)).square().sum())
        length += float(wide.square().sum())
        known = True
    if not known:
        return None
    return math.sqrt(error / length) if length > 0 else (0.0 if error == 0 else math.inf)


def _equal_bits(original: Tensor, decoded: Tensor) -> bool:
    if original.shape != decoded.shape or original.dtype != decoded.dtype:
        return False
    return np.array_equal(tensor_bytes(original), tensor_bytes(decoded))
