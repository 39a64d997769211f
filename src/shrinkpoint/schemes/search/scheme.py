"""Base class of the schemes that search the smallest setting whose measured degradation stays within a threshold."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.code_streams import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.errors import PolicyError, warn_user
from shrinkpoint.progress import Task
from shrinkpoint.schemes import optimizer_modes
from shrinkpoint.schemes.base import QuantizedState, SpecMixin, check_seed, finite_or_text
from shrinkpoint.schemes.calibration import (
    Calibration,
    EvaluateProblem,
    UnmeasuredLossNotice,
    find_failure,
    make_perturbations,
)
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.evaluate import DegradationMetric, Evaluate, ReadRecorder, TrialEvaluator, never_called
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.schemes.search.candidates import CachedCandidates, CandidateSet, PreviousCodes, common_previous_codes
from shrinkpoint.schemes.search.progress import progress_printer
from shrinkpoint.schemes.search.space import Point, Space, is_dominated
from shrinkpoint.schemes.search.strategies import branch_and_bound, neighbourhood
from shrinkpoint.schemes.search.trials import Progress, SearchResult, Trial, Trials
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL, TensorSelection, select_tensors, unchanged_tensors
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

_log = logging.getLogger("shrinkpoint")
Fallback = Literal["safest", "lossless"]
T = TypeVar("T")


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
        optimizer: optimizer_modes.Mode = "exact",
        fallback: Fallback = "lossless",
        coarser: bool = False,
        group: Any = None,
        progress: bool | Progress = False,
        seed: int = 0,
    ) -> None:
        self._evaluate: Evaluate | None = validate.check_optional_callable("evaluate", evaluate)
        self._higher_is_better = validate.check_bool("higher_is_better", higher_is_better)
        self._threshold = validate.check_fraction("threshold", threshold, allow_zero=True)
        self._fixed_point = None if config is None else self.space.point_from_config(config)
        self._optimizer = optimizer_modes.check_mode(optimizer)
        self._fallback: Fallback = validate.check_choice("fallback", fallback, get_args(Fallback))
        if isinstance(group, str | int | float | type):
            do = "pass what torch.distributed.new_group returned"
            raise validate.argument_error("group", group, "a torch.distributed group", do)
        if not (isinstance(progress, bool) or callable(progress)):
            expected = "True, False or a function of a trial"
            raise validate.argument_error("progress", progress, expected, "pass one of them")
        self._coarser, self._group = validate.check_bool("coarser", coarser), group
        self._progress: bool | Progress = progress
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

    # implemented by subclasses

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

    # called by a store

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Search and quantize; see `schemes.Scheme`."""
        return self.plan(state, reference).quantize(state, reference)

    # called by a manager

    @property
    def evaluate(self) -> Evaluate | None:
        return self._evaluate

    @property
    def needs_evaluation(self) -> bool:
        """Whether it asks `evaluate` before it decides."""
        return self._fixed_point is None

    @property
    def needs_live_model(self) -> bool:
        """Whether it asks `evaluate`, or other processes, before it decides."""
        return self.needs_evaluation or self.shares_trials

    def recordings(self) -> Mapping[str, Tensor] | None:
        """What a recorder has of the gradients now; None: such a scheme needs none."""
        return None

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
            Exception: whatever `compute` raises.
        """
        if self._group is None:
            compute()
        else:
            Trials(never_called, group=self._group).run_on_all_ranks(lambda: compute() if self.is_writer else None)

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Go on from a checkpoint: search near what was chosen there.

        Args:
            loss: of its manifest; one of another scheme, one where nothing met the threshold, or none, makes the next
                search a whole one.
            lossy_restores: lossy restores behind the weights from now on; after one, they lie on a quantizer's levels.
        """
        record = loss if isinstance(loss, dict) else {}
        chosen = record.get("chosen")
        is_valid = record.get("scheme") == self.id and not {"fallback", "space"} & record.keys()
        self._last_choice = self.space.point(chosen) if isinstance(chosen, dict) and is_valid else None
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

        Returns:
            A plan that loses nothing, with a warning, if `evaluate` failed or cannot be believed.
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
        if stats.global_names:
            self._agree(tensors)
            evaluator = TrialEvaluator(state, self._evaluate or never_called) if evaluator is None else evaluator
            choice = self._choose(state, selection, reference, evaluator, tensors)
        elif has_weights and (last := self._fixed_point or self._last_choice) is not None:  # nothing has moved
            degradation = {"degradation": 0.0} if self.needs_evaluation else {}
            settings = self.space.settings(last)
            choice = _Choice(record={"chosen": settings, "measured": self.needs_evaluation, **degradation})
        record = {
            "scheme": self.id,
            "threshold": self._threshold,
            "optimizer": self._optimizer,
            **choice.record,
            "left_out": list(selection.nonfinite),
            "seconds": round(time.perf_counter() - start, 3),
        }
        _log.debug("%s decides: %s", self.id, record)
        selection.warn_nonfinite()
        optimizer: optimizer_modes.Mode = "exact" if choice.lossless else self._optimizer
        quantized: dict[str, QuantizedTensor] = {**unchanged}
        quantized |= {name: tensor.cpu() for name, tensor in choice.quantized.items()}
        if optimizer == "lossy" and global_tensors is not None:  # levels are of all ranks: now, while these take part
            quantized |= optimizer_modes.quantize_moments(state, stats)
            optimizer = "exact"
        # a single rank cannot tell why a shard stays exact
        min_size = (MIN_WEIGHT_NUMEL, 2) if tensors.is_complete else None
        return QuantizationPlan(
            self.id, quantized, selection.cast_sources, optimizer, self.coders, record, min_size=min_size
        )

    def _choose(
        self,
        state: FlatState,
        selection: TensorSelection,
        reference: Reference | None,
        evaluator: TrialEvaluator,
        tensors: GlobalTensors,
    ) -> _Choice:
        if self._fixed_point is not None:
            stats = GlobalStats(tensors, selection.global_names)
            previous = self._previous_codes(reference, selection, stats)
            candidates = self.candidates(selection.tensors, previous, evaluator, stats)
            self._unmeasured_notice.warn_once(self, quiet=self._is_quiet or not self.is_writer)
            record: dict[str, Any] = {"chosen": self.space.settings(self._fixed_point), "measured": False}
            return _Choice(candidates.quantize(self._fixed_point), record)
        with evaluator, Task(f"{self.id}: measuring the loss") as task:
            metric = DegradationMetric(evaluator.evaluate, higher_is_better=self._higher_is_better, task=task)

            def evaluation(name: str, space: Space, candidates: CandidateSet) -> _SpaceEvaluation:
                return _SpaceEvaluation(name, space, candidates, metric, selection, state, self._group, stats)

            problem = self._check_evaluate(metric, evaluator, selection, state, tensors)
            record = {
                "measured": True,
                "quality": finite_or_text(metric.baseline.value),
                "noise": self._calibration.noise,
                "unmeasured": self._calibration.recorded,
                "searches": [],
            }
            if problem is not None:
                return _lossless_choice(problem, record)
            selection = self._calibration.measured_part(selection, tensors)
            stats = GlobalStats(tensors, selection.global_names)
            if not stats.global_names:
                return _Choice(record=record | {"chosen": None}, lossless=True)
            previous = self._previous_codes(reference, selection, stats)
            own = evaluation(self.id, self.space, self.candidates(selection.tensors, previous, evaluator, stats))
            if warning := self._calibration.noise_warning(self._threshold):
                warn_user(warning)
            max_degradation = max(self._threshold - (self._calibration.noise or 0.0), 0.0)
            variants = self.variants(evaluator, stats)
            results = [*self._search_results(own, max_degradation, variants, task)]
            record["searches"] = [result.to_json(own.space) for result in results]
            if problem := find_failure(metric, own.trials.run_on_all_ranks):
                return _lossless_choice(problem, record)
            chosen = results[-1].chosen
            if chosen is not None:
                self._last_choice = chosen.point
                return self._warn_interval(own.choice(chosen, record))
            alternative = self.alternative(selection.tensors, previous, stats)
            if alternative is not None:
                other = evaluation(*alternative)
                result = other.full_search(max_degradation, self._progress_callback(other, max_degradation, task))
                record["searches"].append(result.to_json(other.space) | {"space": other.name})
                if problem := find_failure(metric, own.trials.run_on_all_ranks):
                    return _lossless_choice(problem, record)
                if result.chosen is not None:
                    return self._warn_interval(other.choice(result.chosen, record | {"space": other.name}))
            return self._apply_fallback(own, results, record, self.space.safest(variants[0]))

    def _check_evaluate(
        self,
        metric: DegradationMetric,
        evaluator: TrialEvaluator,
        selection: TensorSelection,
        state: FlatState,
        tensors: GlobalTensors,
    ) -> EvaluateProblem | None:
        """Why nothing may be lost, if anything; finds out at which weights `evaluate` looks. A collective."""
        compute_on_all = Trials(never_called, group=self._group).run_on_all_ranks
        if self._calibration.needs_test(selection.global_names):
            evaluator.reads = ReadRecorder()
        perturbations = make_perturbations(selection, state, tensors.global_name)
        problem = self._calibration.find_problem(metric, perturbations, lambda scale: self._threshold, compute_on_all)
        return problem or self._calibration.test_entries(metric, evaluator, selection, state, tensors, compute_on_all)

    def _warn_interval(self, choice: _Choice) -> _Choice:
        """The same; warns once in a run if other examples may have a larger degradation than is allowed."""
        if choice.interval is not None:
            rise = choice.record["degradation"]
            if warning := self._calibration.interval_warning(rise, choice.interval, self._threshold):
                warn_user(warning)
        return choice

    def _apply_fallback(
        self, own: _SpaceEvaluation, results: Sequence[SearchResult], record: dict[str, Any], safest: Point
    ) -> _Choice:
        """Nothing met the threshold. The fallback does not count as a choice: the next search does not begin there."""
        worst = next((t.degradation for result in results for t in result.trials if t.point == safest), math.nan)
        lossless = self._fallback == "lossless" or not math.isfinite(worst)
        text = f"no setting keeps the degradation within {self._threshold:.2%} (the safest: {worst:.2%})"
        warn_user(f"{text}: {'nothing was lost instead' if lossless else 'the safest one was taken'}. Allow more")
        record["fallback"] = "lossless" if lossless else "safest"
        if lossless:
            return _Choice(record=record | {"exact": text}, lossless=True)
        record |= {"chosen": self.space.settings(safest), "degradation": worst}
        return _Choice(own.candidates.quantize(safest), record)

    def _search_results(
        self, own: _SpaceEvaluation, max_degradation: float, variants: Sequence[str], task: Task
    ) -> Iterator[SearchResult]:
        """The searches that are needed; the last one decides."""
        progress = self._progress_callback(own, max_degradation, task)
        sizes, trials, last = own.candidates.size, own.trials, self._last_choice
        if last is not None and last.variant in variants:
            options: dict[str, Any] = {"variants": variants, "coarser": self._coarser, "progress": progress}
            result = neighbourhood(self.space, sizes, trials, max_degradation, last, **options)
            yield result
            if result.chosen is not None:
                return
        yield self._full_search(sizes, trials, max_degradation, variants, progress)

    def _full_search(
        self,
        sizes: Callable[[Point], float],
        trials: Trials,
        max_degradation: float,
        variants: Sequence[str],
        progress: Progress | None,
    ) -> SearchResult:
        """Search the whole space, but for what is more aggressive than the last choice, under whichever variant."""
        last = self._last_choice

        def size(point: Point) -> float:
            if last is not None and not self._coarser and is_dominated(Point(last.variant, point.index), last):
                return math.inf
            return sizes(point)

        return branch_and_bound(self.space, size, trials, max_degradation, variants=variants, progress=progress)

    def _progress_callback(self, evaluation: _SpaceEvaluation, max_degradation: float, task: Task) -> Progress:
        show: Progress | None = None
        if not isinstance(self._progress, bool):
            show = self._progress
        elif self._progress and self.is_writer and not self._is_quiet:
            show = progress_printer(evaluation.space, max_degradation, evaluation.nbytes)

        def report(trial: Trial, best: Trial | None, remaining: int) -> None:
            task.expect(remaining)
            if show is not None:
                show(trial, best, remaining)

        return report

    def _agree(self, tensors: GlobalTensors) -> None:
        """Forget what ranks remember differently: replicas take what their first rank has; a collective."""
        self._calibration.set_state(self._value_of_leader(self._calibration.state))
        self._last_choice = tensors.value_if_equal(self._last_choice)
        self._calibration.forget_differences(tensors)
        self._lossy_restores = tensors.value_if_equal(self._lossy_restores) or 0

    def _value_of_leader(self, value: T) -> T:
        """The value that the first of the replicas has; without replicas, the value itself."""
        if self._group is None:
            return value
        objects = [value]
        torch.distributed.broadcast_object_list(objects, group=self._group, group_src=0)
        return objects[0]

    def _previous_codes(
        self, reference: Reference | None, selection: TensorSelection, stats: GlobalStats
    ) -> PreviousCodes:
        """What all ranks know of the codes of the previous checkpoint; a collective."""
        codebooks = {} if reference is None else reference.codebook_tensors
        previous = PreviousCodes.from_codebooks(codebooks, selection.tensors, self._lossy_restores)
        previous = self._value_of_leader(previous)
        lossy_restores = stats.global_tensors.value_if_equal(previous.lossy_restores) or 0
        return replace(common_previous_codes(previous, selection.tensors, stats), lossy_restores=lossy_restores)


