"""Checkpoints of a part of the values, exact: SCAR (arXiv 1810.07354) and TOPN, the baselines of arXiv 2009.13003."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.codec import Symbols
from shrinkpoint.record import JSON
from shrinkpoint.schemes import moments
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.spelling import seeded
from shrinkpoint.schemes.tracked import Tracked
from shrinkpoint.state import FlatState

Order = Literal["largest", "round robin", "random"]


class Partial(Tracked):
    """A share of all values is written as it is now; of the others a reader has what was written last.

    So a checkpoint holds values of several ages. Which values are written is coded as the gaps between them, or under
    whatever context makes that smaller. A value that a reader has already is not written again.

    Args:
        fraction: of the values of all quantized weights together: .125, or "12.5%"; above 0, at most 1; rounded up.
        optimizer: of `Tracked`.
    """

    def __init__(self, *, fraction: float | str, optimizer: moments.Mode = "exact") -> None:
        super().__init__(optimizer=optimizer)
        self._fraction = arguments.share("fraction", fraction)

    @abstractmethod
    def places(self, distances: Tensor, count: int) -> Tensor:
        """Which values are written: int64, `count` different ones.

        Args:
            distances: of every value to what a reader has of it, of all weights one behind the other.
        """
        raise NotImplementedError

    def symbols(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], flat: FlatState,
        pool: Pooled | None = None,
    ) -> dict[str, Symbols]:  # fmt: skip
        """See `Tracked`."""
        if pool is not None:
            return self._of_boxes(weights, differences, pool)
        if not weights:
            return {}
        home = next(iter(weights.values())).device
        distances = torch.cat([one.abs().reshape(-1).to(home) for one in differences.values()])
        count = min(math.ceil(self._fraction * distances.numel()), distances.numel())
        stale = torch.ones(distances.numel(), dtype=torch.uint8, device=home)
        stale[self.places(distances, count)] = 0
        stale.logical_or_(distances == 0)
        parts = torch.split(stale, [x.numel() for x in weights.values()])
        return {
            name: _symbols(x, part.reshape(x.shape).to(x.device))
            for (name, x), part in zip(weights.items(), parts, strict=True)
        }

    def _of_boxes(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], pool: Pooled
    ) -> dict[str, Symbols]:
        """As `symbols`, of boxes of weights of several ranks."""
        distances = {name: x.abs().reshape(-1) for name, x in differences.items() if pool.wholes.counts(name)}
        totals = [int(one) for one in pool.wholes.gather(sum(x.numel() for x in distances.values()))]
        count = min(math.ceil(self._fraction * sum(totals)), sum(totals))
        fresh = self.boxes(distances, count, totals, pool) if count else {}
        return {
            name: _symbols(x, (~fresh[name]).to(torch.uint8).reshape(x.shape))
            for name, x in weights.items()
            if name in fresh
        }

    def boxes(
        self, distances: Mapping[str, Tensor], count: int, totals: Sequence[int], pool: Pooled
    ) -> dict[str, Tensor]:
        """Which values of each box are written; bool, 1-d. A collective.

        Args:
            distances: of every value, by name.
            count: of all values to be written, on all ranks.
            totals: how many values each rank has.
        """
        limit = pool.highest(distances, count)
        above = {name: x > limit for name, x in distances.items()}
        ties = {name: (x == limit) & (x > 0) for name, x in distances.items()}
        both = (sum(int(one.sum()) for one in some.values()) for some in (above, ties))
        told = pool.wholes.gather(tuple(both))
        left = count - sum(one for one, _ in told) - sum(one for _, one in told[: pool.wholes.rank])
        for name, tied in ties.items():
            taken = tied & (tied.cumsum(0) <= max(left, 0))
            left -= int(tied.sum())
            above[name] |= taken
        return above


class SCAR(Partial):
    """Prioritized checkpoints: what has moved farthest since it was last written comes first.

    Save `1 / fraction` times as often as you would save everything, for the same bytes. After a partial failure restore
    only what was lost: `Manager.restore(only=...)`.

    Args:
        fraction: 1/8 is the authors' strong setting.
        order: "largest" distance first, or, to compare, "round robin" or at "random". Round robin begins with the first
            value after every keyframe, and writes each once in `1 / fraction` saves, rounded up.
        seed: of "random", from 0.
        optimizer: of `Tracked`.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "scar"

    def __init__(
        self, *, fraction: float | str = 1 / 8, order: Order = "largest", seed: int = 0,
        optimizer: moments.Mode = "exact",
    ) -> None:  # fmt: skip
        super().__init__(fraction=fraction, optimizer=optimizer)
        self._order: Order = arguments.choice("order", order, get_args(Order))
        self._seed, self._turn = seeded(seed), 0

    @property
    def settings(self) -> dict[str, JSON]:
        seed: dict[str, JSON] = {"seed": self._seed} if self._order == "random" else {}
        return {"fraction": self._fraction, "order": self._order, **seed}

    def notes(self) -> dict[str, JSON]:
        """How many saves lie behind, since the last keyframe."""
        return {"turn": self._turn}

    def resume(self, loss: JSON, generation: int = 0) -> None:
        """Go on where a checkpoint left off, so that "round robin" does not begin again; see `schemes.Resuming`."""
        turn = loss.get("turn") if isinstance(loss, dict) and loss.get("scheme") == self.id else None
        self._turn = turn if type(turn) is int and 0 <= turn < 1 << 31 else 0

    def symbols(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], flat: FlatState,
        pool: Pooled | None = None,
    ) -> dict[str, Symbols]:  # fmt: skip
        """See `Tracked`."""
        found = super().symbols(weights, differences, flat, pool)
        some = bool(found) if pool is None else any(pool.wholes.gather(bool(found)))
        self._turn = self._turn + 1 if some else 0
        return found

    def boxes(
        self, distances: Mapping[str, Tensor], count: int, totals: Sequence[int], pool: Pooled
    ) -> dict[str, Tensor]:
        """See `Partial`: values are numbered by rank."""
        if self._order == "largest":
            return super().boxes(distances, count, totals, pool)
        chosen = torch.zeros(sum(totals), dtype=torch.bool)
        chosen[self.places(torch.empty(sum(totals), device="meta"), count).cpu()] = True
        first = sum(totals[: pool.wholes.rank])
        mine = torch.split(chosen[first : first + totals[pool.wholes.rank]], [x.numel() for x in distances.values()])
        return {name: part.to(x.device) & (x != 0) for (name, x), part in zip(distances.items(), mine, strict=True)}

    def places(self, distances: Tensor, count: int) -> Tensor:
        """See `Partial`."""
        total = distances.numel()
        if self._order == "largest":
            return distances.topk(count, sorted=False).indices
        if self._order == "round robin":
            return (torch.arange(count, device=_host(distances)) + self._turn * count) % total
        generator = torch.Generator().manual_seed(self._seed << 31 | self._turn)
        return torch.randperm(total, generator=generator)[:count].to(_host(distances))


class TOPN(Partial):
    """The largest entries of the difference to the checkpoint before, exact.

    Args:
        fraction: N, as a share of all values.
        optimizer: of `Tracked`.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "topn"

    def __init__(self, *, fraction: float | str = 0.01, optimizer: moments.Mode = "exact") -> None:
        super().__init__(fraction=fraction, optimizer=optimizer)

    @property
    def settings(self) -> dict[str, JSON]:
        return {"fraction": self._fraction}

    def places(self, distances: Tensor, count: int) -> Tensor:
        """See `Partial`."""
        return distances.topk(count, sorted=False).indices


def _symbols(x: Tensor, stale: Tensor) -> Symbols:
    """Code 0: the value itself; code 1: no difference to what a reader has."""
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    zero = torch.zeros(1, device=x.device)
    return Symbols(stale, zero, x[stale == 0].to(dtype), first=1, residual=True)


def _host(x: Tensor) -> torch.device:
    """Where a tensor is; the CPU of one that is nowhere."""
    return torch.device("cpu") if x.is_meta else x.device
