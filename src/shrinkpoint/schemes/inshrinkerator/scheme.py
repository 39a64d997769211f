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

from shrinkpoint import arguments
from shrinkpoint.codec import CODERS, Symbols
from shrinkpoint.codec.quantize import clusters
from shrinkpoint.schemes import candidate, moments, qd, search
from shrinkpoint.schemes.candidate import Earlier
from shrinkpoint.schemes.inshrinkerator.partition import Partition
from shrinkpoint.schemes.inshrinkerator.sizes import Sizes
from shrinkpoint.schemes.inshrinkerator.weights import ALPHA, MAGNITUDE, SENSITIVITY, Weight, weights_of
from shrinkpoint.schemes.layers import EMBEDDING
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.search import Axis, Outcome, Point, Space, Trials
from shrinkpoint.schemes.searched import Fallback, Searched
from shrinkpoint.schemes.shardedtarget import ShardTarget
from shrinkpoint.schemes.spelling import recorder
from shrinkpoint.schemes.target import Evaluate, ModelTarget, Target, unwrapped
from shrinkpoint.statistics import LogHistogram

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


class Recorder(Protocol):
    """What gradients come from: `train.Gradients`, or anything like it."""

    @property
    def mean(self) -> Mapping[str, Tensor]:
        """Averages by name of a parameter in the model."""
        ...


class Inshrinkerator(Searched):
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
            `Searched`.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str] = "inshrinkerator"

    def __init__(
        self, *, threshold: float | str = 0.05, evaluate: Evaluate | None = None, higher_is_better: bool = False,
        config: Mapping[str, Any] | None = None, optimizer: moments.Mode = "exact", fallback: Fallback = "lossless",
        coarser: bool = False, group: Any = None, progress: bool | search.Progress = False, seed: int = 0,
        gradients: Recorder | None = None, paper: bool = False, space: Space = SPACE, sigma: float = clusters.SIGMA,
        dither: bool = True,
    ) -> None:  # fmt: skip
        expected, do = "a search.Space", "leave it out for the paper's"
        self.space = arguments.kind("space", space, Space, expected=expected, do=do)
        super().__init__(
            threshold=threshold, evaluate=evaluate, higher_is_better=higher_is_better, config=config,
            optimizer=optimizer, fallback=fallback, coarser=coarser, group=group, progress=progress, seed=seed,
        )  # fmt: skip
        self.coders: Sequence[str] = ("rearranged",) if arguments.flag("paper", paper) else CODERS
        self._recorder: Recorder | None = recorder("gradients", gradients, "mean")
        if paper:
            getattr(gradients, "use_printed_average", lambda: None)()
        self._paper, self._sigma = paper, arguments.number("sigma", sigma, above=False)
        self._dither = arguments.flag("dither", dither) and not paper

    @property
    def arguments(self) -> dict[str, object]:
        """See `Spelled`."""
        return {
            **super().arguments, "gradients": self._recorder, "paper": self._paper, "space": self.space,
            "sigma": self._sigma, "dither": self._dither or self._paper,
        }  # fmt: skip

    def variants(self, target: Target, pool: Pooled | None = None) -> tuple[str, ...]:
        """Sensitivity is a metric only where there are gradients."""
        gradients = self._gradients(target)
        if pool is not None:
            gradients = {title: torch.empty(0) for title in pool.wholes.anywhere(gradients)}
        known = SENSITIVITY if gradients else MAGNITUDE
        return tuple(one for one in self.space.variants if one in (MAGNITUDE, known)) or self.space.variants

    def candidates(
        self, weights: Mapping[str, Tensor], earlier: Earlier, target: Target, pool: Pooled | None = None
    ) -> Candidates:
        """All points for these weights; see `Searched`."""
        kinds = target.kinds if pool is None else pool.kinds(weights, target.kinds)
        prepared = weights_of(weights, kinds, self._gradients(target))
        shapes = {name: x.shape for name, x in weights.items()}
        how = Clustering(self._sigma, self._seed, self._paper, earlier.generation if self._dither else 0)
        if pool is None:
            return Candidates(self.space, prepared, shapes, earlier, how)
        return Boxes(self.space, prepared, shapes, earlier, how, pool)

    def alternative(
        self, weights: Mapping[str, Tensor], earlier: Earlier, pool: Pooled | None = None
    ) -> tuple[str, Space, candidate.Candidates] | None:
        """Uniform grids of up to 256 levels, where 32 centers are too few; not on paper."""
        return None if self._paper else (qd.QD.id, qd.SPACE, qd.Uniform(weights, earlier, pool))

    def _whole(
        self, sizes: Callable[[Point], float], trials: Trials, allowed: float, variants: Sequence[str], progress: Any
    ) -> Outcome:
        if not self._paper:
            return super()._whole(sizes, trials, allowed, variants, progress)
        return search.diagonal(self.space, sizes, trials, allowed, variants=variants, progress=progress)

    def _gradients(self, target: Target) -> dict[str, Tensor]:
        """What was recorded, by the names of the state."""
        if self._recorder is not None and isinstance(target, ShardTarget):
            return target.recorded(self._recorder.mean)
        if self._recorder is None or not isinstance(target, ModelTarget):
            return {}
        recorded = {unwrapped(name): mean for name, mean in self._recorder.mean.items()}
        return {target.names[name]: mean for name, mean in recorded.items() if name in target.names}


