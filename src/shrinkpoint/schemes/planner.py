"""Base class of the schemes that decide for a whole state before it is written, and the phases of such a decision."""

from __future__ import annotations

import logging
import math
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.guard import pause_gc
from shrinkpoint.progress import Task
from shrinkpoint.schemes.base import QuantizedState, Scheme, SpecMixin, check_seed
from shrinkpoint.schemes.calibration import (
    Calibration,
    EvaluateProblem,
    Influence,
    UnmeasuredLossNotice,
    make_perturbations,
    record_influence,
)
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.evaluate import DegradationMetric, Evaluate, ShardedModelEvaluator, TrialEvaluator
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.plan import QuantizationPlan, plan_within_memory
from shrinkpoint.schemes.residual import ResidualScheme
from shrinkpoint.schemes.select import TensorSelection, select_tensors, unchanged_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors, ShardLayout
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, Role
from shrinkpoint.tensors.memory import host_by_default

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("shrinkpoint")
ChoiceT = TypeVar("ChoiceT")  # What a scheme chooses for one state


@dataclass
class PlannedSave:
    """A state that is planned, and what the phases have found out about it."""

    state: FlatState
    reference: Reference | None  # the decoded previous checkpoint; None if there is none
    base: Reference | None  # the same, if this checkpoint may be a difference to it
    evaluator: TrialEvaluator | None  # measures trials; None: on copies of the state
    tensors: GlobalTensors  # the tensors of all ranks
    is_shared: bool  # other ranks take part, which have other shards of the state
    # Codes of weights that equal the previous checkpoint bit by bit, by local name.
    unchanged: dict[str, QuantizedTensor] = field(repr=False)
    # The other weights that may be quantized; a phase that rules some of them out replaces it.
    selection: TensorSelection
    selected: tuple[str, ...]  # global names of all weights that may be quantized, whether they have moved or not
    may_have_copies: bool  # there are tensors beside these weights with their shapes and no other role
    is_idle: bool  # no weight has moved
    start: float  # when planning began, by `time.perf_counter`

    @property
    def seconds(self) -> float:
        """Seconds since planning began, to a thousandth."""
        return round(time.perf_counter() - self.start, 3)


@dataclass(frozen=True)
class Measurement:
    """Measurement of the effect of other weights on the loss.

    Attributes:
        metric: None: nothing is measured.
        problem: why nothing may be lost; None: `evaluate` can be believed.
        task: counts the evaluations.
        find_late_problem: says after the trials why nothing may be lost; of a scheme that `learns_from_trials`.
        find_inversion: the same of any scheme, where a score was taken for a loss.
    """

    metric: DegradationMetric | None = None
    problem: EvaluateProblem | None = None
    task: Task | None = None
    find_late_problem: Callable[[], EvaluateProblem | None] = lambda: None
    find_inversion: Callable[[], EvaluateProblem | None] = lambda: None


