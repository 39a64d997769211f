"""Base class of the schemes that search the smallest setting whose measured degradation stays within a threshold."""

from __future__ import annotations

import contextlib
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TextIO, TypeVar, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.errors import PolicyError, warn_user
from shrinkpoint.progress import Task
from shrinkpoint.schemes.base import finite_or_text
from shrinkpoint.schemes.calibration import Calibration, EvaluateProblem, find_failure
from shrinkpoint.schemes.evaluate import DegradationMetric, Evaluate, TrialEvaluator, never_called
from shrinkpoint.schemes.plan import OptimizerMode, QuantizationPlan, check_optimizer_mode, quantize_moments
from shrinkpoint.schemes.planner import Measurement, PlannedSave, Planner
from shrinkpoint.schemes.search.candidates import CachedCandidates, CandidateSet, PreviousCodes, common_previous_codes
from shrinkpoint.schemes.search.space import METRIC, Point, Space, is_dominated
from shrinkpoint.schemes.search.strategies import branch_and_bound, neighbourhood
from shrinkpoint.schemes.search.trials import Progress, SearchResult, Trial, Trials
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.tensors.info import JSON


def progress_printer(space: Space, threshold: float, raw_bytes: int, stream: TextIO | None = None) -> Progress:
    """Make a callback that writes one line per trial; on a terminal, one line that changes, if rich is installed.

    Errors of the stream are ignored: a closed terminal must not end a training run.

    Args:
        threshold: of the search.
        raw_bytes: the uncompressed size, for ratios.
        stream: None: the current stderr.
    """
    printer = _LinePrinter(space, threshold, raw_bytes, sys.stderr if stream is None else stream)
    return (_live_printer(printer) if printer.stream.isatty() else None) or printer