@dataclass(frozen=True)
class Clustering:
    """How centers are found and values assigned to them.

    Attributes:
        sigma, seed, paper: as of `Inshrinkerator`.
        generation: of the noise by which values are rounded; 0: none, to the nearest. The same from one restore to the
            next, so that a value changes its code only where it moves; another one after, since what was rounded by it
            lies on levels now.
    """

    sigma: float
    seed: int
    paper: bool = False
    generation: int = 0


class Candidates:
    """The points of the space for the weights of one state."""

    def __init__(
        self, space: Space, weights: dict[str, Weight], shapes: Mapping[str, torch.Size], earlier: Earlier,
        how: Clustering,
    ) -> None:  # fmt: skip
        self._space, self._weights, self._shapes, self._earlier, self._how = space, weights, shapes, earlier, how
        self._partition = self._parted()
        self._embedding = torch.tensor([one.kind == EMBEDDING for one in weights.values()], dtype=torch.bool)
        self._embeddings = [one.kind == EMBEDDING for one in self._partition.weights.values()]

    @cached_property
    def _sizes(self) -> Sizes:
        earlier = Earlier() if self._how.paper else self._earlier
        return Sizes(self._weights, self._partition, earlier, self._how.sigma, self._noises())

    def _parted(self) -> Partition:
        return Partition(self._weights, self._how.paper)

    def size(self, point: Point) -> float:
        """Predicted bytes; infinite for a point that only says again what another one says."""
        at = self._space.settings(point)
        if not self._how.paper and self._is_double(point):
            return math.inf
        plain, embedded = (
            self._sizes.of(int(at[bins]), str(at[search.METRIC]), float(at["prune"]), float(at["protect"]))
            for bins in ("bins", "embedding_bins")
        )
        return float(torch.where(self._embedding, embedded, plain).sum())

    def _is_double(self, point: Point) -> bool:
        """A knob for tensors that there are none of counts in one position alone."""
        idle = {"bins": all(self._embeddings), "embedding_bins": not any(self._embeddings)}
        axes = zip(self._space.axes, point.index, strict=True)
        return any(idle.get(axis.name, False) and i < len(axis.values) - 1 for axis, i in axes)

    def symbols(self, point: Point) -> dict[str, Symbols]:
        """Symbols of every weight, by name."""
        at = self._space.settings(point)
        return {name: self._one(name, weight, at) for name, weight in self._weights.items()}

    def _one(self, name: str, weight: Weight, at: Mapping[str, float | int | str]) -> Symbols:
        bins = int(at["embedding_bins" if weight.kind == EMBEDDING else "bins"])
        prune, protect = float(at["prune"]), float(at["protect"])
        pruned, protected = self._partition.masks(weight, str(at[search.METRIC]), prune, protect)
        values, counts = self._sketch(name, LogHistogram.of_ids(weight.ids, ALPHA, ~(pruned | protected))).buckets()
        how, seed = self._how, self._seed(name)
        start = None if how.paper else self._earlier.centers.get(name)
        centers = clusters.cluster(
            values, counts, bins, sigma=how.sigma, seed=seed,
            start=start if start is not None and start.numel() == bins else None, squared=not how.paper,
        )  # fmt: skip
        shape = self._shapes[name]
        return clusters.quantize(
            weight.x.reshape(shape), centers, pruned=pruned.reshape(shape), protected=protected.reshape(shape),
            noise=self._noise(name, weight).reshape(shape) if how.generation else None, zero=self._zero(name),
        )  # fmt: skip

    def _sketch(self, name: str, one: LogHistogram) -> LogHistogram:
        """Of the values that get centers."""
        return one

    def _zero(self, name: str) -> bool | None:
        """Whether anything of a weight is pruned; None: its masks tell."""
        return None

    def _noises(self) -> dict[str, Tensor]:
        return {name: self._noise(name, one) for name, one in self._weights.items()} if self._how.generation else {}

    def _noise(self, name: str, weight: Weight) -> Tensor:
        return _noise(weight.x, self._seed(name) + self._how.generation)

    def _seed(self, name: str) -> int:
        return self._how.seed ^ zlib.crc32(name.encode())


