"""QD+, a baseline of arXiv 2306.11800: uniform quantization with bits chosen by entropy, and Huffman-coded deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from shrinkpoint.schemes.evaluate import TrialEvaluator
from shrinkpoint.schemes.search import candidates
from shrinkpoint.schemes.search.candidates import PreviousCodes
from shrinkpoint.schemes.search.scheme import SearchScheme
from shrinkpoint.schemes.search.uniform_candidates import UNIFORM_SPACE, UniformCandidates
from shrinkpoint.sharding.global_stats import GlobalStats


class QD(SearchScheme):
    """QD+: QD-Compressor (ICCD 2021) with searched settings, and bins that may change between checkpoints.

    Args:
        The same as of `SearchScheme`.
    """

    id: ClassVar[str] = "qd"
    coders = ("huffman",)
    space = UNIFORM_SPACE

    def candidates(
        self,
        weights: Mapping[str, Tensor],
        previous: PreviousCodes,
        evaluator: TrialEvaluator,
        stats: GlobalStats,
    ) -> candidates.CandidateSet:
        return UniformCandidates(weights, previous, stats)
