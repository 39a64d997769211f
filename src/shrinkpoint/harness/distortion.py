"""How far what came back is from what was given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.record import Role
from shrinkpoint.state import FlatState

GROUPS: Mapping[str, tuple[Role, ...]] = {
    "W": (Role.PARAMETER, Role.MASTER), "m": (Role.MOMENT1,), "v": (Role.MOMENT2,),
}  # fmt: skip
"""Weights and moments, by the letters of the tables."""
EPS = 1e-8
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
    def of(cls, given: FlatState, returned: Mapping[str, Tensor]) -> Distortion:
        """Of one state."""
        kinds = {kind: [name for name, info in given.infos.items() if info.role in GROUPS[kind]] for kind in GROUPS}
        pairs = {kind: [(given.tensors[name], returned[name]) for name in names] for kind, names in kinds.items()}
        exact = all(_same(tensor, returned[name]) for name, tensor in given.tensors.items())
        errors = {kind: _relative(both) for kind, both in pairs.items()}
        return cls(errors["W"], errors["m"], errors["v"], _relative(_updates(given, returned)), exact)


def _updates(given: FlatState, returned: Mapping[str, Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    for facts in given.optim.values():
        if facts.moment1 is None or facts.moment2 is None:
            continue
        eps = facts.eps or EPS
        states: tuple[Mapping[str, Tensor], ...] = (given.tensors, returned)
        before, after = (_update(state[facts.moment1], state[facts.moment2], eps) for state in states)
        if before.shape == after.shape:
            yield before, after


def _update(first: Tensor, second: Tensor, eps: float) -> Tensor:
    return first.double() / (second.double().sqrt() + eps)


def _relative(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
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


def _same(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return np.array_equal(bits_of(before), bits_of(after))
