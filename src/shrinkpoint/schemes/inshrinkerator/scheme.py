"""The scheme "inshrinkerator": adaptive quantization under a quality threshold."""

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
from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize import codebook
from shrinkpoint.quantize.layer_types import EMBEDDING
from shrinkpoint.quantize.statistics import LogHistogram
from shrinkpoint.schemes.base import check_recorder
from shrinkpoint.schemes.evaluate import Evaluate, TrialEvaluator
from shrinkpoint.schemes.inshrinkerator.partition import (
    MAGNITUDE,
    SENSITIVITY,
    SKETCH_ALPHA,
    PrunePartition,
    ScoredWeight,
    score_weights,
)
from shrinkpoint.schemes.inshrinkerator.size_model import SizeModel
from shrinkpoint.schemes.plan import OptimizerMode
from shrinkpoint.schemes.search.candidates import UNIFORM_SPACE, CandidateSet, PreviousCodes, UniformCandidates
from shrinkpoint.schemes.search.scheme import Fallback, SearchScheme
from shrinkpoint.schemes.search.space import METRIC, Axis, Point, Space
from shrinkpoint.schemes.search.strategies import diagonal
from shrinkpoint.schemes.search.trials import Progress, SearchResult, Trials
from shrinkpoint.sharding.global_stats import GlobalStats

SPACE = Space(
    (
        Axis("bins", (4, 6, 8, 12, 16, 32)),
        Axis("embedding_bins", (16, 32)),
        Axis("prune", (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)),
        Axis("protect", (0.0005, 0.005, 0.01)),
    ),
    (MAGNITUDE, SENSITIVITY),
)
"""The search space of the paper."""


class GradientSource(Protocol):
    """A recorder of gradients, such as `train.GradientRecorder`."""

    @property
    def mean(self) -> Mapping[str, Tensor]:
        """Averages by name of a parameter in the model."""
        ...


