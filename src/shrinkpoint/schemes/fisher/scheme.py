"""The scheme."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.schemes import optimizer_state as others
from shrinkpoint.schemes.base import QuantizedState, SpecMixin, check_recorder, check_seed
from shrinkpoint.schemes.calibration import Calibration, EvaluateProblem, UnmeasuredLossNotice, make_perturbations
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.evaluate import (
    DegradationMetric,
    Evaluate,
    ModelEvaluator,
    TrialEvaluator,
    strip_wrapper_prefix,
)
from shrinkpoint.schemes.fisher.curvature import Curvature, SquaredGradientSource
from shrinkpoint.schemes.fisher.moments import MIN_LATTICE_NUMEL, MomentPrecision
from shrinkpoint.schemes.fisher.objective import (
    ErrorTarget,
    LossBudget,
    Objective,
    RatioTarget,
    RunMemory,
    StateBits,
    StepChoice,
    rise_to_json,
)
from shrinkpoint.schemes.fisher.pool import ALONE, Pool
from shrinkpoint.schemes.fisher.probe import MeasureLossIncrease
from shrinkpoint.schemes.fisher.step_candidates import StepCandidates, from_log_step
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.schemes.select import TensorSelection
from shrinkpoint.schemes.shardedtarget import ShardTarget
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, Role

MomentsMode = Literal["coded", "exact", "drop"]
MOMENT_ROLES = (Role.MOMENT1, Role.MOMENT2)
MAX_RELATIVE_ERROR = 2.0
"""Standard deviations of a tensor: more than that leaves no more than signs does."""
DEFAULT_BUDGET = 1e-3
"""Nats."""


class Fisher(SpecMixin, RecordEncodingMixin):
    """The fewest bits that keep a stated rise of the loss, or the least rise for a stated number of bits.

    Weights go on a uniform grid whose steps follow, by row and by column, what the optimizer knows of the loss: Adam's
    second moment is, up to a factor, its curvature. Codes are coded under the points of the checkpoint before. After a
    restore, dither keeps what training has done since. Moments go on grids of their own. docs/fisher.md.

    One instance serves one training run: it remembers its steps and what it has learned.

    Args:
        budget: by how much a checkpoint may raise the loss that `evaluate` measures, in per cent of it: "1%"; at most
            "100%".
        nats: instead of that: the same in the loss's own unit. 0.001 where nothing is asked.
        ratio: instead of both: how many times smaller the whole state shall be; above 1.
        relative_error: instead of all: the root mean square of the error, in standard deviations of a tensor (.3, or
            "30%"; at most 2): the geometric mean over all weights, of a keyframe; weights held at their points may add
            a fifth. Nothing need be known of the loss; what is known distributes it.
        evaluate: called with what is being saved (a manager's `model`; else the state); returns a loss or a score, or a
            1-D tensor of each example's. Then the measured rise decides, and the prediction saves trials. As with every
            scheme that measures, it must look at what it is given, and give the same answer for the same weights.
        higher_is_better: `evaluate` returns a score, and `budget` and `nats` are of that.
        terms: how many loss terms (tokens, images) a batch averages: with it the prediction is one of nats, and
            without `evaluate` it decides. Where there is neither, steps are one standard deviation.
        gradients: a recorder of squared gradients, for optimizers that have none.
        moments: of the optimizer: "coded" on grids, "exact" bit for bit, or "drop": zero after a restore.
        seed: of the dither.

    Raises:
        PolicyError: an argument that makes no sense, or two ways to say how much may be lost.
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
        higher_is_better: bool = False,
        terms: float | None = None,
        gradients: SquaredGradientSource | None = None,
        moments: MomentsMode = "coded",
        seed: int = 0,
    ) -> None:
        self._evaluate: Evaluate | None = validate.check_optional_callable("evaluate", evaluate)
        self._objective = _make_objective(budget, nats, ratio, relative_error, is_measured=evaluate is not None)
        self._higher_is_better = validate.check_bool("higher_is_better", higher_is_better)
        self._recorder: SquaredGradientSource | None = check_recorder("gradients", gradients, "square")
        self._moments: MomentsMode = validate.check_choice("moments", moments, get_args(MomentsMode))
        self._terms = None if terms is None else validate.check_float("terms", terms, do="leave it out")
        self._seed, self._lossy_restores, self._num_saves = check_seed(seed), 0, 0
        self._memory = RunMemory(num_terms=self._terms)
        self._group_curvatures: dict[str, float] = {}
        self._calibration, self._unmeasured_notice = Calibration(), UnmeasuredLossNotice()

    @property
    def arguments(self) -> dict[str, object]:
        """See `SpecMixin`."""
        dial = self._objective
        said = dial.settings
        if isinstance(dial, LossBudget) and dial.share is None:
            said = {"nats": dial.budget}
        return {
            **said,
            "evaluate": self._evaluate,
            "higher_is_better": self._higher_is_better,
            "terms": self._terms,
            "gradients": self._recorder,
            "moments": self._moments,
            "seed": self._seed,
        }

    # what a manager calls

    @property
    def evaluate(self) -> Evaluate | None:
        return self._evaluate

    @property
    def needs_evaluation(self) -> bool:
        """Whether it asks `evaluate` before it decides."""
        return self._evaluate is not None

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one that writes."""
        return True

    def run_on_writer(self, compute: Callable[[], None]) -> None:
        """Do something where one process leads and others follow; here there is one."""
        compute()

    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Go on from a checkpoint: with its steps and what was known then, and another dither; see `Resumable`."""
        self._lossy_restores = lossy_restores
        self._memory, self._group_curvatures, self._calibration = RunMemory(num_terms=self._terms), {}, Calibration()
        if not isinstance(loss, dict) or loss.get("scheme") != self.id:
            return
        size, terms = loss.get("size"), loss.get("terms")
        if type(size) is int and abs(size) < 1 << 10:
            self._memory.log_step = size
        if isinstance(terms, float) and 0 < terms < math.inf:
            self._memory.num_terms = terms
        found = loss.get("probed")
        if isinstance(found, dict) and all(isinstance(x, float) and 0 < x < math.inf for x in found.values()):
            self._group_curvatures = dict(found)

    @torch.no_grad()
    def plan(
        self, state: FlatState, reference: Reference | None, evaluator: TrialEvaluator | None = None, pool: Pool = ALONE
    ) -> QuantizationPlan:
        """Decide for this state.

        Args:
            reference: what is held of the checkpoint before; None: nothing.
            evaluator: what to measure on; None: on copies of the state.
            pool: what there is of these tensors on other ranks, all of which decide at the same time.

        Raises:
            PolicyError: `evaluate` raised, or returned no number.
        """
        began = time.perf_counter()
        alive = None if evaluator is None else evaluator.quantizable
        self._synchronize(pool)
        picks = pool.picks(state, reference, alive)
        picks.warn_nonfinite()
        kept = pool.unmoved([*picks.tensors], state, reference)
        picks, known = picks.exclude(kept, pool.global_tensors(state)), reference
        if reference is not None and not reference.is_base:
            reference = None
        values: dict[str, Tensor] = {}
        with self._evaluation(state, picks, evaluator, pool) as (quality, problem):
            if problem is not None:
                _warn_loss(f"{problem.observation}, so this checkpoint is exact, weights and moments: {problem.advice}")
                self._memory.log_step, self._num_saves = None, self._num_saves + 1
                record = self._loss_record(StepChoice(None), picks, quality, began) | {"exact": problem.observation}
                held: dict[str, QuantizedTensor] = {name: one.cpu() for name, one in kept.items()}
                return QuantizationPlan(self.id, held, {}, "exact", self.coders, record, min_size=_min_shape(pool))
            further = self._quantize_moments(state, known, values, pool)
            answer = self._quantize_weights(state, picks, reference, evaluator, kept | further, pool, quality)
        if answer.left_out:
            _warn_loss(
                f"weights that no points of these steps reach are kept as they are: {', '.join(answer.left_out)}"
            )
        symbols: dict[str, QuantizedTensor] = (
            {} if answer.weights is None else {n: p.cpu() for n, p in answer.weights.points.items()}
        )
        symbols |= {name: one.cpu() for name, one in (kept | further).items()}
        self._num_saves += 1
        loss = self._loss_record(answer, picks, quality, began)
        loss["chosen"] = self._chosen_json(any(pool.total(len(symbols))))
        if loss["chosen"] is not None and self._evaluate is None:
            self._unmeasured_notice.warn_once(self, quiet=not pool.leads)
        optimizer: others.Mode = "reset" if self._moments == "drop" else "exact"
        if answer.weights is not None:
            values |= answer.weights.values
        values = {name: x for name, x in values.items() if x.device.type == "cpu"}
        return QuantizationPlan(
            self.id, symbols, picks.cast_sources, optimizer, self.coders, loss, values, min_size=_min_shape(pool)
        )

    def _loss_record(
        self, choice: StepChoice, selection: TensorSelection, quality: DegradationMetric | None, start: float
    ) -> dict[str, Any]:
        """What the manifest says of what was lost, but for what was chosen."""
        idle = quality is None and self._evaluate is not None  # no weight has moved: there is nothing to measure
        record: dict[str, Any] = {
            "scheme": self.id,
            **self._objective.settings,
            "optimizer": self._moments,
            "tried": choice.trials,
            "terms": self._memory.num_terms,
            "size": self._memory.log_step,
            "probed": self._group_curvatures or None,
            "left_out": [*selection.nonfinite, *choice.left_out],
            "chosen": None,
            "rise": 0.0 if idle else rise_to_json(choice.rise),
            "measured": self._evaluate is not None,
        }
        if quality is not None:
            record |= {"quality": rise_to_json(quality.baseline.value), "noise": self._calibration.noise}
        if choice.interval is not None:
            record["interval"] = [rise_to_json(end) for end in choice.interval]
        return record | {"seconds": round(time.perf_counter() - start, 3)}

    def _synchronize(self, pool: Pool) -> None:
        """What processes do not remember alike is forgotten."""
        learned = self._memory
        self._lossy_restores = pool.largest(self._lossy_restores) or 0
        self._num_saves = pool.largest(self._num_saves) or 0
        learned.log_step, learned.num_terms = (
            pool.agreed(learned.log_step),
            pool.agreed(learned.num_terms) or self._terms,
        )
        self._group_curvatures = pool.agreed(self._group_curvatures) or {}
        self._calibration.set_state(pool.agreed(self._calibration.state))

    def _chosen_json(self, lossy: bool) -> JSON:
        """What every manifest says of a choice; None where nothing was lost."""
        if not lossy and self._moments != "drop":
            return None
        size = self._memory.log_step
        return {"step_in_deviations": None if size is None else round(from_log_step(size), 4), "moments": self._moments}

    # what a store calls

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Decide and quantize; see `schemes.Scheme`."""
        return self.plan(state, reference).quantize(state, reference)

    def _quantize_moments(
        self, state: FlatState, reference: Reference | None, values: dict[str, Tensor], pool: Pool
    ) -> dict[str, QuantizedTensor]:
        """Fills `values` with those of second moments."""
        if self._moments != "coded":
            return {}
        updates = [facts.step for facts in state.optimizer_info.values() if facts.step is not None]
        number = pool.largest(max(updates, default=None))
        if number is None:
            number = self._num_saves + (self._lossy_restores << 20)
        kept = pool.unmoved([n for n, info in state.infos.items() if info.role in MOMENT_ROLES], state, reference)
        kept = {name: one for name, one in kept.items() if isinstance(one, LatticeTensor)}
        values.update((name, state.tensors[name]) for name in kept if state.infos[name].role is Role.MOMENT2)
        return kept | dict(pool.moments(state, number, self._seed, MomentPrecision(), values, kept))

    def _quantize_weights(
        self,
        state: FlatState,
        selection: TensorSelection,
        reference: Reference | None,
        evaluator: TrialEvaluator | None,
        moment_origins: Mapping[str, QuantizedTensor],
        pool: Pool,
        quality: DegradationMetric | None,
    ) -> StepChoice:
        if not pool.count(selection.tensors):
            return StepChoice(None)
        recorded = self._recorder_values(evaluator)
        for name, master in selection.cast_sources.items():
            if name in recorded:
                recorded.setdefault(master, recorded[name])
        known = pool.curvatures(
            selection.tensors, replace(state, optimizer_info=selection.optimizer_info_of_masters(state)), recorded
        )
        if reference is None:
            self._memory.log_step = None
        size = self._memory.log_step
        kinds = {} if evaluator is None else evaluator.layer_types
        change = None if quality is None else lambda values: quality.degradation(selection.with_casts(values, state))
        if change is not None and pool.usual(known, selection.tensors) <= 0:
            known = self._probe_curvatures(selection.tensors, lambda values: change(values).rise, pool) or known
        drafts = StepCandidates(
            selection.tensors, known, reference, size, self._lossy_restores, self._seed, kinds, pool
        )
        codes = {name: one.codes for name, one in moment_origins.items() if not _is_inherited(name, one, reference)}
        room = self._count_state_bits(state, {*drafts.weights, *selection.cast_sources, *moment_origins}, codes, pool)
        dial = self._objective
        if quality is not None and isinstance(dial, LossBudget):
            allowed, noise = dial.relative_budget(quality.scale), (self._calibration.noise or 0.0) * quality.scale
            if warning := self._calibration.noise_warning(allowed):
                _warn_loss(warning)
            dial = dial.in_loss_unit(quality.scale, noise)
        answer = dial.choose(drafts, self._memory, None if change is None else lambda draft: change(draft.values), room)
        if answer.interval is not None and quality is not None and isinstance(dial, LossBudget):
            scale = quality.scale
            ends = answer.interval[0] / scale, answer.interval[1] / scale
            if doubt := self._calibration.interval_warning(
                (answer.rise or 0.0) / scale, ends, dial.relative_budget(scale)
            ):
                _warn_loss(doubt)
        if answer.weights is None:
            _warn_loss(f"no steps keep the loss within {self}: this checkpoint's weights are exact")
            self._memory.log_step = None
        else:
            self._memory.log_step = answer.weights.log_step
        return answer

    def _count_state_bits(
        self, state: FlatState, coded: set[str], codes: Mapping[str, Tensor], pool: Pool
    ) -> StateBits:
        """What a whole state has beside the weights: moments, and what stays exact. Only a ratio asks for it.

        Args:
            coded: names of all that does not stay exact.
            codes: of the moments; what a reader has already costs nothing.
        """
        if not isinstance(self._objective, RatioTarget):
            return StateBits(math.inf, 0.0, is_first=False)
        drop = self._moments == "drop"
        coded = coded | {name for name, info in state.infos.items() if drop and info.role in MOMENT_ROLES}
        exact = 8 * sum(info.nbytes for name, info in state.infos.items() if name not in coded and pool.counts(name))
        raw = 8 * sum(info.nbytes for name, info in state.infos.items() if pool.counts(name))
        both = pool.total(exact, raw)
        return StateBits(both[1], both[0] + pool.bits(codes), is_first=self._num_saves == 0)

    def _probe_curvatures(
        self, weights: Mapping[str, Tensor], rise: MeasureLossIncrease, pool: Pool
    ) -> dict[str, Curvature]:
        """What the loss says of each kind of weights, asked once in a run; nothing where it minds none of them."""
        if not self._group_curvatures:
            self._group_curvatures = pool.probe(weights, rise)
            if self._memory.num_terms is None:
                self._memory.num_terms = 1.0
        return pool.probed(weights, self._group_curvatures) if self._group_curvatures else {}

    @contextmanager
    def _evaluation(
        self, state: FlatState, selection: TensorSelection, evaluator: TrialEvaluator | None, pool: Pool
    ) -> Iterator[tuple[DegradationMetric | None, EvaluateProblem | None]]:
        """How to measure what other values of some weights do, and why that is of no use, if it is not.

        None where nothing was asked for, or there is nothing to measure.
        """
        if self._evaluate is None or not pool.count(selection.tensors):
            yield None, None
            return
        evaluator = TrialEvaluator(state, self._evaluate) if evaluator is None else evaluator
        with evaluator:
            quality = DegradationMetric(evaluator.evaluate, higher_is_better=self._higher_is_better)
            allowed = self._objective.relative_budget if isinstance(self._objective, LossBudget) else None
            yield (
                quality,
                self._calibration.find_problem(quality, make_perturbations(selection, state, pool.title), allowed),
            )

    def _recorder_values(self, evaluator: TrialEvaluator | None) -> dict[str, Tensor]:
        """What was recorded, by the names of the state."""
        if self._recorder is None or not isinstance(evaluator, ModelEvaluator | ShardTarget):
            return {}
        squares = self._recorder.square  # a copy, made by every look at it
        if not squares and self._recorder.ready:
            do = "make the recorder with squares=True"
            raise PolicyError("gradients", found="a recorder without squares", expected="one with squares", do=do)
        if isinstance(evaluator, ShardTarget):
            return evaluator.recorded(squares)
        recorded = {strip_wrapper_prefix(name): square for name, square in squares.items()}
        return {
            evaluator.state_names[name]: square for name, square in recorded.items() if name in evaluator.state_names
        }


def _min_shape(pool: Pool) -> tuple[int, int] | None:
    return (MIN_LATTICE_NUMEL, 1) if pool is ALONE else None


def _is_inherited(name: str, origin: QuantizedTensor, reference: Reference | None) -> bool:
    return reference is not None and reference.quantized.get(name) is origin


def _make_objective(
    budget: str | None,
    nats: float | None,
    ratio: float | None,
    relative_error: float | str | None,
    *,
    is_measured: bool,
) -> Objective:
    asked = {"budget": budget, "nats": nats, "ratio": ratio, "relative_error": relative_error}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        found = " and ".join(given)
        raise PolicyError("Fisher", found=found, expected="one of them", do="say in one way how much may be lost")
    if budget is not None:
        return LossBudget(DEFAULT_BUDGET, 100 * _parse_budget(budget, is_measured=is_measured))
    if ratio is not None:
        return RatioTarget(
            validate.check_float("ratio", ratio, minimum=1.0, do="say how many times smaller the state shall be")
        )
    if relative_error is not None:
        return ErrorTarget(validate.check_fraction("relative_error", relative_error, maximum=MAX_RELATIVE_ERROR))
    return LossBudget(DEFAULT_BUDGET if nats is None else validate.check_float("nats", nats))


def _parse_budget(budget: Any, *, is_measured: bool) -> float:
    """Of the loss, as a fraction."""
    if not isinstance(budget, str):
        expected, do = 'a share of the loss such as "1%"', "write nats= for a rise in the loss's own unit"
        raise validate.argument_error("budget", budget, expected, do)
    if validate.parse_percent(budget) is None:
        raise validate.argument_error("budget", budget, 'a share of the loss such as "1%"', "write a number and %")
    share = validate.check_fraction("budget", budget)
    if not is_measured:
        found, do = f"{budget!r} of a loss that nobody measures", "pass evaluate=, or nats= in the loss's own unit"
        raise PolicyError("budget", found=found, expected="evaluate=", do=do)
    return share


def _warn_loss(text: str) -> None:
    warnings.warn(text, LossWarning, stacklevel=4)
