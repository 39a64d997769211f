"""The scheme "fisher": a budget of loss, or of bits, spent where the loss is least sensitive."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor

from shrinkpoint import humanize, validate
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, QuantizedTensor, Reference, RowSample
from shrinkpoint.errors import PolicyError, warn_user
from shrinkpoint.progress import Task
from shrinkpoint.schemes.base import QuantizedState, SpecMixin, check_recorder, check_seed, finite_or_text
from shrinkpoint.schemes.calibration import (
    Calibration,
    EvaluateProblem,
    UnmeasuredLossNotice,
    find_failure,
    make_perturbations,
)
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.evaluate import DegradationMetric, Evaluate, ReadRecorder, TrialEvaluator, scale_of
from shrinkpoint.schemes.fisher.activations import Activations, Calibrate, LayerStatistics, check_activations
from shrinkpoint.schemes.fisher.curvature import Curvature, SquaredGradientSource, estimate_curvatures
from shrinkpoint.schemes.fisher.feedback import FeedbackFactors, find_layers, layer_curvatures
from shrinkpoint.schemes.fisher.global_weights import GlobalWeights, total_entropy_bits
from shrinkpoint.schemes.fisher.measure import measure_with
from shrinkpoint.schemes.fisher.moment_lattices import MIN_LATTICE_NUMEL, MomentPrecision, moments_to_lattices
from shrinkpoint.schemes.fisher.moment_statistics import MomentStatistics
from shrinkpoint.schemes.fisher.objective import (
    MAX_TRIALS,
    LossBudget,
    Objective,
    RatioTarget,
    StateBits,
    StepChoice,
    make_objective,
)
from shrinkpoint.schemes.fisher.probe import MeasureLossIncrease, curvatures_from_probe, probe
from shrinkpoint.schemes.fisher.rounding import MAX_HYSTERESIS
from shrinkpoint.schemes.fisher.run_memory import UNKNOWN_ERROR, HeldRatios, RunMemory
from shrinkpoint.schemes.fisher.selection import select_weights
from shrinkpoint.schemes.fisher.steps import StepCandidates, from_log_step, reference_curvature
from shrinkpoint.schemes.optimizer_modes import Mode
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.schemes.select import TensorSelection, unchanged_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, Role

_log = logging.getLogger("shrinkpoint")
T = TypeVar("T")
MomentsMode = Literal["coded", "exact", "drop"]
MOMENT_ROLES = (Role.MOMENT1, Role.MOMENT2)


class Fisher(SpecMixin, RecordEncodingMixin):
    """Quantizes to the fewest bits for a given rise of the loss, or to the least rise for a given number of bits.

    Weights are rounded to a uniform grid whose steps follow, by row and by column, what the optimizer knows of the
    loss: Adam's second moment is, up to a factor, its curvature. Codes are coded given the parent checkpoint's points.
    After a restore, dither preserves what training has done since. Moments have grids of their own. docs/fisher.md.

    One instance serves one training run: it remembers its steps and what it has learned.

    Args:
        budget: by how much a checkpoint may raise the loss that `evaluate` measures, in per cent of it: "1%"; at most
            "100%". "0.1%" if there is an `evaluate` and none of the four targets is given.
        nats: the same in the loss's own unit; 0.001 if there is no `evaluate` and none of the four targets is given.
            Give at most one of them.
        ratio: how many times smaller the whole state shall be; above 1.
        relative_error: the root mean square of the error in standard deviations of a tensor (.3, or "30%"; at most 2),
            in the geometric mean over all weights of a keyframe; hysteresis may add a half. Nothing need be known of
            the loss; what is known distributes the error.
        evaluate: called with what is being saved (a manager's `model`; else the state); returns a loss or a score, or a
            1-D tensor with that of each example. Then the measured rise decides, and the prediction saves trials. It
            must measure what it is given, and return the same for the same weights. Its attribute `terms`, if it has
            one, is taken where `terms=` is not given, and `description` is recorded, as `RecentBatches` has them.
        evaluate_every: 1: the loss is measured at every save. n: at every n-th; None: at a run's first alone. At the
            others the prediction decides, which measured rises have calibrated.
        higher_is_better: `evaluate` returns a score, to which `budget` and `nats` refer.
        terms: how many loss terms (tokens, images) a batch averages: with it the predicted rise is in nats, and
            decides if there is no `evaluate`. None: what a framework's trainer counts, or `evaluate` knows. Without
            all of these, steps are one standard deviation.
        gradients: a recorder of squared gradients, for optimizers that keep none.
        moments: of the optimizer: "coded" on grids, "exact" bit for bit, or "drop": zero after a restore.
        seed: of the dither.
        activations: a recorder of what layers see. In a file alone (`sp.save` without `base`) weights are then rounded
            with error feedback: the errors of a row cancel in the outputs of its layer. Never in a chain, where it
            would cost more than it gains.
        calibrate: the same without a recorder: called with what is being saved when a file alone is written, it loads
            that into a model and runs it on some batches; if it returns or yields losses, these are differentiated, and
            tell how much each output matters.

    Raises:
        PolicyError: an invalid argument, or more than one target.
    """

    id: ClassVar[str] = "fisher"

    def __init__(
        self,
        *,
        budget: str | None = None,
        nats: float | None = None,
        ratio: float | None = None,
        relative_error: float | str | None = None,
        evaluate: Evaluate | None = None,
        evaluate_every: int | None = 1,
        higher_is_better: bool = False,
        terms: float | None = None,
        gradients: SquaredGradientSource | None = None,
        moments: MomentsMode = "coded",
        seed: int = 0,
        activations: Activations | None = None,
        calibrate: Calibrate | None = None,
    ) -> None:
        self._activations, self._calibrate = check_activations(activations, calibrate)
        self._layers: Mapping[str, LayerStatistics] = {}
        self._evaluate: Evaluate | None = validate.check_optional_callable("evaluate", evaluate)
        self._objective = make_objective(budget, nats, ratio, relative_error, is_measured=evaluate is not None)
        self._evaluate_every = validate.check_optional_int(
            "evaluate_every", evaluate_every, none_meaning="for once in a run"
        )
        self._measured_loss: float | None = None  # of the weights, when it was measured last
        self._unmeasured_saves = 0  # since then
        self._counted_terms: float | None = None
        self._higher_is_better = validate.check_bool("higher_is_better", higher_is_better)
        self._recorder: SquaredGradientSource | None = check_recorder("gradients", gradients, "square")
        self._moments: MomentsMode = validate.check_choice("moments", moments, get_args(MomentsMode))
        self._terms = None if terms is None else validate.check_float("terms", terms, do="leave it out")
        self._seed, self._lossy_restores, self._num_saves = check_seed(seed), 0, 0
        self._memory = RunMemory(num_terms=self._terms)
        self._lattice_starts: dict[str, RowSample] = {}
        self._group_curvatures: dict[str, float] = {}
        self._calibration, self._unmeasured_notice = Calibration(), UnmeasuredLossNotice()

    @property
    def arguments(self) -> dict[str, object]:
        objective = self._objective
        settings = objective.settings
        if isinstance(objective, LossBudget) and objective.share is None:
            settings = {"nats": objective.budget}
        return {
            **settings,
            "evaluate": self._evaluate,
            "evaluate_every": self._evaluate_every,
            "higher_is_better": self._higher_is_better,
            "terms": self._terms,
            "gradients": self._recorder,
            "moments": self._moments,
            "seed": self._seed,
            "activations": self._activations,
            "calibrate": self._calibrate,
        }

    # called by a manager

    @property
    def evaluate(self) -> Evaluate | None:
        """The function that measures the loss; None if none was given."""
        return self._evaluate

    @property
    def needs_evaluation(self) -> bool:
        """Whether planning calls `evaluate`."""
        return self._evaluate is not None

    @property
    def needs_live_model(self) -> bool:
        """Whether planning the next save calls `evaluate`."""
        if self._evaluate is None or self._measured_loss is None:
            return self._evaluate is not None
        return self._evaluate_every is not None and self._unmeasured_saves + 1 >= self._evaluate_every

    def note_terms(self, terms: float | None) -> None:
        """Take what a trainer has counted for the argument `terms`, where that was not given."""
        self._counted_terms = terms

    def recordings(self) -> Mapping[str, Tensor] | None:
        """The recorder's mean squared gradients by name in the model; None without a recorder.

        Raises:
            PolicyError: it records no squares.
        """
        if self._recorder is None:
            return None
        squares = self._recorder.square  # a copy, made by every access
        if not squares and self._recorder.ready:
            do = "make the recorder with squares=True"
            raise PolicyError("gradients", found="a recorder without squares", expected="one with squares", do=do)
        return squares

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one that writes."""
        return True

    def run_on_writer(self, compute: Callable[[], None]) -> None:
        """Call a function on the process that writes: this one."""
        compute()

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Continue from a checkpoint: with its steps and what was learned by then, and another dither."""
        self._lossy_restores = lossy_restores
        unmeasured = loss.get("unmeasured") if isinstance(loss, dict) else None
        names = [name for name in unmeasured if isinstance(name, str)] if isinstance(unmeasured, list) else []
        self._calibration = Calibration(names)
        self._memory, self._group_curvatures = RunMemory(num_terms=self._terms), {}
        self._measured_loss, self._unmeasured_saves = None, 0
        if not isinstance(loss, dict) or loss.get("scheme") != self.id:
            return
        self._memory, probed = RunMemory.from_json(loss, self._terms), loss.get("probed")
        if isinstance(probed, dict) and all(isinstance(x, float) and 0 < x < math.inf for x in probed.values()):
            self._group_curvatures = dict(probed)
        quality = loss.get("quality")
        is_known = self._memory.num_terms is not None and isinstance(unmeasured, list)
        if isinstance(quality, float) and math.isfinite(quality) and is_known:
            self._measured_loss = quality

    @torch.no_grad()
    def plan(
        self,
        state: FlatState,
        reference: Reference | None,
        evaluator: TrialEvaluator | None = None,
        global_tensors: GlobalTensors | None = None,
    ) -> QuantizationPlan:
        """Decide for this state; a collective of all ranks that have shards of it.

        Args:
            reference: what a reader decoded of the parent checkpoint; None: nothing.
            evaluator: what to measure on; None: copies of the state.
            global_tensors: the tensors of all ranks; None: this process has all of every tensor.

        Returns:
            A plan that loses nothing, with a warning, if `evaluate` failed or cannot be believed.
        """
        start = time.perf_counter()
        tensors = GlobalTensors.from_state(state) if global_tensors is None else global_tensors
        self._synchronize(tensors)
        selection, points = select_weights(state, reference, evaluator, tensors)
        base = reference if reference is not None and reference.is_base else None
        statistics = MomentStatistics(state)
        choice = StepChoice(None)
        is_idle = not selection.global_names
        measures = self.needs_live_model and not is_idle
        memory, group_curvatures = copy.deepcopy(self._memory), self._group_curvatures
        moments: dict[str, QuantizedTensor] = {}
        with self._evaluation(state, selection, evaluator, tensors, measures=measures) as (metric, problem):
            if problem is None:
                moments = self._quantize_moments(state, reference, statistics, tensors)
            if self._evaluate is not None:
                selection = self._calibration.measured_part(selection, tensors)
            if problem is None and selection.global_names:
                weights = GlobalWeights(tensors, selection.tensors, selection.global_names, selection.sums)
                others = points | moments
                choice = self._quantize_weights(weights, state, selection, base, evaluator, others, metric, statistics)
                if metric is not None and (problem := find_failure(metric)) is not None:
                    choice = StepChoice(None, choice.trials)
        if choice.left_out:
            left_out = humanize.names(choice.left_out)
            text = f"weights that no points of these steps reach are kept as they are: {left_out}"
            warn_user(f"{text}. See whether training has diverged")
        self._num_saves += 1
        if problem is not None:
            warn_user(f"{problem.observation}, so this checkpoint is exact, weights and moments: {problem.advice}")
            self._memory, self._group_curvatures = memory, group_curvatures  # failed trials have taught nothing
            self._memory.log_step = None
            self._measured_loss = None  # the next save measures again
            record = self._loss_record(choice, selection, metric, start, is_idle=is_idle)
            record["exact"] = problem.observation
            casts: dict[str, str] = {}
            mode: Mode = "exact"
        else:
            points |= moments
            if choice.weights is not None:
                points = {**choice.weights.points, **points}
            if metric is not None:
                self._measured_loss, self._unmeasured_saves = metric.baseline.value, 0
            elif not is_idle:
                self._unmeasured_saves += 1
            record = self._loss_record(choice, selection, metric, start, is_idle=is_idle)
            record["chosen"] = self._chosen_json(any(tensors.sum_over_ranks(len(points))))
            if record["chosen"] is not None and self._evaluate is None:
                self._unmeasured_notice.warn_once(self, quiet=tensors.rank > 0)
            casts, mode = selection.cast_sources, "reset" if self._moments == "drop" else "exact"
        _log.debug("%s decides: %s", self.id, record)
        return QuantizationPlan(
            self.id,
            {name: _narrow(tensor) for name, tensor in points.items()},
            casts,
            mode,
            self.coders,
            record,
            sampled_rows={name: tensors.sampled_rows(name, MAX_SAMPLED_VALUES) for name in points},
            min_size=(MIN_LATTICE_NUMEL, 1) if tensors.is_complete else None,
        )

    def _loss_record(
        self,
        choice: StepChoice,
        selection: TensorSelection,
        metric: DegradationMetric | None,
        start: float,
        *,
        is_idle: bool,
    ) -> dict[str, Any]:
        """What a manifest records of the loss of information, but for "chosen".

        Args:
            is_idle: no weight has moved, so that there was nothing to measure.
        """
        is_idle = is_idle and self._evaluate is not None
        record: dict[str, Any] = {
            "scheme": self.id,
            **self._objective.settings,
            "optimizer": self._moments,
            "tried": choice.trials,
            **self._memory.to_json(),
            "probed": self._group_curvatures or None,
            "left_out": [*selection.nonfinite, *choice.left_out],
            "chosen": None,
            "rise": 0.0 if is_idle else finite_or_text(choice.rise),
            "measured": metric is not None or is_idle,
        }
        if metric is not None:
            record |= {"quality": finite_or_text(metric.baseline.value), "noise": self._calibration.noise}
            if isinstance(description := getattr(self._evaluate, "description", None), str) and description:
                record["measured_on"] = description
        elif self._measured_loss is not None:
            record["quality"] = self._measured_loss
        if self._evaluate is not None:
            record["unmeasured"] = self._calibration.recorded
        if choice.left_out:
            record["out_of_reach"] = [*choice.left_out]
        if choice.interval is not None:
            record["interval"] = [finite_or_text(end) for end in choice.interval]
        return record | {"seconds": round(time.perf_counter() - start, 3)}

    def _synchronize(self, tensors: GlobalTensors) -> None:
        """Forget what ranks remember differently, and count restores and saves by the highest count."""
        memory = self._memory
        self._lossy_restores = tensors.max_over_ranks(self._lossy_restores) or 0
        self._num_saves = tensors.max_over_ranks(self._num_saves) or 0
        memory.log_step = tensors.value_if_equal(memory.log_step)
        memory.max_hysteresis = tensors.value_if_equal(memory.max_hysteresis) or MAX_HYSTERESIS
        terms = getattr(self._evaluate, "terms", None) if self._counted_terms is None else self._counted_terms
        counted = tensors.max_over_ranks(round(terms) if isinstance(terms, int | float) and 1 <= terms < 1e18 else None)
        given = self._terms if counted is None or self._terms is not None else float(counted)
        learned = tensors.value_if_equal((memory.num_terms, memory.terms_error, memory.held))
        memory.num_terms, memory.terms_error, memory.held = learned or (None, UNKNOWN_ERROR, HeldRatios())
        memory.num_terms = memory.num_terms or given
        memory.begin_save()
        self._measured_loss = tensors.value_if_equal(self._measured_loss)
        self._unmeasured_saves = tensors.max_over_ranks(self._unmeasured_saves) or 0
        self._group_curvatures = tensors.value_if_equal(self._group_curvatures) or {}
        self._calibration.forget_differences(tensors)

    def _chosen_json(self, lossy: bool) -> JSON:
        """The entry "chosen" of a manifest; None if nothing was lost."""
        if not lossy and self._moments != "drop":
            return None
        log_step = self._memory.log_step
        step = None if log_step is None else round(from_log_step(log_step), 4)
        return {"step_in_deviations": step, "moments": self._moments}

    # called by a store

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Decide and quantize."""
        return self.plan(state, reference).quantize(state, reference)

    def quantize_alone(self, state: FlatState) -> QuantizedState:
        """Decide and quantize for a file that no checkpoint precedes or follows: with error feedback.

        Raises:
            PolicyError: `calibrate` raised or ran another model, or the recorder has seen none of the state's weights.
        """
        self._layers = find_layers(self._calibrate, self._activations, state)
        try:
            return self.quantize(state, None)
        finally:
            self._layers = {}

    def _quantize_moments(
        self, state: FlatState, reference: Reference | None, statistics: MomentStatistics, tensors: GlobalTensors
    ) -> dict[str, QuantizedTensor]:
        """Quantize the optimizer's moments, by name."""
        if self._moments != "coded":
            return {}
        updates = [info.step for info in state.optimizer_info.values() if info.step is not None]
        number = tensors.max_over_ranks(max(updates, default=None))
        if number is None:
            number = self._num_saves + (self._lossy_restores << 20)
        names = [name for name, info in state.infos.items() if info.role in MOMENT_ROLES]
        unchanged = {
            name: points
            for name, points in unchanged_tensors(names, state, reference, tensors).items()
            if isinstance(points, LatticeTensor)
        }
        moments = moments_to_lattices(
            tensors, state, number, self._seed, MomentPrecision(), statistics, unchanged=unchanged
        )
        return {**unchanged, **moments}

    def _quantize_weights(
        self,
        weights: GlobalWeights,
        state: FlatState,
        selection: TensorSelection,
        reference: Reference | None,
        evaluator: TrialEvaluator | None,
        other_points: Mapping[str, QuantizedTensor],
        metric: DegradationMetric | None,
        statistics: MomentStatistics,
    ) -> StepChoice:
        """Choose a step size for the weights.

        Args:
            reference: None also where it cannot be a base.
            other_points: of moments, and of weights that have not changed, by name.
            metric: None if nothing is measured.
            statistics: of the moments of `state`.
        """
        if reference is None:
            self._memory.log_step = None
        log_step = self._memory.log_step
        change = None if metric is None else lambda values: metric.degradation(selection.with_casts(values, state))
        layers = {name: layer for name, layer in self._layers.items() if name in weights.local}
        estimated = estimate_curvatures(
            weights,
            replace(state, optimizer_info=selection.optimizer_info_of_masters(state)),
            self._recorder_values(evaluator, selection),
            statistics,
        )
        rise = None if change is None else lambda values: change(values).rise
        curvatures = self._refine_curvatures(weights, estimated, layers, rise)
        layer_types = {} if evaluator is None else evaluator.layer_types
        candidates = StepCandidates(
            weights,
            curvatures,
            reference,
            log_step,
            self._lossy_restores,
            self._seed,
            layer_types,
            self._lattice_starts,
            FeedbackFactors(weights.local, layers),
        )
        codes = {
            name: points.codes for name, points in other_points.items() if not _is_inherited(name, points, reference)
        }
        coded = {*candidates.weights, *selection.cast_sources, *other_points}
        state_bits = self._count_state_bits(state, coded, codes, weights.tensors)
        objective = self._measured_objective(metric)
        measure = None if change is None else measure_with(change, candidates.weights)
        choice = objective.choose(candidates, self._memory, measure, state_bits)
        self._warn_of_choice(choice, candidates, objective, metric)
        self._memory.log_step = None if choice.weights is None else choice.weights.log_step
        self._lattice_starts = {} if choice.weights is None else candidates.lattice_starts(choice.weights)
        return choice

    def _refine_curvatures(
        self,
        weights: GlobalWeights,
        curvatures: Mapping[str, Curvature],
        layers: Mapping[str, LayerStatistics],
        rise: MeasureLossIncrease | None,
    ) -> Mapping[str, Curvature]:
        """Add to estimated curvatures what recorded layers tell, and measure them where nothing else tells anything."""
        if has_gradients := any(layer.outputs.total is not None for layer in layers.values()):
            curvatures = layer_curvatures(weights.local, curvatures, layers)
        if (rise is not None or self._group_curvatures) and reference_curvature(weights, curvatures) <= 0:
            curvatures = self._probe_curvatures(weights, rise) or curvatures
        if layers and not has_gradients:
            curvatures = layer_curvatures(weights.local, curvatures, layers)
        return curvatures

    def _warn_of_choice(
        self, choice: StepChoice, candidates: StepCandidates, objective: Objective, metric: DegradationMetric | None
    ) -> None:
        if metric is not None and metric.failure:
            return
        if choice.interval is not None and metric is not None and isinstance(objective, LossBudget):
            scale = metric.scale
            interval = choice.interval[0] / scale, choice.interval[1] / scale
            if warning := self._calibration.interval_warning(
                (choice.rise or 0.0) / scale, interval, objective.relative_budget(scale)
            ):
                warn_user(warning)
        if candidates.without_feedback:
            names = humanize.names(sorted(candidates.without_feedback))
            warn_user(f"rounded without error feedback, since what was recorded of their inputs is of no use: {names}")
        if choice.weights is None:
            warn_user(f"no steps keep the loss within {self}: this checkpoint's weights are exact. Allow more")

    def _measured_objective(self, metric: DegradationMetric | None) -> Objective:
        """The objective in the loss's own unit, less the noise of a measurement, if something is measured."""
        objective = self._objective
        if not isinstance(objective, LossBudget):
            return objective
        if metric is None:
            return objective if self._measured_loss is None else objective.in_loss_unit(scale_of(self._measured_loss))
        noise = (self._calibration.noise or 0.0) * metric.scale
        if warning := self._calibration.noise_warning(objective.relative_budget(metric.scale)):
            warn_user(warning)
        return objective.in_loss_unit(metric.scale, noise)

    def _count_state_bits(
        self, state: FlatState, coded: set[str], codes: Mapping[str, Tensor], tensors: GlobalTensors
    ) -> StateBits:
        """Count the bits of a whole state besides the weights: moments and exact tensors. Only a ratio needs them.

        Args:
            coded: names of all that does not stay exact.
            codes: of the moments; what a reader has already costs nothing.
        """
        if not isinstance(self._objective, RatioTarget):
            return StateBits(math.inf, 0.0, is_first=False)
        drop = self._moments == "drop"
        coded = coded | {name for name, info in state.infos.items() if drop and info.role in MOMENT_ROLES}
        sizes = {name: 8 * info.nbytes for name, info in state.infos.items() if tensors.is_primary(name)}
        exact, raw = tensors.sum_over_ranks(
            sum(size for name, size in sizes.items() if name not in coded), sum(sizes.values())
        )
        return StateBits(raw, exact + total_entropy_bits(tensors, codes), is_first=self._num_saves == 0)

    def _probe_curvatures(
        self, weights: GlobalWeights, loss_increase: MeasureLossIncrease | None
    ) -> dict[str, Curvature]:
        """Curvatures from perturbing groups of weights, measured once a run; none if no group raises the loss."""
        if not self._group_curvatures and loss_increase is not None:
            self._group_curvatures = probe(weights, loss_increase)
            self._memory.set_terms(1.0)
        return curvatures_from_probe(weights, self._group_curvatures) if self._group_curvatures else {}

    @contextmanager
    def _evaluation(
        self,
        state: FlatState,
        selection: TensorSelection,
        evaluator: TrialEvaluator | None,
        tensors: GlobalTensors,
        *,
        measures: bool,
    ) -> Iterator[tuple[DegradationMetric | None, EvaluateProblem | None]]:
        """How to measure the effect of other weights, and what makes that useless, if anything does.

        Args:
            measures: False: no weight has changed, or the prediction decides. Then both are None.
        """
        if self._evaluate is None or not measures:
            yield None, None
            return
        evaluator = TrialEvaluator(state, self._evaluate) if evaluator is None else evaluator
        trials = MAX_TRIALS + 1 if self._memory.log_step is None else 1
        with evaluator, Task(f"{self.id}: measuring the loss", self._calibration.num_checks + trials) as task:
            metric = DegradationMetric(evaluator.evaluate, higher_is_better=self._higher_is_better, task=task)
            allowed = self._objective.relative_budget if isinstance(self._objective, LossBudget) else None
            perturbations = make_perturbations(selection, state, tensors.global_name)
            if self._calibration.needs_test(selection.global_names):
                evaluator.reads = ReadRecorder()
            problem = self._calibration.find_problem(metric, perturbations, allowed)
            yield metric, problem or self._calibration.test_entries(metric, evaluator, selection, state, tensors)

    def _recorder_values(self, evaluator: TrialEvaluator | None, selection: TensorSelection) -> dict[str, Tensor]:
        """The recorder's mean squared gradients by name in the state, of masters as of their casts."""
        if evaluator is None:
            return {}
        squares = self.recordings() if evaluator.recordings is None else evaluator.recordings
        if squares is None:
            return {}
        recorded = evaluator.recorder_values(squares)
        for name, master in selection.cast_sources.items():
            if name in recorded:
                recorded.setdefault(master, recorded[name])
        return recorded


def _narrow(quantized_tensor: QuantizedTensor) -> QuantizedTensor:
    """The same tensor in as few bytes a code as it needs."""
    return quantized_tensor.narrow() if isinstance(quantized_tensor, LatticeTensor) else quantized_tensor


def _is_inherited(name: str, points: QuantizedTensor, reference: Reference | None) -> bool:
    return reference is not None and reference.quantized.get(name) is points
