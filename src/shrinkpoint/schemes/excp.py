"""ExCP (arXiv 2406.11257): residual, joint pruning of weights and moments, k-means; the whole Adam state."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.codec import CODERS, Symbols
from shrinkpoint.codec.quantize import assign, cluster
from shrinkpoint.codec.symbols import MOST_CODES, SPECIALS
from shrinkpoint.record import JSON
from shrinkpoint.schemes.picks import SMALLEST, largest
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.spelling import seeded
from shrinkpoint.schemes.tracked import Tracked
from shrinkpoint.state import FlatState
from shrinkpoint.statistics import LogHistogram

Rule = Literal["paper", "released"]
CAP = 2.5
"""Most that the released code multiplies the median with."""


class ExCP(Tracked):
    """Residuals and both of Adam's moments on 2^n - 1 centers and zero, pruned by what the moments say.

    A residual is kept where it is larger than a threshold that falls with the second moment; moments are kept where the
    first one is large and the residual is kept. Moments are not deltas: they are written anew with every checkpoint.

    Where something is missing: a weight without Adam's moments, or with some that are not finite, loses nothing to
    pruning; moments that are not finite stay exact. Where a weight is exact (a keyframe; it has not moved), nothing of
    it is pruned, and its moments are kept wherever the first one is large.

    Args:
        alpha: of the residuals' threshold, `alpha / sqrt(v) * median|residual|`.
        beta: of the moments' threshold, `beta * mean|m|`.
        bits: n; 2 to 8. With 8 there are 254 centers, not 255.
        rule: with a threshold for each value, as the "paper" has it, or one for each tensor from the mean of v and
            capped at 2.5 medians, as the "released" code has it.
        paper: codes packed and then LZMA, as released, in place of the context coder.
        paper_fp16: centers are rounded to float16, as released: small second moments become zero (docs/schemes.md).
        seed: of the random starts, from 0.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "excp"

    def __init__(
        self, *, alpha: float = 5e-5, beta: float = 2.0, bits: int = 4, rule: Rule = "paper", paper: bool = False,
        paper_fp16: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._alpha = arguments.number("alpha", alpha, above=False)
        self._beta = arguments.number("beta", beta, above=False)
        self._bits = arguments.whole("bits", bits, least=2, most=8, do="take 4, as the paper does")
        self._rule: Rule = arguments.choice("rule", rule, get_args(Rule))
        self._paper, self._half = arguments.flag("paper", paper), arguments.flag("paper_fp16", paper_fp16)
        self._seed = seeded(seed)
        self.coders: Sequence[str] = ("lzma",) if paper else CODERS

    @property
    def arguments(self) -> dict[str, object]:
        """See `Spelled`."""
        return dict(self.settings)

    @property
    def settings(self) -> dict[str, JSON]:
        return {
            "alpha": self._alpha, "beta": self._beta, "bits": self._bits, "rule": self._rule, "paper": self._paper,
            "paper_fp16": self._half, "seed": self._seed,
        }  # fmt: skip

    def symbols(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], flat: FlatState,
        pool: Pooled | None = None,
    ) -> dict[str, Symbols]:  # fmt: skip
        """See `Tracked`."""
        if pool is not None:
            return Boxes(self, flat, pool).residuals(differences)
        out = {}
        for name, residual in differences.items():
            keep = residual != 0
            known = Moments.of(name, flat)
            if known is not None:
                v = known.v.to(residual.device)
                keep &= residual.abs() > self.threshold(residual.abs().median(), v, v.mean())
            out[name] = self.clustered(residual, keep, self._centers(name, residual, keep), residual=True)
        return out

    def further(
        self, flat: FlatState, symbols: Mapping[str, Symbols], pool: Pooled | None = None
    ) -> dict[str, Symbols]:
        """Both moments of every weight that has them, where they are large enough for codes."""
        if pool is not None:
            return Boxes(self, flat, pool).moments(symbols)
        out: dict[str, Symbols] = {}
        for name in flat.optim:
            known = Moments.of(name, flat)
            if known is None or not known.fit:
                continue
            keep, under = self.kept(known.m, known.m.abs().mean(), symbols.get(name)), name if name in symbols else ""
            for title, x, other in ((known.first, known.m, under), (known.second, known.v, known.first)):
                out[title] = self.clustered(x, keep, self._centers(title, x, keep), under=other)
        return out

    def threshold(self, median: Tensor, v: Tensor, mean: Tensor) -> Tensor:
        """Of residuals, of the one shape or the other; zeros of `v` raise it beyond all, unless `alpha` is zero.

        Args:
            median: of the magnitudes of all residuals.
            v: second moments.
            mean: of all second moments.
        """
        if self._alpha == 0:
            return torch.zeros_like(median)
        factor = self._alpha / (mean if self._rule == "released" else v).sqrt()
        return median * (factor.clamp(max=CAP) if self._rule == "released" else factor)

    def kept(self, m: Tensor, mean: Tensor, residual: Symbols | None) -> Tensor:
        """Which moments are; bool.

        Args:
            mean: of the magnitudes of all first moments.
            residual: of the weight; None: it is exact.
        """
        keep = m.abs() > self._beta * mean
        return keep if residual is None else keep & (residual.codes.to(keep.device) != 0)

    def sketch(self, x: Tensor, keep: Tensor) -> LogHistogram:
        """Of what is kept; zero has a code already."""
        return LogHistogram.of(x, mask=keep & (x != 0))

    def centers(self, name: str, sketch: LogHistogram) -> Tensor:
        """Of a whole tensor of this name."""
        bins = min(2**self._bits - 1, MOST_CODES - SPECIALS)
        return cluster(*sketch.buckets(), bins, sigma=1.0, seed=self._seed ^ zlib.crc32(name.encode()))

    def _centers(self, name: str, x: Tensor, keep: Tensor) -> Tensor:
        return self.centers(name, self.sketch(x, keep))

    def clustered(
        self, x: Tensor, keep: Tensor, centers: Tensor, *, residual: bool = False, under: str = ""
    ) -> Symbols:
        """Symbols of a tensor, or of a box of it; zero where it is not kept."""
        keep = keep & (x != 0)
        codes = assign(x, centers, SPECIALS).masked_fill_(~keep, 0)
        if self._half:
            most = torch.finfo(torch.float16).max
            centers = centers.clamp(-most, most).half().float()
        nothing = torch.empty(0, dtype=torch.bfloat16, device=x.device)
        return Symbols(codes, centers.to(x.device), nothing, SPECIALS, residual, under)