class Inshrinkerator(SearchScheme):
    """Adaptive quantization under a quality threshold (arXiv 2306.11800).

    The values of every weight are pruned, protected in bfloat16, or quantized to centers found by weighted k-means on a
    sketch; codes are coded given those of the parent checkpoint; and the settings are searched, so that the result of
    `evaluate` becomes worse by no more than `threshold`. If no setting holds, the uniform grids of `QD` are tried.
    docs/schemes.md describes what is quantized and how.

    Args:
        gradients: a recorder, without which values are ranked by magnitude alone.
        paper: the algorithms as printed: the recorder's average, shares that include the quantile's bucket, new
            centers at every checkpoint, initial centers drawn by distance, the diagonal search, and cyclic deltas
            rearranged by the previous code, run-length and Huffman coded. docs/schemes.md has the differences.
        space: another search space; its axes must have the names of `SPACE`.
        sigma: weight of density against magnitude in the clustering.
        dither: after a restore, round by random thresholds instead of to the nearest, so that what little training
            has done since then is not rounded away (docs/schemes.md); never with `paper`.
        threshold, evaluate, higher_is_better, config, optimizer, fallback, coarser, group, progress, seed: as of
            `SearchScheme`.

    Raises:
        PolicyError: an invalid argument.
    """

    id: ClassVar[str] = "inshrinkerator"

    def __init__(
        self,
        *,
        threshold: float | str = 0.05,
        evaluate: Evaluate | None = None,
        higher_is_better: bool = False,
        config: Mapping[str, Any] | None = None,
        optimizer: OptimizerMode = "exact",
        fallback: Fallback = "lossless",
        coarser: bool = False,
        group: Any = None,
        progress: bool | Progress = False,
        seed: int = 0,
        gradients: GradientSource | None = None,
        paper: bool = False,
        space: Space = SPACE,
        sigma: float = codebook.SIGMA,
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
        return {
            **super().arguments,
            "gradients": self._recorder,
            "paper": self._paper,
            "space": self.space,
            "sigma": self._sigma,
            "dither": self._dither or self._paper,
        }

    def variants(self, evaluator: TrialEvaluator, stats: GlobalStats) -> tuple[str, ...]:
        """The metrics that can be tried now: sensitivity only if there are gradients."""
        has_gradients = bool(stats.global_tensors.union(self._gradients(evaluator)))
        usable = (MAGNITUDE, SENSITIVITY) if has_gradients else (MAGNITUDE,)
        return tuple(variant for variant in self.space.variants if variant in usable) or self.space.variants

    def candidates(
        self, weights: Mapping[str, Tensor], previous: PreviousCodes, evaluator: TrialEvaluator, stats: GlobalStats
    ) -> InshrinkeratorCandidates:
        global_types = stats.layer_types(weights, evaluator.layer_types)
        layer_types = {name: global_types[stats.global_name(name)] for name in weights}
        scored = score_weights(weights, layer_types, self._gradients(evaluator))
        shapes = {name: weight.shape for name, weight in weights.items()}
        noise_generation = previous.lossy_restores if self._dither else 0
        clustering = Clustering(self._sigma, self._seed, self._paper, noise_generation)
        return InshrinkeratorCandidates(self.space, scored, shapes, previous, clustering, stats, global_types)

    def alternative(
        self, weights: Mapping[str, Tensor], previous: PreviousCodes, stats: GlobalStats
    ) -> tuple[str, Space, CandidateSet] | None:
        """Uniform grids of up to 256 levels, for when 32 centers are too few; None with `paper`."""
        return None if self._paper else ("qd", UNIFORM_SPACE, UniformCandidates(weights, previous, stats))

    def _full_search(
        self,
        sizes: Callable[[Point], float],
        trials: Trials,
        max_degradation: float,
        variants: Sequence[str],
        progress: Progress | None,
    ) -> SearchResult:
        if not self._paper:
            return super()._full_search(sizes, trials, max_degradation, variants, progress)
        return diagonal(self.space, sizes, trials, max_degradation, variants=variants, progress=progress)

    def _gradients(self, evaluator: TrialEvaluator) -> dict[str, Tensor]:
        means = self.recordings() if evaluator.recordings is None else evaluator.recordings
        return {} if means is None else evaluator.recorder_values(means)

    def recordings(self) -> Mapping[str, Tensor] | None:
        return None if self._recorder is None else self._recorder.mean  # a copy, made by every access


@dataclass(frozen=True)
class Clustering:
    """Method by which centers are found and values assigned to them."""

    # `sigma`, `seed`, `paper`: as of `Inshrinkerator`.
    sigma: float
    seed: int
    paper: bool = False
    # Selects the noise by which values are rounded; 0: none, to the nearest. It is the same from one restore to the
    # next, so that a value changes its code only where it moves, and another one after a restore, because what was
    # rounded by it lies on levels then.
    noise_generation: int = 0


class InshrinkeratorCandidates:
    """The points of the space for the weights of one state; thresholds and centers are those of global weights.

    Args:
        space: the search space.
        weights: this rank's shards of the weights, with their scores.
        shapes: the shapes of `weights`.
        previous: codes of the previous checkpoint.
        clustering: how centers are found.
        stats: statistics of the weights of all ranks.
        global_layer_types: the types of the layers of all global weights, by global name.
    """

    def __init__(
        self,
        space: Space,
        weights: Mapping[str, ScoredWeight],
        shapes: Mapping[str, torch.Size],
        previous: PreviousCodes,
        clustering: Clustering,
        stats: GlobalStats,
        global_layer_types: Mapping[str, str],
    ) -> None:
        self._space, self._shapes, self._previous = space, shapes, previous
        self._clustering, self._stats = clustering, stats
        global_weights = _merge_weights(weights, stats, global_layer_types)
        self._weights: dict[str, ScoredWeight] = {}
        for name, weight in weights.items():
            # The scores of the global weight; without sensitivity if any shard has none.
            merged = global_weights[stats.global_name(name)].scores
            sensitivity = weight.sensitivity if SENSITIVITY in merged else None
            self._weights[name] = replace(weight, scores=merged, sensitivity=sensitivity)
        self._partition = PrunePartition(global_weights, clustering.paper)
        is_embedding = [weight.layer_type == EMBEDDING for weight in self._weights.values()]
        self._embedding_mask = torch.tensor(is_embedding, dtype=torch.bool)
        self._all_embedding_flags = [weight.layer_type == EMBEDDING for weight in global_weights.values()]

    @cached_property
    def _size_model(self) -> SizeModel:
        earlier = PreviousCodes() if self._clustering.paper else self._previous
        noise = {name: self._noise(name) for name in self._weights if self._clustering.noise_generation}
        return SizeModel(self._weights, self._partition, earlier, self._clustering.sigma, noise)

    def size(self, point: Point) -> float:
        """Predicted bytes of this rank's shards; infinite for a point that is the same as another one."""
        at = self._space.settings(point)
        if not self._clustering.paper and self._is_redundant(point):
            return math.inf
        if not self._weights:
            return 0.0
        plain, embedded = (
            self._size_model.predict(int(at[bins]), str(at[METRIC]), float(at["prune"]), float(at["protect"]))
            for bins in ("bins", "embedding_bins")
        )
        return float(torch.where(self._embedding_mask, embedded, plain).sum())

    def _is_redundant(self, point: Point) -> bool:
        """True if a setting of tensors that do not exist has any but its safest value."""
        idle = {"bins": all(self._all_embedding_flags), "embedding_bins": not any(self._all_embedding_flags)}
        axes = zip(self._space.axes, point.index, strict=True)
        return any(idle.get(axis.name, False) and i < len(axis.values) - 1 for axis, i in axes)

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        """Codes of every local weight, by name; a collective."""
        settings = self._space.settings(point)
        metric, prune, protect = str(settings[METRIC]), float(settings["prune"]), float(settings["protect"])
        masks = {name: self._partition.masks(weight, metric, prune, protect) for name, weight in self._weights.items()}
        sketches = self._stats.merge_sketches(
            {
                name: LogHistogram.from_bucket_ids(self._weights[name].bucket_ids, SKETCH_ALPHA, ~(pruned | protected))
                for name, (pruned, protected) in masks.items()
            },
            SKETCH_ALPHA,
        )
        with_pruned = self._stats.global_tensors.union(
            name for name, (pruned, _) in masks.items() if bool(pruned.any())
        )
        out = {}
        for name, weight in self._weights.items():
            global_name, shape = self._stats.global_name(name), self._shapes[name]
            pruned, protected = (mask.reshape(shape) for mask in masks.pop(name))
            bins = int(settings["embedding_bins" if weight.layer_type == EMBEDDING else "bins"])
            values, counts = sketches[global_name].buckets()
            clustering = self._clustering
            previous = None if clustering.paper else self._previous.centers.get(name)
            centers = codebook.kmeans_codebook(
                values,
                counts,
                bins,
                sigma=clustering.sigma,
                seed=self._seed(name),
                init=previous if previous is not None and previous.numel() == bins else None,
                squared=not clustering.paper,
            )
            out[name] = codebook.quantize_to_codebook(
                weight.values.reshape(shape),
                centers,
                pruned=pruned,
                protected=protected,
                noise=self._noise(name).reshape(shape) if self._clustering.noise_generation else None,
                zero=global_name in with_pruned,
            )
        return out

    def _noise(self, name: str) -> Tensor:
        """Uniform noise in [0, 1), 1-d, the same for the same seed, so that what is saved is what was tried."""
        values, seed = self._weights[name].values, self._seed(name) + self._clustering.noise_generation
        generator = torch.Generator(values.device).manual_seed(self._stats.local_seed(name, seed))
        return torch.rand(values.shape, generator=generator, dtype=torch.float32, device=values.device)

    def _seed(self, name: str) -> int:
        return self._clustering.seed ^ zlib.crc32(self._stats.global_name(name).encode())


def _merge_weights(
    weights: Mapping[str, ScoredWeight], stats: GlobalStats, global_layer_types: Mapping[str, str]
) -> dict[str, ScoredWeight]:
    """Layer types and scores of global weights, without values, by global name; a collective."""
    scores: dict[str, dict[str, LogHistogram]] = {}
    for metric in (MAGNITUDE, SENSITIVITY):
        has_scores = {name: metric in weight.scores for name, weight in weights.items()}
        complete = stats.global_tensors.tensors_where_all(has_scores)
        sketches = stats.merge_sketches(
            {name: weight.scores[metric] for name, weight in weights.items() if stats.global_name(name) in complete},
            SKETCH_ALPHA,
        )
        for global_name, sketch in sketches.items():
            scores.setdefault(global_name, {})[metric] = sketch
    nothing = torch.empty(0, dtype=torch.float32)
    return {name: ScoredWeight(nothing, global_layer_types[name], nothing, scores[name]) for name in stats.global_names}