class Boxes(Candidates):
    """The same for boxes of weights of several ranks: thresholds and centers are those of the whole weights."""

    def __init__(
        self, space: Space, weights: dict[str, Weight], shapes: Mapping[str, torch.Size], earlier: Earlier,
        how: Clustering, pool: Pooled,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._sketches: dict[str, LogHistogram] = {}
        self._zeros: set[str] = set()
        self._whole = self._merged(weights)
        mine = {name: self._known(one, self._whole[pool.title(name)].scores) for name, one in weights.items()}
        super().__init__(space, mine, shapes, earlier, how)

    def _known(self, weight: Weight, scores: dict[str, LogHistogram]) -> Weight:
        sensitivity = weight.sensitivity if SENSITIVITY in scores else None
        return replace(weight, scores=scores, sensitivity=sensitivity)

    def _merged(self, weights: Mapping[str, Weight]) -> dict[str, Weight]:
        """What is known of whole weights, by title: their kinds and scores, without values."""
        pool, scores = self._pool, dict[str, dict[str, LogHistogram]]()
        for metric in (MAGNITUDE, SENSITIVITY):
            known = pool.all({name: metric in one.scores for name, one in weights.items()})
            found = pool.sketches(
                {name: one.scores[metric] for name, one in weights.items() if pool.title(name) in known}, ALPHA
            )
            for title, sketch in found.items():
                scores.setdefault(title, {})[metric] = sketch
        nothing = torch.empty(0)
        return {title: Weight(nothing, pool.all_kinds[title], nothing, scores[title]) for title in pool.titles}

    def _parted(self) -> Partition:
        return Partition(self._whole, self._how.paper)

    def size(self, point: Point) -> float:
        """Of the boxes of this rank; 0 where it has none."""
        if not self._weights:
            return math.inf if not self._how.paper and self._is_double(point) else 0.0
        return super().size(point)

    def symbols(self, point: Point) -> dict[str, Symbols]:
        """As `Candidates`; a collective."""
        at, parts, zeros = self._space.settings(point), dict[str, LogHistogram](), list[str]()
        for name, weight in self._weights.items():
            metric, prune, protect = str(at[search.METRIC]), float(at["prune"]), float(at["protect"])
            pruned, protected = self._partition.masks(weight, metric, prune, protect)
            parts[name] = LogHistogram.of_ids(weight.ids, ALPHA, ~(pruned | protected))
            zeros += [name] * bool(pruned.any())
        self._sketches, self._zeros = self._pool.sketches(parts, ALPHA), self._pool.wholes.anywhere(zeros)
        return super().symbols(point)

    def _sketch(self, name: str, one: LogHistogram) -> LogHistogram:
        return self._sketches[self._pool.title(name)]

    def _zero(self, name: str) -> bool | None:
        return self._pool.title(name) in self._zeros

    def _seed(self, name: str) -> int:
        return super()._seed(self._pool.title(name))

    def _noise(self, name: str, weight: Weight) -> Tensor:
        return _noise(weight.x, self._pool.seed(name, self._seed(name) + self._how.generation))


def _noise(like: Tensor, seed: int) -> Tensor:
    """The same for the same seed, so that a trial is what is saved, and every replica tries the same."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device)
