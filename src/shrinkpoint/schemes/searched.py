"""Schemes that look for the smallest setting whose measured degradation stays within a threshold."""

from __future__ import annotations

import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.codec import CODERS, Origin, Reference, Symbols
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.record import JSON
from shrinkpoint.schemes import moments, search
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.calibration import Calibration, disturbed
from shrinkpoint.schemes.candidate import Candidates, Earlier, Latest
from shrinkpoint.schemes.picks import SMALLEST, Picks
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.quality import Quality
from shrinkpoint.schemes.records import Coding
from shrinkpoint.schemes.search import Joint, Outcome, Point, Space, Trial, Trials
from shrinkpoint.schemes.settled import Settled
from shrinkpoint.schemes.spelling import Spelled, seeded
from shrinkpoint.schemes.target import Evaluate, Target
from shrinkpoint.schemes.unmeasured import Unmeasured
from shrinkpoint.schemes.unmoved import unmoved
from shrinkpoint.state import FlatState

Fallback = Literal["safest", "lossless"]


class Searched(Spelled, Coding):
    """What all schemes with a search have in common (arXiv 2306.11800, configuration search; its authors gave their
    baselines the same one).

    The first time, the whole space is searched; then, only the neighbourhood of what was chosen last, and the whole
    space again where no neighbour holds. One instance serves one training run: it remembers what it chose.

    Args:
        threshold: how much worse `evaluate` may become, relative to the state before: "1%", or 0.01; at most "100%".
        evaluate: called with what is being saved (a manager's `model`; else the state) with a candidate's values in it;
            returns a loss or a score, or a 1-D tensor of each example's, which tells how far it can be trusted. It must
            look at what it is given, and give the same answer for the same weights: fix its batches and its seed, and
            call `model.eval()`. Whatever it changes in the model is put back.
        higher_is_better: `evaluate` returns a score (accuracy) and no loss.
        config: a setting, by name of the knobs; then nothing is searched and `evaluate` is not needed.
        optimizer: "exact" keeps the optimizer's moments bit for bit; "reset" and "lossy" do not (see `moments`).
        fallback: where no setting meets the threshold: "lossless" loses nothing, "safest" takes the safest one all the
            same. If `evaluate` gives no number for that one either, nothing is lost in any case.
        coarser: whether a later checkpoint may be quantized more aggressively than the one before.
        group: a torch.distributed group of data-parallel replicas, all of which save at the same time and share the
            trials; the first of them writes.
        progress: True shows a line a trial on stderr; a callable gets every trial (`search.Progress`).
        seed: of the random starts.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str]
    coders: Sequence[str] = CODERS
    space: Space

    def __init__(
        self,
        *,
        threshold: float | str = 0.05,
        evaluate: Evaluate | None = None,
        higher_is_better: bool = False,
        config: Mapping[str, Any] | None = None,
        optimizer: moments.Mode = "exact",
        fallback: Fallback = "lossless",
        coarser: bool = False,
        group: Any = None,
        progress: bool | search.Progress = False,
        seed: int = 0,
    ) -> None:
        self._evaluate: Evaluate | None = arguments.function_or_none("evaluate", evaluate)
        self._higher = arguments.flag("higher_is_better", higher_is_better)
        self._threshold = arguments.share("threshold", threshold, zero=True)
        self._fixed = None if config is None else self._point(config)
        self._optimizer = moments.checked(optimizer)
        self._fallback: Fallback = arguments.choice("fallback", fallback, get_args(Fallback))
        self._coarser, self._group = arguments.flag("coarser", coarser), _group(group)
        self._progress: bool | search.Progress = _progress(progress)
        self._seed = seeded(seed)
        self._last: Point | None = None
        self._calibration, self._unmeasured = Calibration(), Unmeasured()
        self._generation, self._quiet = 0, False
        if evaluate is None and config is None:
            expected, do = "evaluate= or config=", "pass a function that measures the model, or choose a setting"
            raise PolicyError(type(self).__name__, found="neither", expected=expected, do=do)

    @property
    def arguments(self) -> dict[str, object]:
        """See `Spelled`."""
        return {
            "threshold": self._threshold, "evaluate": self._evaluate, "higher_is_better": self._higher,
            "config": None if self._fixed is None else self.space.settings(self._fixed), "optimizer": self._optimizer,
            "fallback": self._fallback, "coarser": self._coarser, "group": self._group, "seed": self._seed,
        }  # fmt: skip

    # what a scheme of this kind says of itself

    @abstractmethod
    def candidates(
        self, weights: Mapping[str, Tensor], earlier: Earlier, target: Target, pool: Pooled | None = None
    ) -> Candidates:
        """All points of the space for these weights.

        Args:
            pool: these are boxes of weights of several ranks; all of them are here, and later where symbols are made.
        """
        raise NotImplementedError

    def variants(self, target: Target, pool: Pooled | None = None) -> tuple[str, ...]:
        """Those of the space's variants that can be tried now."""
        return self.space.variants

    def alternative(
        self, weights: Mapping[str, Tensor], earlier: Earlier, pool: Pooled | None = None
    ) -> tuple[str, Space, Candidates] | None:
        """Another space for these weights, with its name; it is searched where no point of the first one holds.

        Args:
            pool: as of `candidates`.
        """
        return None

    # what a store calls

    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """Search and quantize; see `schemes.Scheme`."""
        return self.settle(flat, reference).quantize(flat, reference)

    # what a manager calls

    @property
    def evaluate(self) -> Evaluate | None:
        return self._evaluate

    @property
    def measures(self) -> bool:
        """Whether it asks `evaluate` before it decides."""
        return self._fixed is None

    @property
    def shares(self) -> bool:
        """Whether replicas share its trials."""
        return self._group is not None

    @property
    def leads(self) -> bool:
        """Whether this process is the one of its group that writes."""
        return self._group is None or torch.distributed.get_rank(self._group) == 0

    def together(self, compute: Callable[[], None]) -> None:
        """Do something on the rank that leads; where it raises, all ranks of the group do, instead of waiting for it.

        Raises:
            whatever `compute` raises.
        """
        if self._group is None:
            compute()
        else:
            Trials(_unmeasured, group=self._group).everywhere(lambda: compute() if self.leads else None)

    def resume(self, loss: JSON, generation: int = 0) -> None:
        """Go on from a checkpoint: search near what was chosen there.

        Args:
            loss: of its manifest; one of another scheme, one where nothing met the threshold, or none, makes the next
                search a whole one.
            generation: lossy restores behind the weights from now on; after one, they lie on a quantizer's levels.
        """
        known = loss if isinstance(loss, dict) else {}
        chosen = known.get("chosen")
        ours = isinstance(chosen, dict) and known.get("scheme") == self.id and not {"fallback", "space"} & known.keys()
        self._last = self.space.point(chosen) if isinstance(chosen, dict) and ours else None
        self._generation, self._calibration = generation, Calibration()

    @torch.no_grad()
    def settle(
        self, flat: FlatState, reference: Reference | None, target: Target | None = None, pool: Pooled | None = None
    ) -> Settled:
        """Search, and decide for this state.

        Args:
            reference: what is held of the previous checkpoint; None: nothing.
            target: what to measure on; None: on copies of the state.
            pool: what there is of these tensors on other ranks, all of which decide at the same time.

        Raises:
            PolicyError: `evaluate` raised, or returned no number.
        """
        began = time.perf_counter()
        alive = None if target is None else target.alive
        self._quiet = pool is not None and pool.wholes.rank > 0
        picks = Picks.of(flat, alive) if pool is None else pool.picks(flat, alive)
        wanted = len(picks.tensors if pool is None else pool.titles)
        kept = unmoved(picks.tensors, flat, reference) if pool is None else pool.unmoved(picks, flat, reference)
        picks, found = picks.without(kept), _Found()
        left = len(picks.tensors if pool is None else pool.titles)
        if wanted and not left:
            found = _Found(record=self._chosen_last())
        if left:
            symbols = {} if reference is None else reference.codebooks
            earlier = Earlier.of(symbols, picks.tensors, self._generation)
            earlier = self._replicated(earlier) if pool is None else self._alike(earlier, picks, pool)
            target = Target(flat, self._evaluate or _unmeasured) if target is None else target
            found = self._find(flat, picks, earlier, target, pool)
        record = {
            "scheme": self.id, "threshold": self._threshold, "optimizer": self._optimizer,
            **found.record, "left_out": list(picks.refused), "seconds": round(time.perf_counter() - began, 3),
        }  # fmt: skip
        picks.warn()
        optimizer = "exact" if found.lossless else self._optimizer
        made: dict[str, Origin] = {**kept, **{name: _on_host(one) for name, one in found.symbols.items()}}
        if pool is not None and optimizer == "lossy":
            made |= {name: one.cpu() for name, one in pool.moments(flat)}
            optimizer = "exact"  # what else is to be done with it
        least = (SMALLEST, 2) if pool is None else None
        return Settled(self.id, made, picks.casts, optimizer, self.coders, record, least=least)

    def _chosen_last(self) -> dict[str, Any]:
        """What a manifest says where nothing has moved, so that nothing is tried."""
        last = self._fixed or self._last
        if last is None:
            return {}
        found = {"degradation": 0.0} if self.measures else {}
        return {"chosen": self.space.settings(last), "measured": self.measures, **found}

    def _find(self, flat: FlatState, picks: Picks, earlier: Earlier, target: Target, pool: Pooled | None) -> _Found:
        pools = () if pool is None else (pool,)
        candidates = self.candidates(picks.tensors, earlier, target, *pools)
        if self._fixed is not None:
            self._unmeasured.tell(self, quiet=self._quiet or not self.leads)
            chosen = self.space.settings(self._fixed)
            return _Found(candidates.symbols(self._fixed), {"chosen": chosen, "measured": False})
        with target:
            quality = Quality(target.measure, higher=self._higher)

            def grid(name: str, space: Space, candidates: Candidates) -> _Grid:
                return _Grid(name, space, candidates, quality, picks, flat, self._group, pool)

            def other() -> _Grid | None:
                found = self.alternative(picks.tensors, earlier, *pools)
                return None if found is None else grid(*found)

            own = grid(self.id, self.space, candidates)
            title = str if pool is None else pool.title
            problem = self._calibration.problem(
                quality, disturbed(picks, flat, title), lambda scale: self._threshold, own.trials.everywhere
            )
            record: dict[str, Any] = {
                "measured": True, "quality": _said(quality.base.value), "noise": self._calibration.noise,
                "searches": [],
            }  # fmt: skip
            if problem is not None:
                _warn(f"{problem.found}, so this checkpoint is lossless, weights and moments: {problem.do}")
                return _Found(record=record | {"exact": problem.found, "fallback": "lossless"}, lossless=True)
            if warning := self._calibration.warning(self._threshold):
                _warn(warning)
            variants = self.variants(target, *pools)
            return self._searched(own, other, record, variants)

    def _searched(
        self, own: _Grid, other: Callable[[], _Grid | None], record: dict[str, Any], variants: Sequence[str]
    ) -> _Found:
        """The answer of the search in the first space in which something holds."""
        allowed = max(self._threshold - (self._calibration.noise or 0.0), 0.0)
        outcomes = [*self._outcomes(own, allowed, variants)]
        record["searches"] = [one.to_json(own.space) for one in outcomes]
        chosen = outcomes[-1].chosen
        if chosen is not None:
            self._last = chosen.point
            return self._doubted(own.found(chosen, record))
        second = other()
        if second is not None:
            outcome = second.whole(allowed, self._shown(second, allowed))
            record["searches"].append(outcome.to_json(second.space) | {"space": second.name})
            if outcome.chosen is not None:
                return self._doubted(second.found(outcome.chosen, record | {"space": second.name}))
        return self._fallen_back(own, outcomes, record, self.space.safest(variants[0]))

    def _doubted(self, found: _Found) -> _Found:
        """The same; once in a run it is said where other examples may have a larger degradation than is allowed."""
        if found.interval is not None:
            doubt = self._calibration.doubt(found.record["degradation"], found.interval, self._threshold)
            if doubt:
                _warn(doubt)
        return found

    def _fallen_back(self, own: _Grid, outcomes: Sequence[Outcome], record: dict[str, Any], safest: Point) -> _Found:
        """Nothing met the threshold. What is taken then was not chosen: the next search does not begin there."""
        worst = next((t.degradation for o in outcomes for t in o.trials if t.point == safest), math.nan)
        lossless = self._fallback == "lossless" or not math.isfinite(worst)
        kept = "nothing was lost instead" if lossless else "the safest one was taken"
        text = f"no setting keeps the degradation within {self._threshold:.2%} (the safest: {worst:.2%})"
        _warn(f"{text}: {kept}")
        record["fallback"] = "lossless" if lossless else "safest"
        if lossless:
            return _Found(record=record | {"exact": text}, lossless=True)
        record |= {"chosen": self.space.settings(safest), "degradation": worst}
        return _Found(own.candidates.symbols(safest), record)

    def _outcomes(self, own: _Grid, allowed: float, variants: Sequence[str]) -> Iterator[Outcome]:
        """The searches that were needed, the last one decides."""
        progress = self._shown(own, allowed)
        last = self._last
        if last is not None and last.variant in variants:
            outcome = search.neighbourhood(
                self.space, own.candidates.size, own.trials, allowed, last,
                variants=variants, coarser=self._coarser, progress=progress,
            )  # fmt: skip
            yield outcome
            if outcome.chosen is not None:
                return
        yield self._whole(own.candidates.size, own.trials, allowed, variants, progress)

    def _whole(
        self, sizes: Callable[[Point], float], trials: Trials, allowed: float, variants: Sequence[str],
        progress: search.Progress | None,
    ) -> Outcome:  # fmt: skip
        """A search of the whole space, but for what is more aggressive than the last choice."""
        if self._last is not None and not self._coarser:
            sizes = _without_bolder(sizes, self._last)
        return search.branch_and_bound(self.space, sizes, trials, allowed, variants=variants, progress=progress)

    def _shown(self, grid: _Grid, allowed: float) -> search.Progress | None:
        if not isinstance(self._progress, bool):
            return self._progress
        if not self._progress or not self.leads or self._quiet:
            return None
        return search.show(grid.space, allowed, grid.nbytes)

    def _point(self, config: Mapping[str, Any]) -> Point:
        known = isinstance(config, Mapping)
        point = self.space.point({search.METRIC: self.space.variants[0], **config}) if known else None
        settings = {} if point is None else self.space.settings(point)
        if point is None or any(settings.get(name) != value for name, value in config.items()):
            expected = "a value for each of " + ", ".join(f"{axis.name} {axis.values}" for axis in self.space.axes)
            if self.space.variants != ("",):
                expected += f"; and a metric of {self.space.variants}, the first where none is named"
            raise PolicyError("config", found=repr(config), expected=expected, do="choose among these")
        return point

    def _alike(self, earlier: Earlier, picks: Picks, pool: Pooled) -> Earlier:
        """The same on all ranks that have a box of a tensor; and what was learned, where all learned it."""
        self._last = pool.agreed(self._last)
        self._calibration.learn(pool.agreed(self._calibration.known))
        self._generation = pool.agreed(self._generation) or 0
        return replace(pool.earlier(earlier, picks.tensors), generation=self._generation)

    def _replicated(self, earlier: Earlier) -> Earlier:
        """What the first rank of the group knows."""
        known, earlier = self._shared((self._calibration.known, earlier))
        self._calibration.learn(known)
        return earlier

    def _shared(self, thing: Any) -> Any:
        """What the first rank of the group has."""
        if self._group is None:
            return thing
        box = [thing]
        torch.distributed.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


