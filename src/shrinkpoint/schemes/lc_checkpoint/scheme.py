"""LC-Checkpoint (arXiv 2009.13003): differences in buckets by sign and exponent, of which the largest are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.code_streams import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.exponent_buckets import Representative, promote
from shrinkpoint.schemes import optimizer_modes
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
        optimizer: optimizer_modes.Mode = "exact",
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
        return {
            "bits": self._bits,
            "scope": self._scope,
            "representative": self._representative,
            "paper": self._paper,
        }

    def quantize_weights(
        self,
        weights: Mapping[str, Tensor],
        differences: Mapping[str, Tensor],
        state: FlatState,
        stats: GlobalStats,
    ) -> dict[str, CodebookTensor]:
        buckets = stats.exponent_buckets(differences, shared=self._scope == "model")
        return {
            name: promote(difference, buckets[stats.global_name(name)], self._bits, self._representative)
            for name, difference in differences.items()
        }
