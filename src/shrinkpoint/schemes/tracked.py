"""Schemes that write what has moved since the checkpoint before, as a reader has it, and measure nothing."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from shrinkpoint.codec import CODERS, Reference, Symbols
from shrinkpoint.errors import LossWarning
from shrinkpoint.record import JSON
from shrinkpoint.schemes import moments
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.farness import far_from
from shrinkpoint.schemes.picks import SMALLEST, Picks, largest
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.records import Coding
from shrinkpoint.schemes.settled import Settled
from shrinkpoint.schemes.spelling import Spelled
from shrinkpoint.schemes.unmeasured import Unmeasured
from shrinkpoint.state import FlatState


class Tracked(Spelled, Coding):
    """What these schemes have in common.

    The first checkpoint, and every later keyframe, holds the weights exactly. A delta moves what a reader has towards
    the weights: the difference is taken to the *reconstructed* checkpoint before, so that an error is seen, and can be
    made good, by the next save, and does not grow with the chain (arXiv 2009.13003, algorithm 1).

    What is quantized are the weights with two axes and 4096 values at least. The rest stays exact, and so does, for as
    long as it lasts, a weight that is new, has another shape, has not moved, is not finite, or is so large that a sum
    might not be.

    Args:
        optimizer: "exact" keeps the optimizer's moments bit for bit; "reset" and "lossy" do not (see `moments`).

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str]
    coders: Sequence[str] = CODERS

    def __init__(self, *, optimizer: moments.Mode = "exact") -> None:
        self._optimizer = moments.checked(optimizer)
        self._unmeasured = Unmeasured()

    # what a scheme of this kind says of itself

    @abstractmethod
    def symbols(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], flat: FlatState,
        pool: Pooled | None = None,
    ) -> dict[str, Symbols]:  # fmt: skip
        """Residual symbols by name of a weight.

        Args:
            weights: finite, float32 or narrower, of any strides; none where the checkpoint is a keyframe.
            differences: of the same names and shapes, on the same devices: the weights less what a reader has of them
                at the checkpoint before; float32, finite.
            flat: the state of which the weights are.
            pool: these are boxes of weights of several ranks; all of them are here.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def settings(self) -> dict[str, JSON]:
        """What was asked for, for the manifest."""
        raise NotImplementedError

    def further(
        self, flat: FlatState, symbols: Mapping[str, Symbols], pool: Pooled | None = None
    ) -> dict[str, Symbols]:
        """Symbols of tensors that are no weights, but of the optimizer; `symbols` are those of the weights."""
        return {}

    def notes(self) -> dict[str, JSON]:
        """What else a manifest should say, of this checkpoint and for the next one."""
        return {}

    # what a store calls

    @torch.no_grad()
    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """Lose what the scheme loses; see `schemes.Scheme`."""
        return self.decide(flat, reference).quantize(flat, reference)

    @torch.no_grad()
    def decide(self, flat: FlatState, reference: Reference | None, pool: Pooled | None = None) -> Settled:
        """What is lost of a state.

        Args:
            pool: what there is of these tensors on other ranks, all of which decide at the same time.
        """
        pools = () if pool is None else (pool,)
        picks = Picks.of(flat) if pool is None else pool.picks(flat, None)
        owned = replace(flat, optim=picks.handed_on(flat))
        symbols, far = self._of_weights(picks.tensors, owned, reference, *pools)
        if far:
            symbols, _ = self._of_weights(picks.tensors, owned, None, *pools)
            _warn_of(far)
        further = {name: one.cpu() for name, one in self.further(owned, symbols, *pools).items()}
        picks.warn()
        lossy, optimizer = (bool(symbols), bool(further)), self._optimizer
        if pool is not None:
            weights, others = pool.wholes.total(*map(len, (symbols, further)))
            lossy = weights > 0, others > 0
            if optimizer == "lossy":
                further |= {name: one.cpu() for name, one in pool.moments(flat)}
                optimizer = "exact"  # what else is to be done with it
        loss: JSON = None
        if any(lossy) or self._optimizer != "exact":
            said = "lossy" if lossy[1] else self._optimizer
            loss = {"scheme": self.id, "chosen": self.settings, "optimizer": said, **self.notes()}
            loss |= {"measured": False, "left_out": [*picks.refused]}
            self._unmeasured.tell(self, quiet=pool is not None and pool.wholes.rank > 0)
        if far:
            loss = (loss or {"scheme": self.id, "left_out": [*picks.refused]}) | {"far": _rounded(far)}
        least = (SMALLEST, 2) if pool is None else None
        made = {**symbols, **further}
        return Settled(self.id, made, picks.casts, optimizer, self.coders, loss, keyframe=bool(far), least=least)

    @property
    def arguments(self) -> dict[str, object]:
        """See `Spelled`."""
        return {**self.settings, "optimizer": self._optimizer}

    def _of_weights(
        self, picked: Mapping[str, Tensor], flat: FlatState, reference: Reference | None, pool: Pooled | None = None
    ) -> tuple[dict[str, Symbols], dict[str, float]]:
        """Symbols, on the CPU; and the errors of the weights for which a difference is worth nothing, by title."""
        differences = _differences(picked, reference)
        if pool is None:
            weights = {name: picked[name] for name in differences}
            made = self.symbols(weights, differences, flat)
            made = {n: one for n, one in made.items() if _serves(one, weights[n], differences[n])}
            far = far_from(made, weights, differences, reference)
            return {name: one.cpu() for name, one in made.items()}, far
        titles = pool.all({name: name in differences for name in picked})
        differences = {name: x for name, x in differences.items() if pool.title(name) in titles}
        weights = {name: picked[name] for name in differences}
        made = self.symbols(weights, differences, flat, pool)
        ends = pool.most({name: _ends(weights[name], x) for name, x in differences.items()})
        serves = pool.all({n: _is_within(one, ends[pool.title(n)], weights[n].dtype) for n, one in made.items()})
        made = {name: one for name, one in made.items() if pool.title(name) in serves}
        far = far_from(made, weights, differences, reference, pool)
        return {name: one.cpu() for name, one in made.items()}, far


def _differences(weights: Mapping[str, Tensor], reference: Reference | None) -> dict[str, Tensor]:
    """To what a reader has of each, where that can be a base."""
    out: dict[str, Tensor] = {}
    for name, x in weights.items():
        held = None if reference is None else reference.matching(name, tuple(x.shape), x.dtype)
        if held is not None:
            difference = x.to(torch.float32) - held.to(x.device, torch.float32)
            if math.isfinite(largest(difference)):  # else the base is not finite, or too far away
                out[name] = difference
    return out


def _warn_of(far: Mapping[str, float]) -> None:
    worst = max(far.values())
    text = (
        f"{', '.join(far)}: what was saved last is farther away than zero, and a difference to it would leave an error "
        f"of {worst:.2g} times the weights: this checkpoint is a keyframe"
    )
    warnings.warn(text, LossWarning, stacklevel=5)


def _rounded(far: Mapping[str, float]) -> dict[str, JSON]:
    """As a manifest can say it."""
    return {name: float(f"{error:.4g}") if math.isfinite(error) else str(error) for name, error in far.items()}


def _serves(symbols: Symbols, x: Tensor, difference: Tensor) -> bool:
    """Whether something has moved, and no sum of base and center can be too large for the dtype."""
    return _is_within(symbols, _ends(x, difference), x.dtype)


def _ends(x: Tensor, difference: Tensor) -> tuple[float, float]:
    """How far a weight has moved at most, and how large a base of it may be."""
    moved = largest(difference)
    return moved, largest(x) + moved


def _is_within(symbols: Symbols, ends: tuple[float, ...], dtype: torch.dtype) -> bool:
    moved, base = ends
    return moved > 0 and base + largest(symbols.centers) <= torch.finfo(dtype).max
