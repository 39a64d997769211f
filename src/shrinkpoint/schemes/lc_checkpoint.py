"""LC-Checkpoint (arXiv 2009.13003): differences by exponent and sign, the largest few of which are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.codec import CODERS, Symbols
from shrinkpoint.codec.quantize.exponents import Representative, exponents, promote
from shrinkpoint.record import JSON
from shrinkpoint.schemes import moments
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.tracked import Tracked
from shrinkpoint.state import FlatState

Scope = Literal["tensor", "model"]


class LCCheckpoint(Tracked):
    """Exponent-based quantization and priority promotion of what has moved; nothing is searched or measured.

    Args:
        bits: x: the `2^x - 1` buckets of one sign and exponent with the largest exponents are kept, 1 to 8.
        scope: over which the largest are chosen: each "tensor" by itself, or the whole "model", as in the paper, where
            layers whose weights move less than others are never written (docs/schemes.md).
        representative: what a bucket's values become, its "mean" or, as in the paper, its "middle".
        paper: scope "model", representative "middle", Huffman codes; each can still be said otherwise.
        optimizer: of `Tracked`.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "lc-checkpoint"

    def __init__(
        self, *, bits: int = 3, scope: Scope | None = None, representative: Representative | None = None,
        paper: bool = False, optimizer: moments.Mode = "exact",
    ) -> None:  # fmt: skip
        super().__init__(optimizer=optimizer)
        usual: tuple[Scope, Representative] = ("model", "middle") if paper else ("tensor", "mean")
        self._bits, self._paper = arguments.whole("bits", bits, most=8), arguments.flag("paper", paper)
        self._scope: Scope = arguments.choice("scope", usual[0] if scope is None else scope, get_args(Scope))
        self._representative: Representative = arguments.choice(
            "representative", usual[1] if representative is None else representative, get_args(Representative)
        )
        self._said = scope, representative
        self.coders: Sequence[str] = ("huffman",) if paper else CODERS

    @property
    def arguments(self) -> dict[str, object]:
        """See `Spelled`; what was left to `paper` is left to it again."""
        scope, representative = self._said
        return {**super().arguments, "scope": scope, "representative": representative}

    @property
    def settings(self) -> dict[str, JSON]:
        return {
            "bits": self._bits, "scope": self._scope, "representative": self._representative, "paper": self._paper,
        }  # fmt: skip

    def symbols(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], flat: FlatState,
        pool: Pooled | None = None,
    ) -> dict[str, Symbols]:  # fmt: skip
        """See `Tracked`."""
        together = self._scope == "model"
        if pool is not None:
            buckets = pool.buckets(differences, together=together)
            return {
                name: promote(x, buckets[pool.title(name)], self._bits, self._representative)
                for name, x in differences.items()
            }
        found = exponents([*differences.values()], self._bits, together=together, representative=self._representative)
        return dict(zip(differences, found, strict=True))
