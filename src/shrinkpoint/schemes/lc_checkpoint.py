"""LC-Checkpoint (arXiv 2009.13003), and what its paper compares with: SCAR (arXiv 1810.07354) and TOPN.

LC-Checkpoint writes the largest buckets of differences with one sign and exponent. SCAR and TOPN write the values that
moved farthest, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.exponent_buckets import Representative, promote
from shrinkpoint.schemes.base import check_seed
from shrinkpoint.schemes.plan import OptimizerMode
from shrinkpoint.schemes.residual import ResidualScheme
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

Scope = Literal["tensor", "model"]


class LCCheckpoint(ResidualScheme):
    """Exponent-based quantization and priority promotion of differences; nothing is searched or measured.

    Args:
        bits: x, 1 to 8: the `2^x - 1` buckets of one sign and exponent with the largest exponents are written.
        scope: over which these are chosen: each "tensor" by itself, or the whole "model", as in the paper, where
            layers whose weights move less than others are never written (docs/schemes.md).
        representative: what a bucket's values become, its "mean" or, as in the paper, its "middle".
        paper: the defaults of the paper: scope "model", representative "middle", and Huffman codes.
        optimizer: as of `ResidualScheme`.

    Raises:
        PolicyError: an invalid argument.
    """

    id: ClassVar[str] = "lc-checkpoint"

    def __init__(
        self,
        *,
        bits: int = 3,
        scope: Scope | None = None,
        representative: Representative | None = None,
        paper: bool = False,
        optimizer: OptimizerMode = "exact",
    ) -> None:
        super().__init__(optimizer=optimizer)
        defaults: tuple[Scope, Representative] = ("model", "middle") if paper else ("tensor", "mean")
        self._bits, self._paper = validate.check_int("bits", bits, maximum=8), validate.check_bool("paper", paper)
        self._scope: Scope = validate.check_choice("scope", defaults[0] if scope is None else scope, get_args(Scope))
        self._representative: Representative = validate.check_choice(
            "representative", defaults[1] if representative is None else representative, get_args(Representative)
        )
        self._explicit = scope, representative
        self.coders: Sequence[str] = ("huffman",) if paper else CODERS

    @property
    def arguments(self) -> dict[str, object]:
        scope, representative = self._explicit
        return {**super().arguments, "scope": scope, "representative": representative}

    @property
    def settings(self) -> dict[str, JSON]:
        return {"bits": self._bits, "scope": self._scope, "representative": self._representative, "paper": self._paper}

    def quantize_weights(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], state: FlatState, stats: GlobalStats
    ) -> dict[str, CodebookTensor]:
        buckets = stats.exponent_buckets(differences, shared=self._scope == "model")
        return {
            name: promote(difference, buckets[stats.global_name(name)], self._bits, self._representative)
            for name, difference in differences.items()
        }


Order = Literal["largest", "round robin", "random"]


class SparseUpdate(ResidualScheme):
    """Writes a share of all values exactly; the others keep the value that was written last.

    So a checkpoint holds values of several ages. The written indices are coded as the gaps between them, or given
    whatever context makes that smaller. A value that a reader has already is not written again.

    Args:
        fraction: of the values of all quantized weights together: 0.125, or "12.5%"; above 0, at most 1; rounded up.
        optimizer: as of `ResidualScheme`.
    """

    def __init__(self, *, fraction: float | str, optimizer: OptimizerMode = "exact") -> None:
        super().__init__(optimizer=optimizer)
        self._fraction = validate.check_fraction("fraction", fraction)

    def select_indices(self, distances: Tensor, count: int, counts: Sequence[int], stats: GlobalStats) -> Tensor:
        """Indices of this rank's values that are written: int64, each different. A collective.

        Args:
            distances: of each of this rank's values to what a reader has of it, of all weights one behind the other.
            count: how many values of all ranks are written.
            counts: how many values each rank has.
        """
        return distances.topk(stats.count_among_largest(distances, count, counts), sorted=False).indices

    def quantize_weights(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], state: FlatState, stats: GlobalStats
    ) -> dict[str, CodebookTensor]:
        primary = stats.global_tensors.primary
        distances = {name: diff.abs().reshape(-1) for name, diff in differences.items() if name in primary}
        counts = stats.global_tensors.collectives.all_gather(sum(distance.numel() for distance in distances.values()))
        count = min(math.ceil(self._fraction * sum(counts)), sum(counts))
        if not count:
            return {}
        device = next((distance.device for distance in distances.values()), torch.device("cpu"))
        joined = torch.cat(
            [
                torch.empty(0, dtype=torch.float32, device=device),
                *(distance.to(device) for distance in distances.values()),
            ]
        )
        is_written = torch.zeros(joined.numel(), dtype=torch.bool, device=device)
        is_written[self.select_indices(joined, count, counts, stats)] = True
        is_written &= joined != 0
        parts = torch.split(is_written, [distance.numel() for distance in distances.values()])
        stale = {
            name: (~part).to(weights[name].device, torch.uint8) for name, part in zip(distances, parts, strict=True)
        }
        return {
            name: _sparse_codes(weight, stale[name].reshape(weight.shape))
            for name, weight in weights.items()
            if name in stale
        }


class SCAR(SparseUpdate):
    """Prioritized checkpoints: writes the values that moved farthest since they were last written.

    Save `1 / fraction` times as often as you would save everything, for the same bytes. After a partial failure restore
    only what was lost: `CheckpointManager.restore(only=...)`.

    Args:
        fraction: 1/8 is the authors' strong setting.
        order: "largest" distance first, or, to compare, "round robin" or at "random". Round robin begins with the first
            value after every keyframe, and writes each once in `1 / fraction` saves, rounded up.
        seed: of "random", from 0.
        optimizer: of `ResidualScheme`.

    Raises:
        PolicyError: an invalid argument.
    """

    id: ClassVar[str] = "scar"

    def __init__(
        self,
        *,
        fraction: float | str = 1 / 8,
        order: Order = "largest",
        seed: int = 0,
        optimizer: OptimizerMode = "exact",
    ) -> None:
        super().__init__(fraction=fraction, optimizer=optimizer)
        self._order: Order = validate.check_choice("order", order, get_args(Order))
        self._seed, self._round = check_seed(seed), 0

    @property
    def settings(self) -> dict[str, JSON]:
        seed: dict[str, JSON] = {"seed": self._seed} if self._order == "random" else {}
        return {"fraction": self._fraction, "order": self._order, **seed}

    def manifest_extra(self) -> dict[str, JSON]:
        """The number of saves since the last keyframe, as "turn"."""
        return {"turn": self._round}

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Continue from a checkpoint, so that "round robin" does not begin again."""
        turn = loss.get("turn") if isinstance(loss, dict) and loss.get("scheme") == self.id else None
        self._round = turn if type(turn) is int and 0 <= turn < 1 << 31 else 0

    def quantize_weights(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], state: FlatState, stats: GlobalStats
    ) -> dict[str, CodebookTensor]:
        quantized = super().quantize_weights(weights, differences, state, stats)
        is_delta = any(stats.global_tensors.collectives.all_gather(bool(quantized)))
        self._round = self._round + 1 if is_delta else 0
        return quantized

    def select_indices(self, distances: Tensor, count: int, counts: Sequence[int], stats: GlobalStats) -> Tensor:
        """Indices of this rank's values that are written; "round robin" and "random" number values by rank."""
        if self._order == "largest":
            return super().select_indices(distances, count, counts, stats)
        if self._order == "round robin":
            indices = (torch.arange(count) + self._round * count) % sum(counts)
        else:
            generator = torch.Generator().manual_seed(self._seed << 31 | self._round)
            indices = torch.randperm(sum(counts), generator=generator)[:count]
        rank = stats.global_tensors.collectives.rank
        indices -= sum(counts[:rank])
        return indices[(indices >= 0) & (indices < counts[rank])].to(distances.device)


class TOPN(SparseUpdate):
    """Writes the values with the largest differences to the parent checkpoint, exactly.

    Args:
        fraction: N, as a share of all values.
        optimizer: as of `ResidualScheme`.

    Raises:
        PolicyError: an invalid argument.
    """

    id: ClassVar[str] = "topn"

    def __init__(self, *, fraction: float | str = 0.01, optimizer: OptimizerMode = "exact") -> None:
        super().__init__(fraction=fraction, optimizer=optimizer)

    @property
    def settings(self) -> dict[str, JSON]:
        return {"fraction": self._fraction}


def _sparse_codes(x: Tensor, stale: Tensor) -> CodebookTensor:
    """Codes of one weight: 0 is the exact value, 1 no difference to the parent."""
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    zero = torch.zeros(1, dtype=torch.float32, device=x.device)
    return CodebookTensor(stale, zero, x[stale == 0].to(dtype), first_code=1, residual=True)