class Planner(SpecMixin, RecordEncodingMixin, Generic[ChoiceT]):
    """A scheme that decides while the model is the caller's. What it decides can be written beside the training loop.

    `plan` calls the phases in order: `synchronize`, `select`, `measure`, `choose` (which quantizes), `record`. Every
    phase is a collective of all ranks. It remembers what it has learned of its run; `of_run` gives others a copy.

    Args:
        evaluate: measures a model or a state; None: nothing is measured.
        higher_is_better: `evaluate` returns a score and no loss.
        seed: of random numbers.
    """

    min_weight_size: ClassVar[tuple[int, int]]  # How many values and axes a weight has at least that is quantized
    learns_from_trials: ClassVar[bool] = False
    """True if the scheme asks `Measurement.find_late_problem` after its trials."""
    counts_terms: ClassVar[bool] = False
    """True if the scheme predicts the loss from the number of loss terms that an optimizer step averages."""

    def __init__(self, evaluate: Evaluate | None, *, higher_is_better: bool, seed: int) -> None:
        self._evaluate: Evaluate | None = validate.check_optional_callable("evaluate", evaluate)
        self._higher_is_better = validate.check_bool("higher_is_better", higher_is_better)
        self._seed, self._lossy_restores = check_seed(seed), 0
        self._calibration, self._unmeasured_notice = Calibration(), UnmeasuredLossNotice()
        self._metrics, self._old_metrics = dict[str, float](), set[tuple[str, float]]()

    def __getstate__(self) -> dict[str, Any]:
        """Its state for pickle and copy: a copy serves no run yet, and remembers no coders."""
        return {name: value for name, value in vars(self).items() if name not in ("_runs", "_choices")}

    def of_run(self, owner: object, place: object) -> Self:
        """The scheme of a run: this one for the first run, and for each other one a copy with a memory of its own.

        Args:
            owner: what saves the run; its run is forgotten with it.
            place: where it saves; owners with equal places save one run.
        """
        runs: WeakKeyDictionary[object, tuple[object, Self | None]] = vars(self).setdefault(
            "_runs", WeakKeyDictionary()
        )
        known = [scheme for other, scheme in runs.values() if other == place]
        is_taken = any(scheme is None for _, scheme in runs.values())
        scheme = known[0] if known else self._without_memory() if is_taken else None
        runs[owner] = place, scheme  # None: this one
        return self if scheme is None else scheme

    def _without_memory(self) -> Self:
        """A copy that has learned nothing yet."""
        twin = copy(self)
        twin._unmeasured_notice, twin._metrics, twin._old_metrics = UnmeasuredLossNotice(), {}, set()
        twin.resume(None)
        return twin

    # phases

    def synchronize(self, tensors: GlobalTensors) -> None:
        """Forgets what ranks remember differently."""

    def select(self, state: FlatState, tensors: GlobalTensors, quantizable: frozenset[str] | None) -> TensorSelection:
        """Selects the weights that may be quantized.

        Args:
            quantizable: names of the model's own parameters; None if they are unknown.
        """
        return select_tensors(state, tensors, quantizable)

    @contextmanager
    def measure(self, save: PlannedSave) -> Iterator[Measurement]:
        """Measures the unchanged weights and checks that `evaluate` can be believed; the model waits meanwhile."""
        metrics, self._metrics = self._metrics, {}
        if self._evaluate is None or not self.measures_next or save.is_idle:
            yield Measurement()
            return
        evaluator = save.evaluator or TrialEvaluator(save.state, self._evaluate)
        with evaluator, Task(f"{self.id}: measuring the loss", self.expected_evaluations) as task:
            metric = DegradationMetric(evaluator.evaluate, higher_is_better=self._higher_is_better, task=task)
            perturbations = make_perturbations(save.selection, save.state, save.tensors.global_names)
            recorder = None
            if self._calibration.needs_test(save.selection.global_names):
                recorder = evaluator.influence = record_influence(save.selection, save.state)

            @cache
            def find_influence() -> Influence:  # which is known once evaluate has answered
                evaluator.influence = None
                if recorder is None:
                    return Influence()
                return Influence.from_recorder(recorder, save.tensors, self.compute_on_all)

            def is_followed() -> bool:
                return self.learns_from_trials and find_influence().used.issuperset(save.selection.global_names)

            problem = self._calibration.find_problem(
                metric,
                perturbations,
                self.max_rise,
                self.compute_on_all,
                is_followed,
                metrics if recorder is None and save.base is not None else None,
            )
            problem = problem or self._calibration.test_entries(
                metric, find_influence(), save.selection, save.state, save.tensors, self.compute_on_all
            )
            arguments = metric, perturbations, self.max_rise
            yield Measurement(
                metric,
                problem,
                task,
                partial(self._calibration.find_late_problem, *arguments),
                partial(self._calibration.find_inversion, *arguments),
            )

    @abstractmethod
    def choose(self, save: PlannedSave, measurement: Measurement) -> ChoiceT:
        """Chooses how weights and moments are quantized, and quantizes them."""

    @abstractmethod
    def record(self, save: PlannedSave, measurement: Measurement, choice: ChoiceT) -> QuantizationPlan:
        """Makes the plan of a choice, with what the manifest records of it; the model is the caller's again."""

    # settings of `measure`

    @property
    def measures_next(self) -> bool:
        """True if planning the next save calls `evaluate`."""
        return self._evaluate is not None

    @property
    def max_rise(self) -> Callable[[float], float] | None:
        """The relative rise of the loss that is allowed, given the loss; None if no rise is named."""
        return None

    @property
    def expected_evaluations(self) -> int | None:
        """Probable number of calls of `evaluate` by the next save; None if unknown."""
        return None

    def compute_on_all(self, compute: Callable[[], Any]) -> list[Any]:
        """Results of all processes that share trials."""
        return [compute()]

    # called by a manager or a store

    @property
    def evaluate(self) -> Evaluate | None:
        """The function that measures a model; None if nothing is measured."""
        return self._evaluate

    @property
    def needs_evaluation(self) -> bool:
        """True if the scheme cannot decide without calling `evaluate` at some save."""
        return self._evaluate is not None

    @property
    def needs_live_model(self) -> bool:
        """True if the next save must be planned before training goes on: on a model, or with other processes."""
        return self.measures_next

    @property
    def shares_trials(self) -> bool:
        """True if replicas with the same state share the trials."""
        return False

    @property
    def is_writer(self) -> bool:
        """True if this process is the one that writes."""
        return True

    def run_on_writer(self, compute: Callable[[], None]) -> None:
        """Calls a function on the process that writes; if it raises there, all processes that share trials raise."""
        compute()

    def recordings(self) -> Mapping[str, Tensor] | None:
        """A copy of what a recorder has of the gradients now, by name in the model; None without a recorder."""
        return None

    def note_terms(self, terms: float | None) -> None:
        """Takes the number of loss terms that a trainer has counted, if the user gave none."""

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of the next save, one of which may be what `evaluate` answers for the unchanged weights.

        A number that any save before had is an old one, so that it says nothing of these weights.
        """
        numbers = {name: value for name, value in metrics.items() if math.isfinite(value) and self.learns_from_trials}
        self._metrics = dict(item for item in numbers.items() if item not in self._old_metrics)
        self._old_metrics.update(numbers.items())

    @abstractmethod
    def resume(self, loss: JSON, lossy_restores: int = 0) -> None:
        """Goes on from a checkpoint.

        Args:
            loss: of its manifest; whatever another scheme wrote there is passed over.
            lossy_restores: lossy restores behind the weights from now on.
        """

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        return self.plan(state, reference).quantize(state, reference)

    def quantize_alone(self, state: FlatState, reference: Reference | None = None) -> QuantizedState:
        """Plans and quantizes for a file that no checkpoint follows; `reference` is its decoded base, if it has one."""
        return self.quantize(state, reference)

    @torch.no_grad()
    @host_by_default()
    def plan(
        self,
        state: FlatState,
        reference: Reference | None,
        evaluator: TrialEvaluator | None = None,
        global_tensors: GlobalTensors | None = None,
    ) -> QuantizationPlan:
        """Decides for this state; a collective of all ranks that have shards of it.

        Args:
            reference: the decoded previous checkpoint; None if there is none.
            evaluator: measures trials; None: on copies of the state.
            global_tensors: the tensors of all ranks; None: this process has all of every tensor.

        Returns:
            A plan that loses nothing, with a warning, if `evaluate` failed or cannot be believed.
        """
        start = time.perf_counter()
        tensors = GlobalTensors.from_state(state) if global_tensors is None else global_tensors
        self.synchronize(tensors)
        # Select. A weight that equals the previous checkpoint keeps its codes: no rounding may touch it again.
        quantizable = None if evaluator is None else evaluator.quantizable
        selection = self.select(state, tensors, quantizable)
        selection.warn_exact(state, reference, () if evaluator is None else evaluator.frozen, tensors)
        if reference is None and evaluator is not None and quantizable is not None:
            selection.warn_outside_model(state, quantizable | evaluator.copied)
        unchanged = unchanged_tensors(selection.tensors, state, reference, tensors)
        moved = selection.exclude(unchanged, tensors)
        selected = {*selection.global_names}
        shapes = {tensors.shapes[name] for name in selected}
        beside = (name for name, shape in tensors.shapes.items() if shape in shapes and name not in selected)
        save = PlannedSave(
            state,
            reference,
            reference if reference is not None and reference.is_base else None,
            evaluator,
            tensors,
            is_shared=global_tensors is not None,
            unchanged=unchanged,
            selection=moved,
            selected=selection.global_names,
            may_have_copies=any(tensors.roles[name] in (Role.PARAMETER, Role.OTHER) for name in beside),
            is_idle=not moved.global_names,
            start=start,
        )
        with self.measure(save) as measurement:
            evaluates = measurement.metric is not None  # which may create cycles, and takes its time
            with nullcontext() if evaluates else pause_gc(state.nbytes, len(state.infos)):
                choice = self.choose(save, measurement)
        plan = self.record(save, measurement, choice)
        _log.debug("%s decides: %s", self.id, plan.loss)
        return plan

    def min_size(self, tensors: GlobalTensors) -> tuple[int, int] | None:
        """`min_weight_size`; None if this rank lacks parts of tensors, and cannot tell why its shards stay exact."""
        return self.min_weight_size if tensors.is_complete else None


def plan_shards(
    scheme: Scheme,
    state: FlatState,
    reference: Reference | None,
    layout: ShardLayout,
    evaluator: ShardedModelEvaluator | None = None,
) -> Scheme:
    """Plan the quantization of this rank's shards from statistics of global tensors; a collective.

    All shards of one tensor get the same recipe, and decisions about all tensors are the same on all ranks. A rank
    that is alone, and has all of every tensor, decides as a process without shards.

    Args:
        scheme: of the same settings on every rank.
        state: this rank's tensors.
        reference: the decoded tensors of this rank's previous file; None if there is none. If any rank that has
            tensors has none, all ranks plan as if they had none.
        layout: where this rank's tensors lie in global tensors.
        evaluator: measures the model, for schemes that measure.

    Returns:
        The scheme that quantizes and encodes this rank's shards.

    Raises:
        PolicyError: the scheme cannot be planned by several ranks; before any rank waits for another.
        MismatchError: ranks have different schemes, or tensors of one name that differ.
        ShrinkpointError: an error of this rank or of another; on all ranks.
    """
    if isinstance(scheme, Lossless):
        return scheme
    check_shardable(scheme, measures=evaluator is not None)

    def plan(state: FlatState) -> Scheme:
        return layout.collectives.run_all_or_raise(lambda: _plan(scheme, state, reference, layout, evaluator))

    return plan_within_memory(plan, state, scheme, use_host=False)


def check_shardable(scheme: Scheme, *, measures: bool = False) -> None:
    """Check that several ranks can plan a scheme together; no collective.

    Args:
        measures: every rank has the model that is saved.

    Raises:
        PolicyError: they cannot.
    """
    if isinstance(scheme, Lossless):
        return
    if not isinstance(scheme, Planner | ResidualScheme):
        expected, do = "a scheme that several ranks can decide together", "pass one of shrinkpoint's schemes"
        raise PolicyError("scheme", found=repr(scheme), expected=expected, do=do)
    if isinstance(scheme, Planner) and scheme.shares_trials:
        found, do = "ranks that share the trials of one state", "leave group= out: all ranks measure each trial"
        raise PolicyError("group", found=found, expected="None, where ranks have parts of the state", do=do)
    if isinstance(scheme, Planner) and scheme.needs_evaluation and not measures:
        found, do = "no model that is saved", "pass it as model=, or a scheme that measures nothing"
        raise PolicyError("evaluate", found=found, expected="a model to measure on every rank", do=do)


def _plan(
    scheme: Scheme,
    state: FlatState,
    reference: Reference | None,
    layout: ShardLayout,
    evaluator: ShardedModelEvaluator | None,
) -> QuantizationPlan:
    tensors = GlobalTensors(state, layout)
    lacks_reference = bool(state.tensors) and reference is None
    is_no_base = reference is not None and not reference.is_base
    description = f"{type(scheme).__name__}, {scheme!r}"
    reports = tensors.collectives.all_gather((zlib.crc32(description.encode()), lacks_reference, is_no_base))
    if len({digest for digest, *_ in reports}) > 1:
        found = " and ".join(sorted({*tensors.collectives.all_gather(description)}))
        raise MismatchError("scheme", found=found, expected="the same on all ranks", do="pass one scheme on all ranks")
    if any(without_reference for _, without_reference, _ in reports):
        reference = None
    if reference is not None and any(without_base for *_, without_base in reports):
        reference = replace(reference, is_base=False)
    evaluator = ShardedModelEvaluator(state) if evaluator is None else evaluator
    evaluator.join(tensors)
    assert isinstance(scheme, Planner | ResidualScheme)
    return scheme.plan(state, reference, evaluator, tensors)
