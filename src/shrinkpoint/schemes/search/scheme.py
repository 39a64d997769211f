"""Base class of the schemes that search the smallest setting whose measured degradation stays within a threshold."""

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

from shrinkpoint import validate
from shrinkpoint.codec.code_streams import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.schemes import optimizer_state
from shrinkpoint.schemes.base import QuantizedState, SpecMixin, check_seed
from shrinkpoint.schemes.calibration import Calibration, UnmeasuredLossNotice, make_perturbations
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.evaluate import DegradationMetric, Evaluate, TrialEvaluator
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.schemes.search.candidates import CachedCandidates, CandidateSet, PreviousCodes, common_previous_codes
from shrinkpoint.schemes.search.progress import progress_printer
from shrinkpoint.schemes.search.space import METRIC, Point, Space, is_dominated
from shrinkpoint.schemes.search.strategies import branch_and_bound, neighbourhood
from shrinkpoint.schemes.search.trials import Progress, SearchResult, Trial, Trials, finite_or_text
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL, TensorSelection, select_tensors, unchanged_tensors
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

Fallback = Literal["safest", "lossless"]


class SearchScheme(SpecMixin, RecordEncodingMixin):
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
        optimizer: optimizer_state.Mode = "exact",
        fallback: Fallback = "lossless",
        coarser: bool = False,
        group: Any = None,
        progress: bool | Progress = False,
        seed: int = 0,
    ) -> None:
        self._evaluate: Evaluate | None = validate.check_optional_callable("evaluate", evaluate)
        self._higher_is_better = validate.check_bool("higher_is_better", higher_is_better)
        self._threshold = validate.check_fraction("threshold", threshold, allow_zero=True)
        self._fixed_point = None if config is None else self._point_from_config(config)
        self._optimizer = optimizer_state.check_mode(optimizer)
        self._fallback: Fallback = validate.check_choice("fallback", fallback, get_args(Fallback))
        self._coarser, self._group = validate.check_bool("coarser", coarser), _check_group(group)
        self._progress: bool | Progress = _check_progress(progress)
        self._seed = check_seed(seed)
        self._last_choice: Point | None = None
        self._calibration, self._unmeasured_notice = Calibration(), UnmeasuredLossNotice()
        self._lossy_restores, self._is_quiet = 0, False
        if evaluate is None and config is None:
            expected, do = "evaluate= or config=", "pass a function that measures the model, or choose a setting"
            raise PolicyError(type(self).__name__, found="neither", expected=expected, do=do)

    @property
    def arguments(self) -> dict[str, object]:
        return {
            "threshold": self._threshold,
            "evaluate": self._evaluate,
            "higher_is_better": self._higher_is_better,
            "config": None if self._fixed_point is None else self.space.settings(self._fixed_point),
            "optimizer": self._optimizer,
            "fallback": self._fallback,
            "coarser": self._coarser,
            "group": self._group,
            "seed": self._seed,
        }

    # what a scheme of this kind says of itself

    @abstractmethod
    def candidates(
        self,
        weights: Mapping[str, Tensor],
        previous: PreviousCodes,
        evaluator: TrialEvaluator,
        stats: GlobalStats,
    ) -> CandidateSet:
        """All points of the space for these weights; a collective, as is quantizing at a point.

        Args:
            weights: by name, this rank's shards of the weights.
            previous: codes of the previous checkpoint.
            evaluator: measures trials.
            stats: statistics of the weights of all ranks.
        """
        raise NotImplementedError

    def variants(self, evaluator: TrialEvaluator, stats: GlobalStats) -> tuple[str, ...]:
        """Those of the space's variants that can be tried now."""
        return self.space.variants

    def alternative(
        self, weights: Mapping[str, Tensor], previous: PreviousCodes, stats: GlobalStats
    ) -> tuple[str, Space, CandidateSet] | None:
        """Another space for these weights, with its name; it is searched if no point of the first one holds."""
        return None

    # what a store calls

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Search and quantize; see `schemes.Scheme`."""
        return self.plan(state, reference).quantize(state, reference)

    # what a manager calls

    @property
    def evaluate(self) -> Evaluate | None:
        return self._evaluate

    @property
    def needs_evaluation(self) -> bool:
        """Whether it asks `evaluate` before it decides."""
        return self._fixed_point is None

    @property
    def shares_trials(self) -> bool:
        """Whether replicas share its trials."""
        return self._group is not None

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one of its group that writes."""
        return self._group is None or torch.distributed.get_rank(self._group) == 0

    def run_on_writer(self, compute: Callable[[], None]) -> None:
        """Do something on the rank that leads; where it raises, all ranks of the group do, instead of waiting for it.

        Raises:
            whatever `compute` raises.
        """
        if self._group is None:
            compute()
        else:
            Trials(_never_called, group=self._group).run_on_all_ranks(lambda: compute() if self.is_writer else None)

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Go on from a checkpoint: search near what was chosen there.

        Args:
            loss: of its manifest; one of another scheme, one where nothing met the threshold, or none, makes the next
                search a whole one.
            lossy_restores: lossy restores behind the weights from now on; after one, they lie on a quantizer's levels.
        """
        known = loss if isinstance(loss, dict) else {}
        chosen = known.get("chosen")
        ours = isinstance(chosen, dict) and known.get("scheme") == self.id and not {"fallback", "space"} & known.keys()
        self._last_choice = self.space.point(chosen) if isinstance(chosen, dict) and ours else None
        self._lossy_restores, self._calibration = lossy_restores, Calibration()

    @torch.no_grad()
    def plan(
        self,
        state: FlatState,
        reference: Reference | None,
        evaluator: TrialEvaluator | None = None,
        global_tensors: GlobalTensors | None = None,
    ) -> QuantizationPlan:
        """Search a setting and quantize the weights of a state; a collective of all ranks that have shards of it.

        Args:
            reference: the decoded previous checkpoint; None if there is none.
            evaluator: measures trials; None measures them on copies of the state.
            global_tensors: the tensors of all ranks; None: this process has all of every tensor.

        Raises:
            PolicyError: `evaluate` raised, or returned no number.
        """
        start = time.perf_counter()
        tensors = GlobalTensors.from_state(state) if global_tensors is None else global_tensors
        quantizable = None if evaluator is None else evaluator.quantizable
        self._is_quiet = tensors.rank > 0
        selection = select_tensors(state, tensors, quantizable)
        has_weights = bool(selection.global_names)
        unchanged = unchanged_tensors(selection.tensors, state, reference, tensors)
        selection, choice = selection.exclude(unchanged, tensors), _Choice()
        stats = GlobalStats(tensors, selection.global_names)
        if has_weights and not stats.global_names:
            choice = _Choice(record=self._last_choice_record())
        if stats.global_names:
            codebooks = {} if reference is None else reference.codebook_tensors
            previous = PreviousCodes.from_codebooks(codebooks, selection.tensors, self._lossy_restores)
            previous = self._agree(self._broadcast_previous(previous), selection, stats)
            evaluator = TrialEvaluator(state, self._evaluate or _never_called) if evaluator is None else evaluator
            choice = self._choose(state, selection, previous, evaluator, stats)
        record = {
            "scheme": self.id,
            "threshold": self._threshold,
            "optimizer": self._optimizer,
            **choice.record,
            "left_out": list(selection.nonfinite),
            "seconds": round(time.perf_counter() - start, 3),
        }
        selection.warn_nonfinite()
        optimizer = "exact" if choice.lossless else self._optimizer
        quantized: dict[str, QuantizedTensor] = {
            **unchanged,
            **{name: _to_cpu(tensor) for name, tensor in choice.quantized.items()},
        }
        if optimizer == "lossy":
            quantized |= {name: tensor.cpu() for name, tensor in optimizer_state.quantize_moments(state, stats)}
        # which of its shards stay exact, and why, no rank can say alone
        min_size = (MIN_WEIGHT_NUMEL, 2) if tensors.is_complete else None
        return QuantizationPlan(
            self.id, quantized, selection.cast_sources, optimizer, self.coders, record, min_size=min_size
        )

    def _last_choice_record(self) -> dict[str, Any]:
        """What a manifest says where nothing has moved, so that nothing is tried."""
        last = self._fixed_point or self._last_choice
        if last is None:
            return {}
        found = {"degradation": 0.0} if self.needs_evaluation else {}
        return {"chosen": self.space.settings(last), "measured": self.needs_evaluation, **found}

    def _choose(
        self,
        state: FlatState,
        selection: TensorSelection,
        previous: PreviousCodes,
        evaluator: TrialEvaluator,
        stats: GlobalStats,
    ) -> _Choice:
        candidates = self.candidates(selection.tensors, previous, evaluator, stats)
        if self._fixed_point is not None:
            self._unmeasured_notice.warn_once(self, quiet=self._is_quiet or not self.is_writer)
            chosen = self.space.settings(self._fixed_point)
            return _Choice(candidates.quantize(self._fixed_point), {"chosen": chosen, "measured": False})
        with evaluator:
            quality = DegradationMetric(evaluator.evaluate, higher_is_better=self._higher_is_better)

            def grid(name: str, space: Space, candidates: CandidateSet) -> _SpaceEvaluation:
                return _SpaceEvaluation(name, space, candidates, quality, selection, state, self._group, stats)

            def other() -> _SpaceEvaluation | None:
                found = self.alternative(selection.tensors, previous, stats)
                return None if found is None else grid(*found)

            own = grid(self.id, self.space, candidates)
            problem = self._calibration.find_problem(
                quality,
                make_perturbations(selection, state, stats.global_name),
                lambda scale: self._threshold,
                own.trials.run_on_all_ranks,
            )
            record: dict[str, Any] = {
                "measured": True,
                "quality": finite_or_text(quality.baseline.value),
                "noise": self._calibration.noise,
                "searches": [],
            }
            if problem is not None:
                _warn(f"{problem.observation}, so this checkpoint is lossless, weights and moments: {problem.advice}")
                return _Choice(record=record | {"exact": problem.observation, "fallback": "lossless"}, lossless=True)
            if warning := self._calibration.noise_warning(self._threshold):
                _warn(warning)
            variants = self.variants(evaluator, stats)
            return self._search_spaces(own, other, record, variants)

    def _search_spaces(
        self,
        own: _SpaceEvaluation,
        make_alternative: Callable[[], _SpaceEvaluation | None],
        record: dict[str, Any],
        variants: Sequence[str],
    ) -> _Choice:
        """The answer of the search in the first space in which something holds."""
        allowed = max(self._threshold - (self._calibration.noise or 0.0), 0.0)
        outcomes = [*self._search_results(own, allowed, variants)]
        record["searches"] = [one.to_json(own.space) for one in outcomes]
        chosen = outcomes[-1].chosen
        if chosen is not None:
            self._last_choice = chosen.point
            return self._warn_interval(own.choice(chosen, record))
        second = make_alternative()
        if second is not None:
            outcome = second.full_search(allowed, self._progress_callback(second, allowed))
            record["searches"].append(outcome.to_json(second.space) | {"space": second.name})
            if outcome.chosen is not None:
                return self._warn_interval(second.choice(outcome.chosen, record | {"space": second.name}))
        return self._apply_fallback(own, outcomes, record, self.space.safest(variants[0]))

    def _warn_interval(self, choice: _Choice) -> _Choice:
        """The same; once in a run it is said where other examples may have a larger degradation than is allowed."""
        if choice.interval is not None:
            doubt = self._calibration.interval_warning(choice.record["degradation"], choice.interval, self._threshold)
            if doubt:
                _warn(doubt)
        return choice

    def _apply_fallback(
        self, own: _SpaceEvaluation, outcomes: Sequence[SearchResult], record: dict[str, Any], safest: Point
    ) -> _Choice:
        """Nothing met the threshold. What is taken then was not chosen: the next search does not begin there."""
        worst = next((t.degradation for o in outcomes for t in o.trials if t.point == safest), math.nan)
        lossless = self._fallback == "lossless" or not math.isfinite(worst)
        kept = "nothing was lost instead" if lossless else "the safest one was taken"
        text = f"no setting keeps the degradation within {self._threshold:.2%} (the safest: {worst:.2%})"
        _warn(f"{text}: {kept}")
        record["fallback"] = "lossless" if lossless else "safest"
        if lossless:
            return _Choice(record=record | {"exact": text}, lossless=True)
        record |= {"chosen": self.space.settings(safest), "degradation": worst}
        return _Choice(own.candidates.quantize(safest), record)

    def _search_results(self, own: _SpaceEvaluation, allowed: float, variants: Sequence[str]) -> Iterator[SearchResult]:
        """The searches that were needed, the last one decides."""
        progress = self._progress_callback(own, allowed)
        last = self._last_choice
        if last is not None and last.variant in variants:
            outcome = neighbourhood(
                self.space,
                own.candidates.size,
                own.trials,
                allowed,
                last,
                variants=variants,
                coarser=self._coarser,
                progress=progress,
            )
            yield outcome
            if outcome.chosen is not None:
                return
        yield self._full_search(own.candidates.size, own.trials, allowed, variants, progress)

    def _full_search(
        self,
        sizes: Callable[[Point], float],
        trials: Trials,
        allowed: float,
        variants: Sequence[str],
        progress: Progress | None,
    ) -> SearchResult:
        """A search of the whole space, but for what is more aggressive than the last choice."""
        if self._last_choice is not None and not self._coarser:
            sizes = _without_more_aggressive(sizes, self._last_choice)
        return branch_and_bound(self.space, sizes, trials, allowed, variants=variants, progress=progress)

    def _progress_callback(self, grid: _SpaceEvaluation, allowed: float) -> Progress | None:
        if not isinstance(self._progress, bool):
            return self._progress
        if not self._progress or not self.is_writer or self._is_quiet:
            return None
        return progress_printer(grid.space, allowed, grid.nbytes)

    def _point_from_config(self, config: Mapping[str, Any]) -> Point:
        known = isinstance(config, Mapping)
        point = self.space.point({METRIC: self.space.variants[0], **config}) if known else None
        settings = {} if point is None else self.space.settings(point)
        if point is None or any(settings.get(name) != value for name, value in config.items()):
            expected = "a value for each of " + ", ".join(f"{axis.name} {axis.values}" for axis in self.space.axes)
            if self.space.variants != ("",):
                expected += f"; and a metric of {self.space.variants}, the first where none is named"
            raise PolicyError("config", found=repr(config), expected=expected, do="choose among these")
        return point

    def _agree(self, previous: PreviousCodes, selection: TensorSelection, stats: GlobalStats) -> PreviousCodes:
        """Forget what ranks that have shards of one state do not all remember alike; a collective."""
        self._last_choice = stats.global_tensors.value_if_equal(self._last_choice)
        self._calibration.set_state(stats.global_tensors.value_if_equal(self._calibration.state))
        self._lossy_restores = stats.global_tensors.value_if_equal(self._lossy_restores) or 0
        lossy_restores = stats.global_tensors.value_if_equal(previous.lossy_restores) or 0
        return replace(common_previous_codes(previous, selection.tensors, stats), lossy_restores=lossy_restores)

    def _broadcast_previous(self, previous: PreviousCodes) -> PreviousCodes:
        """What the first rank of the group knows."""
        known, previous = self._broadcast((self._calibration.state, previous))
        self._calibration.set_state(known)
        return previous

    def _broadcast(self, obj: Any) -> Any:
        """What the first rank of the group has."""
        if self._group is None:
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


@dataclass(frozen=True)
class _Choice:
    quantized: Mapping[str, CodebookTensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    lossless: bool = False
    interval: tuple[float, float] | None = None


class _SpaceEvaluation:
    """A space for the weights of one state, and how its points are measured.

    Attributes:
        trials: of its points.
        nbytes: of the weights as they are.
    """

    def __init__(
        self,
        name: str,
        space: Space,
        candidates: CandidateSet,
        quality: DegradationMetric,
        selection: TensorSelection,
        state: FlatState,
        group: Any,
        stats: GlobalStats,
    ) -> None:
        self.name, self.space, self.candidates = name, space, CachedCandidates(candidates)
        self.nbytes = sum(x.numel() * x.element_size() for x in selection.tensors.values())
        self._quality, self._selection, self._state = quality, selection, state
        self._intervals: dict[Point, tuple[float, float]] = {}
        self.trials = Trials(self._degradation_at, group=group, sum_over_shards=stats.global_tensors.sum_over_ranks)

    def full_search(self, allowed: float, progress: Progress | None) -> SearchResult:
        """A search of all of it."""
        return branch_and_bound(self.space, self.candidates.size, self.trials, allowed, progress=progress)

    def choice(self, chosen: Trial, record: dict[str, Any]) -> _Choice:
        """What a trial that holds makes of the weights."""
        record |= {"chosen": self.space.settings(chosen.point), "degradation": chosen.degradation}
        intervals = self.trials.run_on_all_ranks(
            lambda: self._intervals.get(chosen.point)
        )  # of the rank that measured it
        interval = next((one for one in intervals if one is not None), None)
        if interval is not None:
            record["interval"] = [finite_or_text(end) for end in interval]
        return _Choice(self.candidates.quantize(chosen.point), record, interval=interval)

    def _degradation_at(self, point: Point) -> float:
        symbols = self.candidates.quantize(point)
        values = {name: one.dequantize(self._selection.tensors[name].dtype) for name, one in symbols.items()}
        change, scale = self._quality.degradation(self._selection.with_casts(values, self._state)), self._quality.scale
        if change.interval is not None:
            self._intervals[point] = change.interval[0] / scale, change.interval[1] / scale
        return change.rise / scale


def _to_cpu(quantized_tensor: CodebookTensor) -> CodebookTensor:
    return CodebookTensor(
        quantized_tensor.codes.cpu(),
        quantized_tensor.centers.cpu(),
        quantized_tensor.exact.cpu(),
        quantized_tensor.first_code,
    )


def _check_group(group: Any) -> Any:
    if isinstance(group, str | int | float | type):
        raise validate.argument_error(
            "group", group, "a torch.distributed group", "pass what torch.distributed.new_group returned"
        )
    return group


def _check_progress(progress: Any) -> Any:
    if isinstance(progress, bool) or callable(progress):
        return progress
    raise validate.argument_error("progress", progress, "True, False or a function of a trial", "pass one of them")


def _never_called(_: Any) -> float:
    raise AssertionError("nothing is to be measured here")


def _without_more_aggressive(sizes: Callable[[Point], float], last: Point) -> Callable[[Point], float]:
    """The same sizes, but infinite for what is more aggressive than `last`, under whichever variant."""

    def size(point: Point) -> float:
        return math.inf if is_dominated(Point(last.variant, point.index), last) else sizes(point)

    return size


def _warn(text: str) -> None:
    warnings.warn(text, LossWarning, stacklevel=2)
