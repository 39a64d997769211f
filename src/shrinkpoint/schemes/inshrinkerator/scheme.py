"""The scheme."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.code_streams import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize import kmeans
from shrinkpoint.quantize.layer_types import EMBEDDING
from shrinkpoint.quantize.sketch import LogHistogram
from shrinkpoint.schemes import optimizer_state
from shrinkpoint.schemes.base import check_recorder
from shrinkpoint.schemes.evaluate import Evaluate, ModelEvaluator, TrialEvaluator, strip_wrapper_prefix
from shrinkpoint.schemes.global_stats import GlobalStats
from shrinkpoint.schemes.inshrinkerator.partition import PrunePartition
from shrinkpoint.schemes.inshrinkerator.scores import MAGNITUDE, SENSITIVITY, SKETCH_ALPHA, ScoredWeight, score_weights
from shrinkpoint.schemes.inshrinkerator.size_model import SizeModel
from shrinkpoint.schemes.search.candidates import CandidateSet, PreviousCodes
from shrinkpoint.schemes.search.diagonal import diagonal
from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.scheme import Fallback, SearchScheme
from shrinkpoint.schemes.search.space import METRIC, Axis, Point, Space
from shrinkpoint.schemes.search.trials import SearchResult, Trials
from shrinkpoint.schemes.search.uniform_candidates import UNIFORM_SPACE, UniformCandidates
from shrinkpoint.schemes.shardedtarget import ShardTarget

SPACE = Space(
    (
        Axis("bins", (4, 6, 8, 12, 16, 32)),
        Axis("embedding_bins", (16, 32)),
        Axis("prune", (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)),
        Axis("protect", (0.0005, 0.005, 0.01)),
    ),
    (MAGNITUDE, SENSITIVITY),
)
"""The paper's table of the search space."""


class GradientSource(Protocol):
    """What gradients come from: `train.GradientRecorder`, or anything like it."""

    @property
    def mean(self) -> Mapping[str, Tensor]:
        """Averages by name of a parameter in the model."""
        ...