@dataclass(frozen=True)
class _LinePrinter:
    """Writes one line per trial."""

    space: Space
    threshold: float
    raw_bytes: int
    stream: TextIO

    def __call__(self, trial: Trial, best: Trial | None, remaining: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a closed file, or a character it cannot write
            self.stream.write(self.line(trial, best, remaining) + "\n")
            self.stream.flush()

    def line(self, trial: Trial, best: Trial | None, remaining: int) -> str:
        settings = " · ".join(
            str(value) if name == METRIC else f"{name} {value:g}"
            for name, value in self.space.settings(trial.point).items()
        )
        parts = [settings, self._ratio(trial), self.verdict(trial)]
        parts.append(f"best {self._ratio(best)}" if best else "none yet" if remaining else "none")
        parts.append(f"~{remaining} left" if remaining else "done")
        return "   ".join(parts)

    def verdict(self, trial: Trial) -> str:
        limit = f"{100 * self.threshold:g}%"
        if trial.degradation != trial.degradation:
            return f"not a number, {limit} allowed  no"
        degradation = f"{100 * trial.degradation:+.2f}%"
        return f"{degradation} <= {limit}  ok" if trial.meets(self.threshold) else f"{degradation} > {limit}  no"

    def _ratio(self, trial: Trial) -> str:
        return f"{self.raw_bytes / trial.size:.1f}x" if trial.size > 0 else "-"


def _live_printer(printer: _LinePrinter) -> Progress | None:
    """Make a callback that rewrites one line of a terminal; None if rich is missing or the terminal cannot do it."""
    try:
        from rich.console import Console
        from rich.control import Control
        from rich.segment import ControlType
        from rich.text import Text
    except ImportError:
        return None
    console = Console(file=printer.stream, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

    def draw(trial: Trial, best: Trial | None, remaining: int) -> None:
        text = Text(printer.line(trial, best, remaining))
        text.highlight_words([printer.verdict(trial)], "green" if trial.meets(printer.threshold) else "red")
        with contextlib.suppress(OSError, ValueError):
            console.control(erase)
            console.print(text, end="" if remaining else "\n", no_wrap=True, overflow="ellipsis")

    return draw


Fallback = Literal["safest", "lossless"]
T = TypeVar("T")


class SearchScheme(Planner["SearchChoice"]):
    """Base class of schemes with a search (arXiv 2306.11800, configuration search; its authors gave their
    baselines the same one).

    The first time, the whole space is searched; then, only the neighbourhood of what was chosen last, and the whole
    space again where no neighbour holds. It remembers what it chose in a run; of each further run, a copy does.

    Args:
        threshold: how much worse `evaluate` may become, relative to the state before: "1%", or 0.01; at most "100%".
        evaluate: called with what is being saved (a manager's `model`; else the state) with a candidate's values in it;
            returns a loss or a score, or a 1-D tensor, a 1-D numpy array or a list of each example's, which tells how
            far it can be trusted. It must look at what it is given, and give the same answer for the same weights: fix
            its batches and its seed, and call `model.eval()`. Whatever it changes in the model is put back.
        higher_is_better: `evaluate` returns a score (accuracy) and no loss.
        config: a setting, by name of the knobs; then nothing is searched and `evaluate` is not needed.
        optimizer: "exact" keeps the optimizer's moments bit for bit; "reset" and "lossy" do not (see `moments`).
        fallback: where no setting meets the threshold: "lossless" loses nothing, "safest" takes the safest one all the
            same. If `evaluate` gives no number for that one either, nothing is lost in any case.
        coarser: True if a later checkpoint may be quantized more aggressively than the one before.
        group: a torch.distributed group of data-parallel replicas, all of which save at the same time and share the
            trials; the first of them writes.
        progress: True shows a line a trial on stderr; a callable gets every trial (`search.Progress`).
        seed: of the random starts.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    min_weight_size: ClassVar[tuple[int, int]] = MIN_WEIGHT_NUMEL, 2
    space: Space

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
    ) -> None:
        super().__init__(evaluate, higher_is_better=higher_is_better, seed=seed)
        self._threshold = validate.check_fraction("threshold", threshold, allow_zero=True)
        self._fixed_point = None if config is None else self.space.point_from_config(config)
        self._optimizer = check_optimizer_mode(optimizer)
        self._fallback: Fallback = validate.check_choice("fallback", fallback, get_args(Fallback))
        if isinstance(group, str | int | float | type):
            do = "pass what torch.distributed.new_group returned"
            raise validate.argument_error("group", group, "a torch.distributed group", do)
        if not (isinstance(progress, bool) or callable(progress)):
            expected = "True, False or a function of a trial"
            raise validate.argument_error("progress", progress, expected, "pass one of them")
        self._coarser, self._group = validate.check_bool("coarser", coarser), group
        self._progress: bool | Progress = progress
        self._last_choice: Point | None = None
        self._is_quiet = False
        if evaluate is None and config is None:
            expected, do = "evaluate= or config=", "pass a function that measures the model, or a setting"
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
        self, weights: Mapping[str, Tensor], previous: PreviousCodes, evaluator: TrialEvaluator, stats: GlobalStats
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
        """Variants of the search space that can be tried now."""
        return self.space.variants

    def alternative(
        self, weights: Mapping[str, Tensor], previous: PreviousCodes, stats: GlobalStats
    ) -> tuple[str, Space, CandidateSet] | None:
        """Another space for these weights, with its name; it is searched if no point of the first one holds."""
        return None

    # phases of planning

    @contextmanager
    def measure(self, save: PlannedSave) -> Iterator[Measurement]:
        self._is_quiet = save.tensors.collectives.rank > 0
        if not save.is_idle:  # only what has moved is searched, and needs agreement
            # Forget what ranks remember differently: replicas take what their first rank has; a collective
            self._calibration.set_state(self._value_of_leader(self._calibration.state))
            self._last_choice = save.tensors.collectives.value_if_equal(self._last_choice)
            self._calibration.forget_differences(save.tensors)
            self._lossy_restores = save.tensors.collectives.value_if_equal(self._lossy_restores) or 0
        save.evaluator = save.evaluator or TrialEvaluator(save.state, self._evaluate or never_called)
        with super().measure(save) as measurement:
            yield measurement

    def choose(self, save: PlannedSave, measurement: Measurement) -> SearchChoice:
        """Searches a setting, unless one is fixed, and quantizes the weights with it."""
        if save.is_idle:
            last = self._fixed_point or self._last_choice
            if not save.selected or last is None:
                return SearchChoice()
            degradation = {"degradation": 0.0} if self.needs_evaluation else {}
            settings = self.space.settings(last)
            return SearchChoice(record={"chosen": settings, "measured": self.needs_evaluation, **degradation})
        if self._fixed_point is not None:
            assert save.evaluator is not None
            weights, stats = save.selection.tensors, GlobalStats(save.tensors, save.selection.global_names)
            candidates = self.candidates(weights, self._previous_codes(save, stats), save.evaluator, stats)
            self._unmeasured_notice.warn_once(self, quiet=self._is_quiet or not self.is_writer)
            settings = self.space.settings(self._fixed_point)
            return SearchChoice(candidates.quantize(self._fixed_point), {"chosen": settings, "measured": False})
        assert measurement.metric is not None
        record: dict[str, Any] = {
            "measured": True,
            "quality": finite_or_text(measurement.metric.baseline.value),
            "noise": self._calibration.noise,
            "unmeasured": self._calibration.recorded,
            "searches": [],
        }
        if measurement.problem is not None:
            return _lossless_choice(measurement.problem, record)
        save.selection = self._calibration.measured_part(save.selection, save.tensors)
        if not save.selection.global_names:
            return SearchChoice(record=record | {"chosen": None}, lossless=True)
        choice = self._search(save, measurement, record)
        # Other examples may have a larger degradation than is allowed: said once in a run.
        if choice.interval is not None and (
            warning := self._calibration.interval_warning(record["degradation"], choice.interval, self._threshold)
        ):
            warn_user(warning)
        return choice

    def record(self, save: PlannedSave, measurement: Measurement, choice: SearchChoice) -> QuantizationPlan:
        record = {
            "scheme": self.id,
            "threshold": self._threshold,
            "optimizer": self._optimizer,
            **choice.record,
            "left_out": list(save.selection.nonfinite),
            "seconds": save.seconds,
        }
        optimizer: OptimizerMode = "exact" if choice.lossless else self._optimizer
        quantized = save.unchanged | {name: tensor.cpu() for name, tensor in choice.quantized.items()}
        if optimizer == "lossy" and save.is_shared:  # levels are of all ranks: now, while these take part
            stats = GlobalStats(save.tensors, save.selection.global_names)
            quantized |= quantize_moments(save.state, stats)
            optimizer = "exact"
        casts, min_size = save.selection.cast_sources, self.min_size(save.tensors)
        return QuantizationPlan(self.id, quantized, casts, optimizer, self.coders, record, min_size=min_size)

    # settings of `measure`

    @property
    def measures_next(self) -> bool:
        return self._fixed_point is None

    @property
    def max_rise(self) -> Callable[[float], float]:
        return lambda scale: self._threshold

    def compute_on_all(self, compute: Callable[[], Any]) -> list[Any]:
        return Trials(never_called, group=self._group).run_on_all_ranks(compute)

    # called by a manager or a store

    @property
    def needs_evaluation(self) -> bool:
        return self._fixed_point is None

    @property
    def needs_live_model(self) -> bool:
        return self.needs_evaluation or self.shares_trials

    @property
    def shares_trials(self) -> bool:
        return self._group is not None

    @property
    def is_writer(self) -> bool:
        return self._group is None or torch.distributed.get_rank(self._group) == 0

    def run_on_writer(self, compute: Callable[[], None]) -> None:
        if self._group is None:
            compute()
        else:
            self.compute_on_all(lambda: compute() if self.is_writer else None)

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Goes on from a checkpoint: the next search begins near what was chosen there.

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

    # steps of `choose`

    def _search(self, save: PlannedSave, measurement: Measurement, record: dict[str, Any]) -> SearchChoice:
        """Searches the scheme's own space, then the alternative one, then falls back.

        Args:
            record: for the manifest; what is found is added.
        """
        metric, task, evaluator = measurement.metric, measurement.task, save.evaluator
        assert metric is not None and task is not None and evaluator is not None
        stats = GlobalStats(save.tensors, save.selection.global_names)
        previous = self._previous_codes(save, stats)
        candidates = self.candidates(save.selection.tensors, previous, evaluator, stats)
        own = _SpaceEvaluation(self.id, self.space, candidates, metric, save, self._group)
        if warning := self._calibration.noise_warning(self._threshold):
            warn_user(warning)
        max_degradation = max(self._threshold - (self._calibration.noise or 0.0), 0.0)
        variants = self.variants(evaluator, stats)
        results = [*self._search_results(own, max_degradation, variants, task)]
        record["searches"] = [result.to_json(own.space) for result in results]
        if problem := _find_problem(measurement, own.trials):
            return _lossless_choice(problem, record)
        if (chosen := results[-1].chosen) is not None:
            self._last_choice = chosen.point
            return own.choice(chosen, record)
        alternative = self.alternative(save.selection.tensors, previous, stats)
        if alternative is not None:
            other = _SpaceEvaluation(*alternative, metric, save, self._group)
            progress = self._progress_callback(other, max_degradation, task)
            result = branch_and_bound(
                other.space, other.candidates.size, other.trials, max_degradation, progress=progress
            )
            record["searches"].append(result.to_json(other.space) | {"space": other.name})
            if problem := _find_problem(measurement, own.trials):
                return _lossless_choice(problem, record)
            if result.chosen is not None:
                record["space"] = other.name
                return other.choice(result.chosen, record)
        return self._apply_fallback(own, results, record, self.space.safest(variants[0]))

    def _apply_fallback(
        self, own: _SpaceEvaluation, results: Sequence[SearchResult], record: dict[str, Any], safest: Point
    ) -> SearchChoice:
        """Nothing met the threshold. The fallback does not count as a choice: the next search does not begin there."""
        worst = next((t.degradation for result in results for t in result.trials if t.point == safest), math.nan)
        lossless = self._fallback == "lossless" or not math.isfinite(worst)
        text = f"no setting keeps the rise within {self._threshold:.2%} (the safest: {worst:.2%})"
        outcome = "this checkpoint is exact" if lossless else "the safest one is used"
        warn_user(f"{text}: {outcome}. Raise the threshold")
        record["fallback"] = "lossless" if lossless else "safest"
        if lossless:
            return SearchChoice(record=record | {"exact": text}, lossless=True)
        record |= {"chosen": self.space.settings(safest), "degradation": worst}
        return SearchChoice(own.candidates.quantize(safest), record)

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

    def _value_of_leader(self, value: T) -> T:
        """The value that the first of the replicas has; without replicas, the value itself."""
        if self._group is None:
            return value
        objects = [value]
        torch.distributed.broadcast_object_list(objects, group=self._group, group_src=0)
        return objects[0]

    def _previous_codes(self, save: PlannedSave, stats: GlobalStats) -> PreviousCodes:
        """Codes of the previous checkpoint, equal on all ranks; a collective."""
        codebooks = {} if save.reference is None else save.reference.codebook_tensors
        previous = PreviousCodes.from_codebooks(codebooks, save.selection.tensors, self._lossy_restores)
        previous = self._value_of_leader(previous)
        lossy_restores = save.tensors.collectives.value_if_equal(previous.lossy_restores) or 0
        return replace(common_previous_codes(previous, save.selection.tensors, stats), lossy_restores=lossy_restores)


@dataclass(frozen=True)
class SearchChoice:
    """Choice for one state."""

    quantized: Mapping[str, CodebookTensor] = field(default_factory=dict)  # the weights, by local name
    record: dict[str, Any] = field(default_factory=dict)  # for the manifest
    lossless: bool = False  # the moments stay exact, too
    interval: tuple[float, float] | None = None  # the confidence interval of the degradation; None if unknown


def _find_problem(measurement: Measurement, trials: Trials) -> EvaluateProblem | None:
    """Return the problem of `evaluate` that the trials of all replicas show; None if it can be trusted."""
    assert measurement.metric is not None
    failure = find_failure(measurement.metric, trials.run_on_all_ranks)
    return failure or next(filter(None, trials.run_on_all_ranks(measurement.find_inversion)), None)


def _lossless_choice(problem: EvaluateProblem, record: dict[str, Any]) -> SearchChoice:
    """Nothing is lost, since `evaluate` failed or cannot be believed; warns."""
    warn_user(f"{problem.observation}, so this checkpoint is exact, weights and moments: {problem.advice}")
    return SearchChoice(record=record | {"exact": problem.observation, "fallback": "lossless"}, lossless=True)


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
        save: PlannedSave,
        group: Any,
    ) -> None:
        self.name, self.space, self.candidates = name, space, CachedCandidates(candidates)
        self._metric, self._selection, self._state = metric, save.selection, save.state
        self.nbytes = sum(x.numel() * x.element_size() for x in self._selection.tensors.values())
        self._intervals: dict[Point, tuple[float, float]] = {}
        self.trials = Trials(self._degradation_at, group=group, sum_over_shards=save.tensors.collectives.sum_over_ranks)

    def choice(self, trial: Trial, record: dict[str, Any]) -> SearchChoice:
        """The weights as a trial has them, and what a manifest records of it."""
        record |= {"chosen": self.space.settings(trial.point), "degradation": trial.degradation}
        intervals = self.trials.run_on_all_ranks(lambda: self._intervals.get(trial.point))
        interval = next(filter(None, intervals), None)  # of the rank that measured it
        if interval is not None:
            record["interval"] = [finite_or_text(end) for end in interval]
        return SearchChoice(self.candidates.quantize(trial.point), record, interval=interval)

    def _degradation_at(self, point: Point) -> float:
        if self._metric.failure is not None:
            return math.nan
        codebooks = self.candidates.quantize(point)
        values = {name: codes.dequantize(self._selection.tensors[name].dtype) for name, codes in codebooks.items()}
        change, scale = self._metric.degradation(self._selection.with_casts(values, self._state)), self._metric.scale
        if change.interval is not None:
            self._intervals[point] = change.interval[0] / scale, change.interval[1] / scale
        return change.rise / scale