@dataclass(frozen=True)
class Moments:
    """Adam's moments of one weight: finite, of its shape.

    Attributes:
        first, second: their names.
        m, v: their values, float32.
        dense: they have two axes, and dtypes that codes stand for.
    """

    first: str
    second: str
    m: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    dense: bool

    @property
    def fit(self) -> bool:
        """Whether they are large enough for codes."""
        return self.fits(self.m.numel())

    def fits(self, numel: int) -> bool:
        """The same, of whole tensors of so many values."""
        return self.dense and numel >= SMALLEST

    @classmethod
    def of(cls, name: str, flat: FlatState) -> Moments | None:
        facts = flat.optim.get(name)
        if facts is None or facts.moment1 not in flat.tensors or facts.moment2 not in flat.tensors:
            return None
        found = [flat.tensors[one] for one in (facts.moment1, facts.moment2)]
        if any(one.shape != flat.tensors[name].shape or not math.isfinite(largest(one)) for one in found):
            return None
        m, v = (one.to(torch.float32) for one in found)
        return cls(facts.moment1, facts.moment2, m, v, all(map(_fits, found)))


class Boxes:
    """The same for boxes of tensors of several ranks: thresholds and centers are those of whole tensors."""

    def __init__(self, scheme: ExCP, flat: FlatState, pool: Pooled) -> None:
        self._scheme, self._pool = scheme, pool
        found = {name: Moments.of(name, flat) for name in flat.optim}
        shaped = pool.all({name: one is not None for name, one in found.items()})
        self._found = {name: one for name, one in found.items() if one is not None and pool.title(name) in shaped}

    def residuals(self, differences: Mapping[str, Tensor]) -> dict[str, Symbols]:
        """See `ExCP.symbols`."""
        pool, scheme = self._pool, self._scheme
        medians = pool.ranked(differences)
        means = pool.means({name: one.v for name, one in self._found.items() if name in differences})
        keeps = {}
        for name, residual in differences.items():
            keep, title = residual != 0, pool.title(name)
            if name in self._found:
                v = self._found[name].v.to(residual.device)
                median, mean = (torch.tensor(one[title], device=v.device) for one in (medians, means))
                keep &= residual.abs() > scheme.threshold(median, v, mean)
            keeps[name] = keep
        centers = self._centers(differences, keeps)
        return {
            name: scheme.clustered(x, keeps[name], centers[pool.title(name)], residual=True)
            for name, x in differences.items()
        }

    def moments(self, symbols: Mapping[str, Symbols]) -> dict[str, Symbols]:
        """See `ExCP.further`."""
        pool, scheme = self._pool, self._scheme
        fit = pool.all({name: one.fits(pool.numel(name)) for name, one in self._found.items()})
        known = {name: one for name, one in self._found.items() if pool.title(name) in fit}
        means = pool.means({name: one.m.abs() for name, one in known.items()})
        parts, keeps, under = dict[str, Tensor](), dict[str, Tensor](), dict[str, str]()
        for name, one in known.items():
            mean = torch.tensor(means[pool.title(name)], dtype=torch.float32, device=one.m.device)
            keep = scheme.kept(one.m, mean, symbols.get(name))
            for first, x, other in (
                (one.first, one.m, name if name in symbols else ""),
                (one.second, one.v, one.first),
            ):
                parts[first], keeps[first], under[first] = x, keep, other
        centers = self._centers(parts, keeps)
        return {
            name: scheme.clustered(x, keeps[name], centers[pool.title(name)], under=under[name])
            for name, x in parts.items()
        }

    def _centers(self, parts: Mapping[str, Tensor], keeps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sketches = self._pool.sketches({name: self._scheme.sketch(x, keeps[name]) for name, x in parts.items()})
        ours = {self._pool.title(name) for name in parts}
        return {title: self._scheme.centers(title, one) for title, one in sketches.items() if title in ours}


def _fits(x: Tensor) -> bool:
    return x.dim() >= 2 and x.dtype in (torch.float32, torch.bfloat16)