class Inshrinkerator(SearchScheme):
    """Adaptive quantization under a quality threshold (arXiv 2306.11800).

    The values of every weight are pruned, protected in bfloat16, or quantized to centers found by weighted k-means on a
    sketch; codes are coded against those of the checkpoint before; and the setting of all that is searched for, so that
    `evaluate` becomes worse by no more than `threshold`. Where no setting holds, the uniform grids of `QD` are tried.
    docs/schemes.md says what is quantized and what is decided.

    Args:
        gradients: a recorder, without which values are ranked by size alone.
        paper: as it is printed: the recorder's average, shares up to the quantile and not below it, fresh centers at
            every checkpoint, a start drawn by distance, the diagonal search, and cyclic deltas rearranged by the
            previous code, run-length and Huffman coded. What it leaves is in docs/schemes.md.
        space: another search space; its axes must have the names of `SPACE`.
        sigma: weight of density against magnitude in the clustering.
        dither: after a restore, round at thresholds of chance instead of to the nearest, so that what little training
            has done since then is not rounded away (docs/schemes.md); never where `paper` is.
        threshold, evaluate, higher_is_better, config, optimizer, fallback, coarser, group, progress, seed: of
            `SearchScheme`.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "inshrinkerator"

    def __init__(
        self,
        *,
        threshold: float | str = 0.05,
        evaluate: Evaluate | None = None,
        higher_is_better: bool = False,
        config: Mapping[str, Any] | None = None,
        optimizer: optimizer_state.Mode = "exact",
        fallback: Fallback = "lossless",
        coarser: bool = False,
        group: Any = None,
        progress: bool | Progress = False,
        seed: int = 0,
        gradients: GradientSource | None = None,
        paper: bool = False,
        space: Space = SPACE,
        sigma: float = kmeans.SIGMA,
        dither: bool = True,
    ) -> None:
        expected, do = "a Space", "leave it out for the paper's"
        self.space = validate.check_instance("space", space, Space, expected=expected, do=do)
        super().__init__(
            threshold=threshold,
            evaluate=evaluate,
            higher_is_better=higher_is_better,
            config=config,
            optimizer=optimizer,
            fallback=fallback,
            coarser=coarser,
            group=group,
            progress=progress,
            seed=seed,
        )
        self.coders: Sequence[str] = ("rearranged",) if validate.check_bool("paper", paper) else CODERS
        self._recorder: GradientSource | None = check_recorder("gradients", gradients, "mean")
        if paper:
            getattr(gradients, "use_printed_average", lambda: None)()
        self._paper, self._sigma = paper, validate.check_float("sigma", sigma, exclusive=False)
        self._dither = validate.check_bool("dither", dither) and not paper

    @property
    def arguments(self) -> dict[str, object]:
        """See `SpecMixin`."""
        return {
            **super().arguments,
            "gradients": self._recorder,
            "paper": self._paper,
            "space": self.space,
            "sigma": self._sigma,
            "dither": self._dither or self._paper,
        }

    def variants(self, evaluator: TrialEvaluator, pool: GlobalStats | None = None) -> tuple[str, ...]:
        """Sensitivity is a metric only where there are gradients."""
        gradients = self._gradients(evaluator)
        if pool is not None:
            gradients = {title: torch.empty(0) for title in pool.global_tensors.union(gradients)}
        known = SENSITIVITY if gradients else MAGNITUDE
        return tuple(one for one in self.space.variants if one in (MAGNITUDE, known)) or self.space.variants

    def candidates(
        self,
        weights: Mapping[str, Tensor],
        previous: PreviousCodes,
        evaluator: TrialEvaluator,
        pool: GlobalStats | None = None,
    ) -> InshrinkeratorCandidates:
        """All points for these weights; see `SearchScheme`."""
        kinds = evaluator.layer_types if pool is None else pool.layer_types(weights, evaluator.layer_types)
        prepared = score_weights(weights, kinds, self._gradients(evaluator))
        shapes = {name: x.shape for name, x in weights.items()}
        how = Clustering(self._sigma, self._seed, self._paper, previous.lossy_restores if self._dither else 0)
        if pool is None:
            return InshrinkeratorCandidates(self.space, prepared, shapes, previous, how)
        return ShardedInshrinkeratorCandidates(self.space, prepared, shapes, previous, how, pool)

    def alternative(
        self, weights: Mapping[str, Tensor], previous: PreviousCodes, pool: GlobalStats | None = None
    ) -> tuple[str, Space, CandidateSet] | None:
        """Uniform grids of up to 256 levels, where 32 centers are too few; not on paper."""
        return None if self._paper else ("qd", UNIFORM_SPACE, UniformCandidates(weights, previous, pool))

    def _full_search(
        self, sizes: Callable[[Point], float], trials: Trials, allowed: float, variants: Sequence[str], progress: Any
    ) -> SearchResult:
        if not self._paper:
            return super()._full_search(sizes, trials, allowed, variants, progress)
        return diagonal(self.space, sizes, trials, allowed, variants=variants, progress=progress)

    def _gradients(self, evaluator: TrialEvaluator) -> dict[str, Tensor]:
        """What was recorded, by the names of the state."""
        if self._recorder is not None and isinstance(evaluator, ShardTarget):
            return evaluator.recorded(self._recorder.mean)
        if self._recorder is None or not isinstance(evaluator, ModelEvaluator):
            return {}
        recorded = {strip_wrapper_prefix(name): mean for name, mean in self._recorder.mean.items()}
        return {evaluator.state_names[name]: mean for name, mean in recorded.items() if name in evaluator.state_names}


@dataclass(frozen=True)
class Clustering:
    """How centers are found and values assigned to them.

    Attributes:
        sigma, seed, paper: as of `Inshrinkerator`.
        noise_generation: of the noise by which values are rounded; 0: none, to the nearest. The same from one restore
            to the
            next, so that a value changes its code only where it moves; another one after, since what was rounded by it
            lies on levels now.
    """

    sigma: float
    seed: int
    paper: bool = False
    noise_generation: int = 0


class InshrinkeratorCandidates:
    """The points of the space for the weights of one state."""

    def __init__(
        self,
        space: Space,
        weights: dict[str, ScoredWeight],
        shapes: Mapping[str, torch.Size],
        previous: PreviousCodes,
        clustering: Clustering,
    ) -> None:
        self._space, self._weights, self._shapes, self._previous, self._clustering = (
            space,
            weights,
            shapes,
            previous,
            clustering,
        )
        self._partition = self._make_partition()
        self._embedding_mask = torch.tensor([one.layer_type == EMBEDDING for one in weights.values()], dtype=torch.bool)
        self._all_embedding_flags = [one.layer_type == EMBEDDING for one in self._partition.weights.values()]

    @cached_property
    def _size_model(self) -> SizeModel:
        earlier = PreviousCodes() if self._clustering.paper else self._previous
        return SizeModel(self._weights, self._partition, earlier, self._clustering.sigma, self._noise_by_name())

    def _make_partition(self) -> PrunePartition:
        return PrunePartition(self._weights, self._clustering.paper)

    def size(self, point: Point) -> float:
        """Predicted bytes; infinite for a point that only says again what another one says."""
        at = self._space.settings(point)
        if not self._clustering.paper and self._is_redundant(point):
            return math.inf
        plain, embedded = (
            self._size_model.predict(int(at[bins]), str(at[METRIC]), float(at["prune"]), float(at["protect"]))
            for bins in ("bins", "embedding_bins")
        )
        return float(torch.where(self._embedding_mask, embedded, plain).sum())

    def _is_redundant(self, point: Point) -> bool:
        """A knob for tensors that there are none of counts in one position alone."""
        idle = {"bins": all(self._all_embedding_flags), "embedding_bins": not any(self._all_embedding_flags)}
        axes = zip(self._space.axes, point.index, strict=True)
        return any(idle.get(axis.name, False) and i < len(axis.values) - 1 for axis, i in axes)

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        """Symbols of every weight, by name."""
        at = self._space.settings(point)
        return {name: self._quantize_weight(name, weight, at) for name, weight in self._weights.items()}

    def _quantize_weight(
        self, name: str, weight: ScoredWeight, settings: Mapping[str, float | int | str]
    ) -> CodebookTensor:
        bins = int(settings["embedding_bins" if weight.layer_type == EMBEDDING else "bins"])
        prune, protect = float(settings["prune"]), float(settings["protect"])
        pruned, protected = self._partition.masks(weight, str(settings[METRIC]), prune, protect)
        values, counts = self._sketch(
            name, LogHistogram.from_bucket_ids(weight.bucket_ids, SKETCH_ALPHA, ~(pruned | protected))
        ).buckets()
        how, seed = self._clustering, self._seed(name)
        start = None if how.paper else self._previous.centers.get(name)
        centers = kmeans.kmeans_codebook(
            values,
            counts,
            bins,
            sigma=how.sigma,
            seed=seed,
            init=start if start is not None and start.numel() == bins else None,
            squared=not how.paper,
        )
        shape = self._shapes[name]
        return kmeans.quantize_to_codebook(
            weight.values.reshape(shape),
            centers,
            pruned=pruned.reshape(shape),
            protected=protected.reshape(shape),
            noise=self._noise(name, weight).reshape(shape) if how.noise_generation else None,
            zero=self._has_pruned(name),
        )

    def _sketch(self, name: str, sketch: LogHistogram) -> LogHistogram:
        """Of the values that get centers."""
        return sketch

    def _has_pruned(self, name: str) -> bool | None:
        """Whether anything of a weight is pruned; None: its masks tell."""
        return None

    def _noise_by_name(self) -> dict[str, Tensor]:
        return (
            {name: self._noise(name, one) for name, one in self._weights.items()}
            if self._clustering.noise_generation
            else {}
        )

    def _noise(self, name: str, weight: ScoredWeight) -> Tensor:
        return _noise(weight.values, self._seed(name) + self._clustering.noise_generation)

    def _seed(self, name: str) -> int:
        return self._clustering.seed ^ zlib.crc32(name.encode())


class ShardedInshrinkeratorCandidates(InshrinkeratorCandidates):
    """The same for boxes of weights of several ranks: thresholds and centers are those of the whole weights."""

    def __init__(
        self,
        space: Space,
        weights: dict[str, ScoredWeight],
        shapes: Mapping[str, torch.Size],
        previous: PreviousCodes,
        clustering: Clustering,
        pool: GlobalStats,
    ) -> None:
        self._pool = pool
        self._sketches: dict[str, LogHistogram] = {}
        self._pruned_names: set[str] = set()
        self._global_weights = self._merge_weights(weights)
        mine = {
            name: self._with_global_scores(one, self._global_weights[pool.global_name(name)].scores)
            for name, one in weights.items()
        }
        super().__init__(space, mine, shapes, previous, clustering)

    def _with_global_scores(self, weight: ScoredWeight, scores: dict[str, LogHistogram]) -> ScoredWeight:
        sensitivity = weight.sensitivity if SENSITIVITY in scores else None
        return replace(weight, scores=scores, sensitivity=sensitivity)

    def _merge_weights(self, weights: Mapping[str, ScoredWeight]) -> dict[str, ScoredWeight]:
        """What is known of whole weights, by title: their kinds and scores, without values."""
        pool, scores = self._pool, dict[str, dict[str, LogHistogram]]()
        for metric in (MAGNITUDE, SENSITIVITY):
            known = pool.tensors_where_all({name: metric in one.scores for name, one in weights.items()})
            found = pool.merge_sketches(
                {name: one.scores[metric] for name, one in weights.items() if pool.global_name(name) in known},
                SKETCH_ALPHA,
            )
            for title, sketch in found.items():
                scores.setdefault(title, {})[metric] = sketch
        nothing = torch.empty(0)
        return {
            title: ScoredWeight(nothing, pool.all_layer_types[title], nothing, scores[title])
            for title in pool.global_names
        }

    def _make_partition(self) -> PrunePartition:
        return PrunePartition(self._global_weights, self._clustering.paper)

    def size(self, point: Point) -> float:
        """Of the boxes of this rank; 0 where it has none."""
        if not self._weights:
            return math.inf if not self._clustering.paper and self._is_redundant(point) else 0.0
        return super().size(point)

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        """As `Candidates`; a collective."""
        at, parts, zeros = self._space.settings(point), dict[str, LogHistogram](), list[str]()
        for name, weight in self._weights.items():
            metric, prune, protect = str(at[METRIC]), float(at["prune"]), float(at["protect"])
            pruned, protected = self._partition.masks(weight, metric, prune, protect)
            parts[name] = LogHistogram.from_bucket_ids(weight.bucket_ids, SKETCH_ALPHA, ~(pruned | protected))
            zeros += [name] * bool(pruned.any())
        self._sketches, self._pruned_names = (
            self._pool.merge_sketches(parts, SKETCH_ALPHA),
            self._pool.global_tensors.union(zeros),
        )
        return super().quantize(point)

    def _sketch(self, name: str, sketch: LogHistogram) -> LogHistogram:
        return self._sketches[self._pool.global_name(name)]

    def _has_pruned(self, name: str) -> bool | None:
        return self._pool.global_name(name) in self._pruned_names

    def _seed(self, name: str) -> int:
        return super()._seed(self._pool.global_name(name))

    def _noise(self, name: str, weight: ScoredWeight) -> Tensor:
        return _noise(weight.values, self._pool.local_seed(name, self._seed(name) + self._clustering.noise_generation))


def _noise(like: Tensor, seed: int) -> Tensor:
    """The same for the same seed, so that a trial is what is saved, and every replica tries the same."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device)
