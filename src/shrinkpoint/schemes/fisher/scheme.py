"""The scheme "fisher": a budget of loss, or of bits, spent where the loss is least sensitive."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import Tensor

from shrinkpoint import humanize, validate
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, QuantizedTensor, Reference, RowSample
from shrinkpoint.errors import PolicyError, warn_user
from shrinkpoint.schemes.base import QuantizedState, check_recorder, finite_or_text
from shrinkpoint.schemes.calibration import Calibration, EvaluateProblem
from shrinkpoint.schemes.evaluate import Degradation, DegradationMetric, Evaluate, scale_of
from shrinkpoint.schemes.fisher.activations import Activations, Calibrate, LayerStatistics, check_activations
from shrinkpoint.schemes.fisher.copies import WeightCopy, find_copies
from shrinkpoint.schemes.fisher.copy_quantizer import CopyChoice, CopyMemory, CopyQuantizer
from shrinkpoint.schemes.fisher.curvature import (
    Curvature,
    GlobalWeights,
    SquaredGradientSource,
    estimate_curvatures,
    remaining_share,
)
from shrinkpoint.schemes.fisher.differences import DifferenceCandidates, encoded_bytes, exact_bases
from shrinkpoint.schemes.fisher.feedback import FeedbackFactors, find_layers, layer_curvatures
from shrinkpoint.schemes.fisher.first_moments import coarser_steps, steps_of_first_moments
from shrinkpoint.schemes.fisher.moment_lattices import (
    DROPPED_ROLES,
    MomentPrecision,
    count_updates,
    quantize_moments,
)
from shrinkpoint.schemes.fisher.moment_statistics import MIN_LATTICE_NUMEL, MomentSamples, MomentStatistics
from shrinkpoint.schemes.fisher.objective import (
    DEFAULT_LOG_STEP,
    FINE_LOG_STEP,
    MAX_TRIALS,
    ErrorTarget,
    LossBudget,
    Objective,
    RatioTarget,
    StateBits,
    StepChoice,
    count_state_bits,
    make_objective,
)
from shrinkpoint.schemes.fisher.probe import curvatures_from_probe, probe
from shrinkpoint.schemes.fisher.run_memory import RunMemory
from shrinkpoint.schemes.fisher.steps import (
    Candidates,
    QuantizedWeights,
    StepCandidates,
    from_log_step,
    reference_curvature,
    warn_of_unreached,
)
from shrinkpoint.schemes.plan import PlanMode, QuantizationPlan
from shrinkpoint.schemes.planner import Measurement, PlannedSave, Planner
from shrinkpoint.schemes.select import TensorSelection, select_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.optimizers import MomentKind

MomentsMode = Literal["auto", "coded", "exact", "second", "drop"]
_PLAN_MODES: Mapping[str, PlanMode] = {"drop": "reset", "second": "reset first"}
CopiesMode = Literal["coded", "exact"]


class FisherChoice(NamedTuple):
    """Choice for one state."""

    steps: StepChoice  # The step size of the weights, and the weights quantized with it
    moments: dict[str, QuantizedTensor]  # Quantized, by name
    problem: EvaluateProblem | None  # Why the weights and moments stay exact after all; None: they need not
    copies: Mapping[str, CopyChoice]  # Of the weights beside the model that track it, by name
    mode: MomentsMode  # Of the moments, never "auto"


class Fisher(Planner["FisherChoice"]):
    """Quantizes to the fewest bits for a given rise of the loss, or to the least rise for a given number of bits.

    Weights are rounded to a uniform grid whose steps follow, by row and by column, what the optimizer knows of the
    loss: Adam's second moment is, up to a factor, its curvature. Codes are coded given the parent checkpoint's points.
    After a restore, dither preserves what training has done since. Moments have grids of their own. docs/fisher.md.

    It remembers its steps and what it has learned of a run. Of each further run, saved elsewhere, a copy does.

    Args:
        budget: by how much a checkpoint may raise the loss that `evaluate` measures, in per cent of it: "1%"; at most
            "100%". "0.1%" if there is an `evaluate` and none of the four targets is given.
        nats: the same in the loss's own unit; 0.001 if there is no `evaluate` and none of the four targets is given.
            Give at most one of them.
        ratio: how many times smaller the whole state shall be; above 1.
        relative_error: the root mean square of the error in standard deviations of a tensor (0.3, or "30%"; at most 2),
            in the geometric mean over all weights of a keyframe; hysteresis may add a half. Nothing need be known of
            the loss; what is known distributes the error.
        evaluate: called with what is being saved (a manager's `model`; else the state); returns a loss or a score, or a
            1-D tensor, array or list of each example's. Then the measured rise decides, and the prediction saves
            trials. It must measure what it is given, and return the same for the same weights. Its attribute `terms`,
            if it has one, is taken where `terms=` is not given, and `description` is recorded, as of `RecentBatches`.
        evaluate_every: 1: the loss is measured at every save. n: at every n-th; None: at a run's first alone. At the
            others the prediction decides, which measured rises have calibrated.
        higher_is_better: `evaluate` returns a score, to which `budget` and `nats` refer.
        terms: how many loss terms (tokens, images) a batch averages: with it the predicted rise is in nats, and
            decides if there is no `evaluate`. None: what a framework's trainer counts, or `evaluate` knows. Without
            all of these, steps are one standard deviation.
        gradients: a recorder of squared gradients, for optimizers that keep none.
        moments: of the optimizer: "coded" on grids, "exact" bit for bit, "second": first moments are zero after a
            restore, which costs it `beta1 / (1 - beta1)` steps, or "drop": all are zero. "auto": "second" where these
            steps are less than a quarter of those between saves and half the budget pays for them, else "coded".
        copies: weights beside the model that track it (averages, target networks, teachers): "coded" as a model of
            their own, each at the cost of two evaluations, or "exact" bit for bit.
        seed: of the dither.
        activations: a recorder of what layers see. In a file alone (`sp.save` without `base`, or with an exact one and
            a measured budget) weights are then rounded with error feedback: the errors of a row cancel in the outputs
            of its layer. Never in a chain, where it would cost more than it gains.
        calibrate: the same without a recorder: called with what is being saved when such a file is written, it loads
            that into a model and runs it on some batches; if it returns or yields losses, these are differentiated, and
            tell how much each output matters.

    Raises:
        PolicyError: an invalid argument, or more than one target.
    """

    id: ClassVar[str] = "fisher"
    min_weight_size: ClassVar[tuple[int, int]] = MIN_LATTICE_NUMEL, 1
    counts_terms: ClassVar[bool] = True
    learns_from_trials: ClassVar[bool] = True

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
        copies: CopiesMode = "coded",
        seed: int = 0,
        activations: Activations | None = None,
        calibrate: Calibrate | None = None,
    ) -> None:
        self._activations, self._calibrate = check_activations(activations, calibrate)
        self._layers: Mapping[str, LayerStatistics] | None = None  # of a file alone
        super().__init__(evaluate, higher_is_better=higher_is_better, seed=seed)
        self._objective = make_objective(budget, nats, ratio, relative_error, is_measured=evaluate is not None)
        self._evaluate_every = validate.check_optional_int(
            "evaluate_every", evaluate_every, none_meaning="for once in a run"
        )
        self._measured_loss: float | None = None  # of the weights, when it was measured last
        self._counted_terms: float | None = None
        self._recorder: SquaredGradientSource | None = check_recorder("gradients", gradients, "square")
        self._moments: MomentsMode = validate.check_choice("moments", moments, get_args(MomentsMode))
        self._copies_mode: CopiesMode = validate.check_choice("copies", copies, get_args(CopiesMode))
        self._terms = None if terms is None else validate.check_float("terms", terms, do="leave it out")
        self._num_saves, self._unmeasured_saves = 0, 0  # unmeasured: since the last measurement
        self._memory = RunMemory(num_terms=self._terms)
        self._lattice_starts: dict[str, RowSample] = {}
        self._moment_samples = MomentSamples()
        self._copies: dict[str, CopyMemory] = {}
        self._group_curvatures: dict[str, float] = {}

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
            "copies": self._copies_mode,
            "seed": self._seed,
            "activations": self._activations,
            "calibrate": self._calibrate,
        }

    # phases of planning

    def synchronize(self, tensors: GlobalTensors) -> None:
        """Forgets what ranks remember differently, and counts restores and saves by the highest count."""
        ranks = tensors.collectives
        self._lossy_restores = ranks.max_over_ranks(self._lossy_restores) or 0
        self._num_saves = ranks.max_over_ranks(self._num_saves) or 0
        terms = getattr(self._evaluate, "terms", None) if self._counted_terms is None else self._counted_terms
        counted = ranks.max_over_ranks(round(terms) if isinstance(terms, int | float) and 1 <= terms < 1e18 else None)
        self._memory.synchronize(ranks, float(counted) if counted and self._terms is None else self._terms)
        self._memory.begin_save()
        self._measured_loss = ranks.value_if_equal(self._measured_loss)
        self._unmeasured_saves = ranks.max_over_ranks(self._unmeasured_saves) or 0
        self._group_curvatures = ranks.value_if_equal(self._group_curvatures) or {}
        if ranks.value_if_equal({name: copy.to_json() for name, copy in self._copies.items()}) is None:
            self._copies = {}
        self._calibration.forget_differences(tensors)

    def select(self, state: FlatState, tensors: GlobalTensors, quantizable: frozenset[str] | None) -> TensorSelection:
        """Selects weights of any shape, but none of LBFGS, whose next step would hold the error of a restore."""
        if tensors.is_complete and MomentKind.HISTORY in state.moment_kinds.values():  # LBFGS is never sharded
            quantizable = frozenset()
        min_numel, min_dims = self.min_weight_size
        optimized = state.optimizer_info.keys()
        return select_tensors(
            state, tensors, quantizable, min_numel=min_numel, min_dims=min_dims, optimized_names=optimized
        )

    def choose(self, save: PlannedSave, measurement: Measurement) -> FisherChoice:
        """Quantizes the moments, and the weights with the step size that the objective chooses."""
        metric, problem = measurement.metric, measurement.problem
        foldable = save.tensors.whole if self._layers is None else ()  # errors are fed back between columns
        parents = {} if save.reference is None else save.reference.quantized
        statistics, steps = MomentStatistics(save.state, foldable, parents), StepChoice(None)
        memory, group_curvatures = copy.deepcopy(self._memory), self._group_curvatures
        updates = count_updates(save)
        mode = self._moments_mode(save, metric, updates)
        moments = {} if problem is not None else self._quantize_moments(save, statistics, mode, updates)
        if self._evaluate is not None:
            save.selection = self._calibration.measured_part(save.selection, save.tensors)
        is_exact = problem is not None or self._copies_mode == "exact" or not save.may_have_copies
        unmeasured = [] if self._evaluate is None else self._calibration.unmeasured
        places = save.state, save.tensors, save.selection, save.selected
        tracked = [] if is_exact else find_copies(*places, unmeasured, save.reference)
        if problem is None and save.selection.global_names:
            steps = self._quantize_weights(save, moments, metric, statistics, tracked, mode)
            if (problem := measurement.find_late_problem()) is not None:
                steps = StepChoice(None, steps.trials)
        if problem is not None:  # failed trials have taught nothing, and the next save measures again
            self._memory, self._group_curvatures = memory, group_curvatures
            self._memory.log_step, self._measured_loss = None, None
        copies: Mapping[str, CopyChoice] = {}
        if tracked and problem is None and (steps.weights is not None or save.is_idle):
            copies = self._quantize_copies(save, metric, statistics, tracked)
        return FisherChoice(steps, moments, problem, copies, mode)

    def record(self, save: PlannedSave, measurement: Measurement, choice: FisherChoice) -> QuantizationPlan:
        steps, moments, problem, copies, moments_mode = choice
        all_left_out = [*steps.left_out, *(name for copy in copies.values() for name in copy.left_out)]
        is_fine = isinstance(self._objective, LossBudget) and (self._memory.log_step or 0) < FINE_LOG_STEP
        if all_left_out and not is_fine:
            warn_of_unreached(save.state, save.tensors, all_left_out)
        self._num_saves += 1
        loss = self._loss_record(save, measurement.metric, steps, moments_mode)
        tensors, points = save.tensors, save.unchanged
        tracked = {name: x for copy in copies.values() for name, x in copy.points.items()}
        if copies:
            loss["copies"] = {name: copy.record for name, copy in copies.items()}
        casts: dict[str, str] = {}
        mode: PlanMode = "exact"
        if problem is not None:
            warn_user(f"{problem.observation}, so this checkpoint is exact, weights and moments: {problem.advice}")
            loss["exact"] = problem.observation
        else:
            points = {**(steps.weights.points if steps.weights else {}), **points, **moments, **tracked}
            casts, mode = save.selection.cast_sources, _PLAN_MODES.get(moments_mode, "exact")
            if measurement.metric is not None:
                self._measured_loss, self._unmeasured_saves = measurement.metric.baseline.value, 0
            elif not save.is_idle:
                self._unmeasured_saves += 1
            if any(tensors.collectives.sum_over_ranks(len(points))) or moments_mode in _PLAN_MODES:
                step = None if self._memory.log_step is None else round(from_log_step(self._memory.log_step), 4)
                loss["chosen"] = {"step_in_deviations": step, "moments": moments_mode}
                if moments_mode == "second":
                    loss["chosen"]["steps_lost_by_a_restore"] = steps_of_first_moments(save)
                if self._evaluate is None:
                    self._unmeasured_notice.warn_once(self, quiet=tensors.collectives.rank > 0)
        return QuantizationPlan(
            self.id,
            {name: x.narrow() if isinstance(x, LatticeTensor) else x for name, x in points.items()},
            casts,
            mode,
            self.coders,
            loss,
            sampled_rows={name: tensors.local_shards[name].spec.sampled_rows(MAX_SAMPLED_VALUES) for name in points},
            min_size=self.min_size(tensors),
            copies=frozenset(tracked),
        )

    def _loss_record(
        self, save: PlannedSave, metric: DegradationMetric | None, steps: StepChoice, moments_mode: MomentsMode
    ) -> dict[str, Any]:
        """Fields of the manifest's `loss`, but for "chosen"."""
        is_measured_idle = save.is_idle and self._evaluate is not None  # there was nothing to measure
        record: dict[str, Any] = {
            "scheme": self.id,
            **self._objective.settings,
            "optimizer": moments_mode,
            "tried": steps.trials,
            **self._memory.to_json(),
            "probed": self._group_curvatures or None,
            "left_out": [*save.selection.nonfinite, *steps.left_out],
            "chosen": None,
            "rise": 0.0 if is_measured_idle else finite_or_text(steps.rise),
            "measured": metric is not None or is_measured_idle,
        }
        if metric is not None:
            record |= {"quality": finite_or_text(metric.baseline.value), "noise": self._calibration.noise}
            if isinstance(description := getattr(self._evaluate, "description", None), str) and description:
                record["measured_on"] = description
        elif self._measured_loss is not None:
            record["quality"] = self._measured_loss
        if self._evaluate is not None:
            record["unmeasured"] = self._calibration.recorded
        if steps.left_out:
            record["out_of_reach"] = [*steps.left_out]
        if steps.interval is not None:
            record["interval"] = [finite_or_text(end) for end in steps.interval]
        return record | {"seconds": save.seconds}

    # settings of `measure`

    @property
    def measures_next(self) -> bool:
        if self._evaluate is None or self._measured_loss is None:
            return self._evaluate is not None
        return self._evaluate_every is not None and self._unmeasured_saves + 1 >= self._evaluate_every

    @property
    def max_rise(self) -> Callable[[float], float] | None:
        return self._objective.relative_budget if isinstance(self._objective, LossBudget) else None

    @property
    def expected_evaluations(self) -> int:
        return self._calibration.num_checks + (MAX_TRIALS + 1 if self._memory.log_step is None else 1)

    # called by a manager or a store

    def note_terms(self, terms: float | None) -> None:
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

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Goes on from a checkpoint with its steps and what was learned by then, and with another dither."""
        self._lossy_restores = lossy_restores
        unmeasured = loss.get("unmeasured") if isinstance(loss, dict) else None
        names = [name for name in unmeasured if isinstance(name, str)] if isinstance(unmeasured, list) else []
        self._calibration = Calibration(names)
        self._memory, self._moment_samples = RunMemory(num_terms=self._terms), MomentSamples()
        self._measured_loss, self._unmeasured_saves, self._copies, self._group_curvatures = None, 0, {}, {}
        if not isinstance(loss, dict) or loss.get("scheme") != self.id:
            self._num_saves, self._lattice_starts = 0, {}
            return
        self._copies = CopyMemory.from_loss(loss) if "copies" in loss else {}
        self._memory, probed = RunMemory.from_json(loss, self._terms), loss.get("probed")
        if isinstance(probed, dict) and all(isinstance(x, float) and 0 < x < math.inf for x in probed.values()):
            self._group_curvatures = dict(probed)
        quality = loss.get("quality")
        is_known = self._memory.num_terms is not None and isinstance(unmeasured, list)
        if isinstance(quality, float) and math.isfinite(quality) and is_known:
            self._measured_loss = quality

    def quantize_alone(self, state: FlatState, reference: Reference | None = None) -> QuantizedState:
        """Plans and quantizes for a file that no checkpoint follows: with error feedback.

        Beside an exact base, and within a measured budget, feedback is for differences to it. Whichever is smaller is
        taken: these, or points as in a chain, without feedback.

        Raises:
            PolicyError: `calibrate` raised or ran another model, or the recorder has seen none of the state's weights.
        """
        if reference is None:
            return self._quantize_with_layers(state, None)
        points = self.quantize(state, reference)
        is_measured = self._evaluate is not None and isinstance(self._objective, LossBudget)
        has_layers = self._calibrate is not None or self._activations is not None
        if not (is_measured and has_layers and exact_bases(state.tensors, reference)):
            return points
        memory = copy.deepcopy(self._memory)  # whose steps are those of points
        differences, self._memory = self._quantize_with_layers(state, reference), memory
        return min(differences, points, key=lambda quantized: encoded_bytes(quantized, reference))

    def _quantize_with_layers(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        self._layers = find_layers(self._calibrate, self._activations, state)
        try:
            return self.quantize(state, reference)
        finally:
            self._layers = None

    # steps of `choose`

    def _moments_mode(self, save: PlannedSave, metric: DegradationMetric | None, updates: int | None) -> MomentsMode:
        """Return how this save keeps the moments: with "auto" without the first where a restore can do without them."""
        memory, sign = self._memory, -1 if self._higher_is_better else 1
        memory.progress = memory.progress.after(updates, None if metric is None else sign * metric.baseline.value)
        if self._moments != "auto":
            return self._moments
        steps, scale = steps_of_first_moments(save), self._measured_loss if metric is None else metric.scale
        if steps is None or scale is None or not isinstance(self._objective, LossBudget):
            return "coded"
        budget = self._objective.in_loss_unit(scale_of(scale))
        affords = memory.progress.affords(steps, self._lossy_restores, budget.budget)
        return "second" if all(save.tensors.collectives.all_gather(affords)) else "coded"

    def _quantize_moments(
        self, save: PlannedSave, statistics: MomentStatistics, mode: MomentsMode, updates: int | None
    ) -> dict[str, QuantizedTensor]:
        """Quantizes the optimizer's moments, by name."""
        if mode not in ("coded", "second"):
            return {}
        number = self._num_saves + (self._lossy_restores << 20) if updates is None else updates
        precision = MomentPrecision.after_restores(self._lossy_restores)
        samples = self._moment_samples if mode == "coded" else None
        coarser = coarser_steps(save, precision.first_step, self._memory, self._lossy_restores)
        return quantize_moments(save, number, self._seed, precision, statistics, samples, coarser)

    def _quantize_weights(
        self,
        save: PlannedSave,
        moments: Mapping[str, QuantizedTensor],
        metric: DegradationMetric | None,
        statistics: MomentStatistics,
        copies: Sequence[WeightCopy],
        mode: MomentsMode,
    ) -> StepChoice:
        """Chooses a step size for the weights, without their copies, and quantizes them with it."""
        selection, state = save.selection, save.state
        weights = GlobalWeights(save.tensors, selection.tensors, selection.global_names, selection.sums)
        # A keyframe inherits steps, too, so that deltas of older checkpoints against it are small. With recorded layers
        # it chooses anew, as its rounding feeds errors back.
        base, is_recorded = save.base, self._layers is not None
        bases = exact_bases(weights.local, base) if is_recorded and base is not None and metric else {}
        inherited_from = base if is_recorded else save.reference
        if inherited_from is None or bases:
            self._memory.log_step = None
        layers = {name: layer for name, layer in (self._layers or {}).items() if name in weights.local}

        def change(values: Mapping[str, Tensor]) -> Degradation:
            assert metric is not None
            return metric.degradation(selection.with_casts(values, state))

        def measure(quantized: QuantizedWeights, *, mirrored: bool = False) -> Degradation:
            return change(quantized.mirrored_values(candidates.weights) if mirrored else quantized.values)

        rise = None if metric is None else lambda values: change(values).rise
        curvatures = self._find_curvatures(save, weights, layers, rise, statistics)
        factors = FeedbackFactors(weights.local, layers) if layers and (bases or base is None) else None
        candidates: Candidates
        if bases:
            objective = self._measured_objective(metric)
            assert isinstance(objective, LossBudget)  # `quantize_alone` has seen to it
            candidates = DifferenceCandidates(weights, bases, curvatures, factors)
            choice = objective.scan(candidates, self._memory, measure)
        else:
            inherited = inherited_from, self._memory.log_step, self._lossy_restores, self._seed
            known = {} if save.evaluator is None else save.evaluator.layer_types, self._lattice_starts, factors
            is_measured = self._evaluate is not None and isinstance(self._objective, LossBudget)
            candidates = StepCandidates(weights, curvatures, *inherited, *known, is_measured=is_measured)
            bits = StateBits(math.inf, 0.0, is_first=self._num_saves == 0 and self._layers is None)
            if isinstance(self._objective, RatioTarget):
                dropped, coded = DROPPED_ROLES.get(mode, ()), {*candidates.weights, *selection.cast_sources}
                bits = count_state_bits(save, coded, moments, copies, dropped, is_first=self._num_saves == 0)
            if self._memory.restored_rise > 0:
                self._memory.restored_rise *= remaining_share(weights, candidates.curvatures, save.reference)
            objective = self._measured_objective(metric)
            choice = objective.choose(candidates, self._memory, None if metric is None else measure, bits)
        self._warn_of_choice(choice, candidates, objective, metric)
        self._memory.log_step = None if choice.weights is None else choice.weights.log_step
        self._lattice_starts = {} if choice.weights is None else candidates.lattice_starts(choice.weights)
        return choice

    def _quantize_copies(
        self,
        save: PlannedSave,
        metric: DegradationMetric | None,
        statistics: MomentStatistics,
        copies: Sequence[WeightCopy],
    ) -> dict[str, CopyChoice]:
        """Quantizes weights that track the model's, each copy by the objective as a model of its own.

        `evaluate` measures each, with its values in the model. Where it does not, the model's curvature predicts.
        """
        quantizer = CopyQuantizer(
            save,
            lambda weights: self._find_curvatures(save, weights, {}, None, statistics),
            self._lossy_restores,
            self._seed,
        )
        choices: dict[str, CopyChoice] = {}
        for tracked in copies:
            memory = self._copies.get(tracked.name) or CopyMemory()
            choice = memory.keep_frozen(tracked, save)
            if choice is None:
                memory.begin_save(self._memory, inherits=save.reference is not None)
                own = metric and metric.of_other_weights(partial(tracked.model_values, state=save.state))
                if own is None or own.baseline.is_finite:
                    choice = quantizer.quantize(tracked, memory, self._copy_objective(own, memory), own)
            if choice is None:
                problem = self._objective.unmet(f"the loss of {tracked.name.rstrip('.')}")
                warn_user(f"{problem}, so this copy is exact. Raise the budget")
            else:
                choices[tracked.name], self._copies[tracked.name] = choice, memory
        return choices

    def _copy_objective(self, metric: DegradationMetric | None, memory: CopyMemory) -> Objective:
        """The objective of a copy; in the unit of its own loss if that was ever measured."""
        objective, quality = self._objective, self._measured_loss if memory.quality is None else memory.quality
        if isinstance(objective, RatioTarget):
            log_step = DEFAULT_LOG_STEP if self._memory.log_step is None else self._memory.log_step
            return ErrorTarget(from_log_step(log_step) / math.sqrt(12))
        if isinstance(objective, LossBudget) and metric is not None:
            return objective.in_loss_unit(metric.scale, (self._calibration.noise or 0.0) * metric.scale)
        if isinstance(objective, LossBudget) and quality is not None:
            return objective.in_loss_unit(scale_of(quality))
        return objective

    def _find_curvatures(
        self,
        save: PlannedSave,
        weights: GlobalWeights,
        layers: Mapping[str, LayerStatistics],
        rise: Callable[[Mapping[str, Tensor]], float] | None,
        statistics: MomentStatistics,
    ) -> Mapping[str, Curvature]:
        """Curvatures of the weights, by local name: the optimizer's, recorders', and measured ones."""
        selection, evaluator, recorded = save.selection, save.evaluator, dict[str, Tensor]()
        if evaluator is not None:
            squares = self.recordings() if evaluator.recordings is None else evaluator.recordings
            recorded = {} if squares is None else evaluator.recorder_values(squares)
        for name, master in selection.cast_sources.items():  # a master has the gradients of its cast
            if name in recorded:
                recorded.setdefault(master, recorded[name])
        owned = replace(save.state, optimizer_info=selection.optimizer_info_of_masters(save.state))
        curvatures: Mapping[str, Curvature] = estimate_curvatures(weights, owned, recorded, statistics)
        if has_gradients := any(layer.outputs.total is not None for layer in layers.values()):
            curvatures = layer_curvatures(weights.local, curvatures, layers)
        # Where nothing tells anything, groups of weights are perturbed, once in a run.
        if (rise is not None or self._group_curvatures) and reference_curvature(weights, curvatures) <= 0:
            if not self._group_curvatures and rise is not None:
                self._group_curvatures = probe(weights, rise)
                self._memory.set_terms(1.0)
            if self._group_curvatures:
                curvatures = curvatures_from_probe(weights, self._group_curvatures)
        if layers and not has_gradients:
            curvatures = layer_curvatures(weights.local, curvatures, layers)
        return curvatures

    def _warn_of_choice(
        self, choice: StepChoice, candidates: Candidates, objective: Objective, metric: DegradationMetric | None
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
            warn_user(f"rounded without error feedback, since the recorded inputs are unusable: {names}. Record more")
        if choice.weights is None:
            warn_user(f"{self._objective.unmet()}, so the weights of this checkpoint are exact. Raise the budget")

    def _measured_objective(self, metric: DegradationMetric | None) -> Objective:
        """The objective in the loss's own unit, less the noise of a measurement, if something is measured."""
        objective = self._objective
        if not isinstance(objective, LossBudget):
            return objective
        if metric is None:
            budget = objective if self._measured_loss is None else objective.in_loss_unit(scale_of(self._measured_loss))
        else:
            noise = (self._calibration.noise or 0.0) * metric.scale
            if warning := self._calibration.noise_warning(objective.relative_budget(metric.scale)):
                warn_user(warning)
            budget = objective.in_loss_unit(metric.scale, noise)
        left = self._memory.restored_rise
        return budget.after_restores(left) if left > 0 else budget
