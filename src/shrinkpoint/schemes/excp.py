"""ExCP (arXiv 2406.11257): residual, joint pruning of weights and moments, k-means; the whole Adam state."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint.codec import CODERS, Symbols
from shrinkpoint.codec.quantize import assign, cluster
from shrinkpoint.codec.symbols import MOST_CODES, SPECIALS
from shrinkpoint.errors import PolicyError
from shrinkpoint.record import JSON
from shrinkpoint.schemes.picks import SMALLEST, largest
from shrinkpoint.schemes.tracked import Tracked, whole
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
        self._alpha, self._beta, self._bits, self._rule = _number("alpha", alpha), _number("beta", beta), bits, rule
        self._paper, self._half, self._seed = paper, paper_fp16, whole("seed", seed)
        self.coders: Sequence[str] = ("lzma",) if paper else CODERS
        if type(bits) is not int or not 2 <= bits <= 8:
            raise PolicyError("bits", found=repr(bits), expected="2 to 8", do="take 4, as the paper does")
        if rule not in get_args(Rule):
            raise PolicyError("rule", found=repr(rule), expected="'paper' or 'released'", do="choose one of them")

    @property
    def settings(self) -> dict[str, JSON]:
        return {
            "alpha": self._alpha, "beta": self._beta, "bits": self._bits, "rule": self._rule, "paper": self._paper,
            "paper_fp16": self._half, "seed": self._seed,
        }  # fmt: skip

    def symbols(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], flat: FlatState
    ) -> dict[str, Symbols]:
        """See `Tracked`."""
        out = {}
        for name, residual in differences.items():
            keep = residual != 0
            known = _Moments.of(name, flat)
            if known is not None:
                keep &= residual.abs() > self._threshold(residual, known.v.to(residual.device))
            out[name] = self._clustered(name, residual, keep, residual=True)
        return out

    def further(self, flat: FlatState, symbols: Mapping[str, Symbols]) -> dict[str, Symbols]:
        """Both moments of every weight that has them, where they are large enough for codes."""
        out: dict[str, Symbols] = {}
        for name in flat.optim:
            known = _Moments.of(name, flat)
            if known is None or not known.fit:
                continue
            keep = known.m.abs() > self._beta * known.m.abs().mean()
            held = symbols.get(name)
            if held is not None:
                keep &= held.codes.to(keep.device) != 0
            out[known.first] = self._clustered(known.first, known.m, keep, under="" if held is None else name)
            out[known.second] = self._clustered(known.second, known.v, keep, under=known.first)
        return out

    def _threshold(self, residual: Tensor, v: Tensor) -> Tensor:
        """Of the one shape or the other; zeros of `v` raise it beyond all residuals, unless `alpha` is zero."""
        median = residual.abs().median()
        if self._alpha == 0:
            return torch.zeros_like(median)
        factor = self._alpha / (v.mean() if self._rule == "released" else v).sqrt()
        return median * (factor.clamp(max=CAP) if self._rule == "released" else factor)

    def _clustered(self, name: str, x: Tensor, keep: Tensor, *, residual: bool = False, under: str = "") -> Symbols:
        keep = keep & (x != 0)  # zero has a code already
        bins = min(2**self._bits - 1, MOST_CODES - SPECIALS)
        values, counts = LogHistogram.of(x, mask=keep).buckets()
        centers = cluster(values, counts, bins, sigma=1.0, seed=self._seed ^ zlib.crc32(name.encode()))
        codes = assign(x, centers, SPECIALS).masked_fill_(~keep, 0)
        if self._half:
            most = torch.finfo(torch.float16).max
            centers = centers.clamp(-most, most).half().float()
        nothing = torch.empty(0, dtype=torch.bfloat16, device=x.device)
        return Symbols(codes, centers.to(x.device), nothing, SPECIALS, residual, under)


@dataclass(frozen=True)
class _Moments:
    """Adam's moments of one weight: finite, of its shape.

    Attributes:
        first, second: their names.
        m, v: their values, float32.
        fit: they are of a size and of dtypes that codes stand for.
    """

    first: str
    second: str
    m: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    fit: bool

    @classmethod
    def of(cls, name: str, flat: FlatState) -> _Moments | None:
        facts = flat.optim.get(name)
        if facts is None or facts.moment1 not in flat.tensors or facts.moment2 not in flat.tensors:
            return None
        found = [flat.tensors[one] for one in (facts.moment1, facts.moment2)]
        if any(one.shape != flat.tensors[name].shape or not math.isfinite(largest(one)) for one in found):
            return None
        m, v = (one.to(torch.float32) for one in found)
        return cls(facts.moment1, facts.moment2, m, v, all(map(_fits, found)))


def _fits(x: Tensor) -> bool:
    return x.dim() >= 2 and x.numel() >= SMALLEST and x.dtype in (torch.float32, torch.bfloat16)


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise PolicyError(name, found=repr(value), expected="a number from 0", do="take the default")
    return float(value)
