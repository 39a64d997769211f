"""Sparse updates, a share of the values written exactly: SCAR (arXiv 1810.07354) and TOPN, baselines of arXiv
2009.13003.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.schemes import optimizer_state
from shrinkpoint.schemes.base import check_seed
from shrinkpoint.schemes.global_stats import GlobalStats
from shrinkpoint.schemes.residual import ResidualScheme
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

Order = Literal["largest", "round robin", "random"]


class SparseUpdate(ResidualScheme):
    """A share of all values is written as it is now; of the others a reader has what was written last.

    So a checkpoint holds values of several ages. Which values are written is coded as the gaps between them, or under
    whatever context makes that smaller. A value that a reader has already is not written again.

    Args:
        fraction: of the values of all quantized weights together: .125, or "12.5%"; above 0, at most 1; rounded up.
        optimizer: of `ResidualScheme`.
    """

    def __init__(self, *, fraction: float | str, optimizer: optimizer_state.Mode = "exact") -> None:
        super().__init__(optimizer=optimizer)
        self._fraction = validate.check_fraction("fraction", fraction)

    @abstractmethod
    def select_indices(self, distances: Tensor, count: int) -> Tensor:
        """Which values are written: int64, `count` different ones.

        Args:
            distances: of every value to what a reader has of it, of all weights one behind the other.
        """
        raise NotImplementedError

    def quantize_weights(
        self,
        weights: Mapping[str, Tensor],
        differences: Mapping[str, Tensor],
        state: FlatState,
        pool: GlobalStats | None = None,
    ) -> dict[str, CodebookTensor]:
        """See `ResidualScheme`."""
        if pool is not None:
            return self._quantize_shards(weights, differences, pool)
        if not weights:
            return {}
        home = next(iter(weights.values())).device
        distances = torch.cat([one.abs().reshape(-1).to(home) for one in differences.values()])
        count = min(math.ceil(self._fraction * distances.numel()), distances.numel())
        stale = torch.ones(distances.numel(), dtype=torch.uint8, device=home)
        stale[self.select_indices(distances, count)] = 0
        stale.logical_or_(distances == 0)
        parts = torch.split(stale, [x.numel() for x in weights.values()])
        return {
            name: _sparse_codes(x, part.reshape(x.shape).to(x.device))
            for (name, x), part in zip(weights.items(), parts, strict=True)
        }

    def _quantize_shards(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], pool: GlobalStats
    ) -> dict[str, CodebookTensor]:
        """As `symbols`, of boxes of weights of several ranks."""
        distances = {
            name: x.abs().reshape(-1) for name, x in differences.items() if pool.global_tensors.is_primary(name)
        }
        totals = [int(one) for one in pool.global_tensors.all_gather(sum(x.numel() for x in distances.values()))]
        count = min(math.ceil(self._fraction * sum(totals)), sum(totals))
        fresh = self.select_in_shards(distances, count, totals, pool) if count else {}
        return {
            name: _sparse_codes(x, (~fresh[name]).to(torch.uint8).reshape(x.shape))
            for name, x in weights.items()
            if name in fresh
        }

    def select_in_shards(
        self, distances: Mapping[str, Tensor], count: int, totals: Sequence[int], pool: GlobalStats
    ) -> dict[str, Tensor]:
        """Which values of each box are written; bool, 1-d. A collective.

        Args:
            distances: of every value, by name.
            count: of all values to be written, on all ranks.
            totals: how many values each rank has.
        """
        limit = pool.kth_largest(distances, count)
        above = {name: x > limit for name, x in distances.items()}
        ties = {name: (x == limit) & (x > 0) for name, x in distances.items()}
        both = (sum(int(one.sum()) for one in some.values()) for some in (above, ties))
        told = pool.global_tensors.all_gather(tuple(both))
        left = count - sum(one for one, _ in told) - sum(one for _, one in told[: pool.global_tensors.rank])
        for name, tied in ties.items():
            taken = tied & (tied.cumsum(0) <= max(left, 0))
            left -= int(tied.sum())
            above[name] |= taken
        return above


class SCAR(SparseUpdate):
    """Prioritized checkpoints: what has moved farthest since it was last written comes first.

    Save `1 / fraction` times as often as you would save everything, for the same bytes. After a partial failure restore
    only what was lost: `Manager.restore(only=...)`.

    Args:
        fraction: 1/8 is the authors' strong setting.
        order: "largest" distance first, or, to compare, "round robin" or at "random". Round robin begins with the first
            value after every keyframe, and writes each once in `1 / fraction` saves, rounded up.
        seed: of "random", from 0.
        optimizer: of `ResidualScheme`.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "scar"

    def __init__(
        self,
        *,
        fraction: float | str = 1 / 8,
        order: Order = "largest",
        seed: int = 0,
        optimizer: optimizer_state.Mode = "exact",
    ) -> None:
        super().__init__(fraction=fraction, optimizer=optimizer)
        self._order: Order = validate.check_choice("order", order, get_args(Order))
        self._seed, self._round = check_seed(seed), 0

    @property
    def settings(self) -> dict[str, JSON]:
        seed: dict[str, JSON] = {"seed": self._seed} if self._order == "random" else {}
        return {"fraction": self._fraction, "order": self._order, **seed}

    def manifest_extra(self) -> dict[str, JSON]:
        """How many saves lie behind, since the last keyframe."""
        return {"turn": self._round}

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Go on where a checkpoint left off, so that "round robin" does not begin again; see `schemes.Resumable`."""
        turn = loss.get("turn") if isinstance(loss, dict) and loss.get("scheme") == self.id else None
        self._round = turn if type(turn) is int and 0 <= turn < 1 << 31 else 0

    def quantize_weights(
        self,
        weights: Mapping[str, Tensor],
        differences: Mapping[str, Tensor],
        state: FlatState,
        pool: GlobalStats | None = None,
    ) -> dict[str, CodebookTensor]:
        """See `ResidualScheme`."""
        found = super().quantize_weights(weights, differences, state, pool)
        some = bool(found) if pool is None else any(pool.global_tensors.all_gather(bool(found)))
        self._round = self._round + 1 if some else 0
        return found

    def select_in_shards(
        self, distances: Mapping[str, Tensor], count: int, totals: Sequence[int], pool: GlobalStats
    ) -> dict[str, Tensor]:
        """See `SparseUpdate`: values are numbered by rank."""
        if self._order == "largest":
            return super().select_in_shards(distances, count, totals, pool)
        chosen = torch.zeros(sum(totals), dtype=torch.bool)
        chosen[self.select_indices(torch.empty(sum(totals), device="meta"), count).cpu()] = True
        first = sum(totals[: pool.global_tensors.rank])
        mine = torch.split(
            chosen[first : first + totals[pool.global_tensors.rank]], [x.numel() for x in distances.values()]
        )
        return {name: part.to(x.device) & (x != 0) for (name, x), part in zip(distances.items(), mine, strict=True)}

    def select_indices(self, distances: Tensor, count: int) -> Tensor:
        """See `SparseUpdate`."""
        total = distances.numel()
        if self._order == "largest":
            return distances.topk(count, sorted=False).indices
        if self._order == "round robin":
            return (torch.arange(count, device=_device_of(distances)) + self._round * count) % total
        generator = torch.Generator().manual_seed(self._seed << 31 | self._round)
        return torch.randperm(total, generator=generator)[:count].to(_device_of(distances))


class TOPN(SparseUpdate):
    """The largest entries of the difference to the checkpoint before, exact.

    Args:
        fraction: N, as a share of all values.
        optimizer: of `ResidualScheme`.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "topn"

    def __init__(self, *, fraction: float | str = 0.01, optimizer: optimizer_state.Mode = "exact") -> None:
        super().__init__(fraction=fraction, optimizer=optimizer)

    @property
    def settings(self) -> dict[str, JSON]:
        return {"fraction": self._fraction}

    def select_indices(self, distances: Tensor, count: int) -> Tensor:
        """See `SparseUpdate`."""
        return distances.topk(count, sorted=False).indices


def _sparse_codes(x: Tensor, stale: Tensor) -> CodebookTensor:
    """Code 0: the value itself; code 1: no difference to what a reader has."""
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    zero = torch.zeros(1, device=x.device)
    return CodebookTensor(stale, zero, x[stale == 0].to(dtype), first_code=1, residual=True)


def _device_of(x: Tensor) -> torch.device:
    """Where a tensor is; the CPU of one that is nowhere."""
    return torch.device("cpu") if x.is_meta else x.device