@dataclass(frozen=True)
class _Found:
    symbols: Mapping[str, Symbols] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    lossless: bool = False
    interval: tuple[float, float] | None = None


class _Grid:
    """A space for the weights of one state, and how its points are measured.

    Attributes:
        trials: of its points.
        nbytes: of the weights as they are.
    """

    def __init__(
        self, name: str, space: Space, candidates: Candidates, quality: Quality, picks: Picks, flat: FlatState,
        group: Any, pool: Pooled | None,
    ) -> None:  # fmt: skip
        self.name, self.space, self.candidates = name, space, Latest(candidates)
        self.nbytes = sum(x.numel() * x.element_size() for x in picks.tensors.values())
        self._quality, self._picks, self._flat = quality, picks, flat
        self._intervals: dict[Point, tuple[float, float]] = {}
        self.trials = Trials(self._measure, group=group) if pool is None else Joint(self._measure, pool.wholes.total)

    def whole(self, allowed: float, progress: search.Progress | None) -> Outcome:
        """A search of all of it."""
        return search.branch_and_bound(self.space, self.candidates.size, self.trials, allowed, progress=progress)

    def found(self, chosen: Trial, record: dict[str, Any]) -> _Found:
        """What a trial that holds makes of the weights."""
        record |= {"chosen": self.space.settings(chosen.point), "degradation": chosen.degradation}
        intervals = self.trials.everywhere(lambda: self._intervals.get(chosen.point))  # of the rank that measured it
        interval = next((one for one in intervals if one is not None), None)
        if interval is not None:
            record["interval"] = [_said(end) for end in interval]
        return _Found(self.candidates.symbols(chosen.point), record, interval=interval)

    def _measure(self, point: Point) -> float:
        symbols = self.candidates.symbols(point)
        values = {name: one.values(self._picks.tensors[name].dtype) for name, one in symbols.items()}
        change, scale = self._quality.change(self._picks.replaced(values, self._flat)), self._quality.scale
        if change.interval is not None:
            self._intervals[point] = change.interval[0] / scale, change.interval[1] / scale
        return change.rise / scale


def _said(number: float) -> float | str:
    """As a manifest can say it."""
    return number if math.isfinite(number) else str(number)


def _on_host(symbols: Symbols) -> Symbols:
    return Symbols(symbols.codes.cpu(), symbols.centers.cpu(), symbols.exact.cpu(), symbols.first)


def _group(group: Any) -> Any:
    if isinstance(group, str | int | float | type):
        raise arguments.wrong(
            "group", group, "a torch.distributed group", "pass what torch.distributed.new_group returned"
        )
    return group


def _progress(progress: Any) -> Any:
    if isinstance(progress, bool) or callable(progress):
        return progress
    raise arguments.wrong("progress", progress, "True, False or a function of a trial", "pass one of them")


def _unmeasured(_: Any) -> float:
    raise AssertionError("nothing is to be measured here")


def _without_bolder(sizes: Callable[[Point], float], last: Point) -> Callable[[Point], float]:
    """The same sizes, but infinite for what is more aggressive than `last`, under whichever variant."""

    def size(point: Point) -> float:
        return math.inf if search.dominated(Point(last.variant, point.index), last) else sizes(point)

    return size


def _warn(text: str) -> None:
    warnings.warn(text, LossWarning, stacklevel=2)