@dataclass(frozen=True)
class _Choice:
    quantized: Mapping[str, CodebookTensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    lossless: bool = False
    interval: tuple[float, float] | None = None


def _lossless_choice(problem: EvaluateProblem, record: dict[str, Any]) -> _Choice:
    """Nothing is lost, since `evaluate` failed or cannot be believed; warns."""
    warn_user(f"{problem.observation}, so this checkpoint is lossless, weights and moments: {problem.advice}")
    return _Choice(record=record | {"exact": problem.observation, "fallback": "lossless"}, lossless=True)


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
        metric: DegradationMetric,
        selection: TensorSelection,
        state: FlatState,
        group: Any,
        stats: GlobalStats,
    ) -> None:
        self.name, self.space, self.candidates = name, space, CachedCandidates(candidates)
        self.nbytes = sum(x.numel() * x.element_size() for x in selection.tensors.values())
        self._metric, self._selection, self._state = metric, selection, state
        self._intervals: dict[Point, tuple[float, float]] = {}
        self.trials = Trials(self._degradation_at, group=group, sum_over_shards=stats.global_tensors.sum_over_ranks)

    def full_search(self, max_degradation: float, progress: Progress | None) -> SearchResult:
        return branch_and_bound(self.space, self.candidates.size, self.trials, max_degradation, progress=progress)

    def choice(self, trial: Trial, record: dict[str, Any]) -> _Choice:
        """The weights as a trial has them, and what a manifest records of it."""
        record |= {"chosen": self.space.settings(trial.point), "degradation": trial.degradation}
        intervals = self.trials.run_on_all_ranks(lambda: self._intervals.get(trial.point))
        interval = next(filter(None, intervals), None)  # of the rank that measured it
        if interval is not None:
            record["interval"] = [finite_or_text(end) for end in interval]
        return _Choice(self.candidates.quantize(trial.point), record, interval=interval)

    def _degradation_at(self, point: Point) -> float:
        if self._metric.failure is not None:
            return math.nan
        codebooks = self.candidates.quantize(point)
        values = {name: codes.dequantize(self._selection.tensors[name].dtype) for name, codes in codebooks.items()}
        change, scale = self._metric.degradation(self._selection.with_casts(values, self._state)), self._metric.scale
        if change.interval is not None:
            self._intervals[point] = change.interval[0] / scale, change.interval[1] / scale
        return change.rise / scale
