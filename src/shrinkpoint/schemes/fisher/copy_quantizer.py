"""Chooses the steps of weights that track a model, and quantizes them, each copy as a model of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor, as_matrix
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, QuantizedTensor, Reference, RowSample
from shrinkpoint.quantize.lattice import quantize_to_lattice
from shrinkpoint.schemes.base import finite_or_text
from shrinkpoint.schemes.evaluate import Degradation, DegradationMetric
from shrinkpoint.schemes.fisher.copies import WeightCopy
from shrinkpoint.schemes.fisher.curvature import Curvature, GlobalWeights
from shrinkpoint.schemes.fisher.objective import Objective, StateBits, StepChoice
from shrinkpoint.schemes.fisher.run_memory import RunMemory
from shrinkpoint.schemes.fisher.steps import QuantizedWeights, StepCandidates
from shrinkpoint.schemes.planner import PlannedSave
from shrinkpoint.schemes.select import unchanged_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class CopyChoice:
    """A copy as it is quantized."""

    points: Mapping[str, QuantizedTensor]  # This rank's points, by local name
    record: dict[str, JSON] = field(repr=False)  # For the manifest
    left_out: tuple[str, ...] = ()  # Global names of weights that no points of the chosen steps reach


@dataclass
class CopyMemory:
    """The facts that a run has learned about a copy.

    Attributes:
        run: its steps, and what predicts its rises.
        quality: its loss when it was last measured; None if it never was.
        starts: rows of its weights as they were when their lattices began in the chain, by local name.
        record: the last one.
    """

    run: RunMemory = field(default_factory=RunMemory)
    quality: float | None = None
    starts: dict[str, RowSample] = field(default_factory=dict, repr=False)
    record: dict[str, JSON] = field(default_factory=dict, repr=False)

    def begin_save(self, model: RunMemory, *, inherits: bool) -> None:
        """Take over from the model's memory what was not measured of the copy.

        Args:
            inherits: there is a checkpoint whose steps may be inherited.
        """
        self.run.begin_save()
        if self.quality is None:
            self.run.num_terms, self.run.terms_error = model.num_terms, model.terms_error
        if not inherits:
            self.run.log_step = None

    def accept(
        self, copy: WeightCopy, choice: StepChoice, unchanged: Mapping[str, QuantizedTensor], error: float
    ) -> CopyChoice:
        """Record a choice, whose weights are not None.

        Args:
            unchanged: points of the weights that equal the parent checkpoint.
            error: of the weights, relative to them.
        """
        assert choice.weights is not None
        self.run.log_step = choice.weights.log_step
        self.record = {
            "tensors": len(copy.global_names),
            "error": round(error, 6),
            "rise": finite_or_text(choice.rise),
            "measured": choice.rise is not None,
            "predicted": None if self.run.num_terms is None else self.run.num_terms * choice.weights.curvature_term,
        }
        points = {**choice.weights.points, **unchanged}
        return CopyChoice(points, self._record(copy, choice.trials), choice.left_out)

    def keep_frozen(self, copy: WeightCopy, save: PlannedSave) -> CopyChoice | None:
        """Record that a copy has not moved: its points, and what is known of them, stay; None if it has."""
        points = frozen_points(copy, save.state, save.tensors, save.reference)
        if points is None:
            return None
        return CopyChoice(points, self._record(copy, []))

    def _record(self, copy: WeightCopy, trials: list[JSON]) -> dict[str, JSON]:
        return self.to_json() | {"distance": round(copy.distance, 4), "tried": trials}

    def to_json(self) -> dict[str, JSON]:
        """The part of an entry of a manifest from which `from_loss` continues."""
        return {**self.record, "quality": self.quality, **self.run.to_json()}

    @classmethod
    def from_loss(cls, loss: Mapping[str, JSON]) -> dict[str, CopyMemory]:
        """The memories that the `loss` of a manifest records, by name of a copy; any entry may be of no use."""
        copies = loss.get("copies")
        memories: dict[str, CopyMemory] = {}
        for name, record in copies.items() if isinstance(copies, dict) else ():
            if isinstance(record, dict):
                quality = record.get("quality")
                is_known = isinstance(quality, float) and math.isfinite(quality)
                kept = {
                    key: record[key] for key in ("tensors", "error", "rise", "measured", "predicted") if key in record
                }
                memories[name] = cls(RunMemory.from_json(record, None), quality if is_known else None, record=kept)
        return memories


@dataclass(frozen=True)
class CopyQuantizer:
    """Quantizes the copies of one state.

    Attributes:
        save: the state.
        find_curvatures: the curvatures of weights of the model, by local name; a collective.
        lossy_restores, seed: of the dither.
    """

    save: PlannedSave
    find_curvatures: Callable[[GlobalWeights], Mapping[str, Curvature]]
    lossy_restores: int
    seed: int

    def quantize(
        self, copy: WeightCopy, memory: CopyMemory, objective: Objective, metric: DegradationMetric | None
    ) -> CopyChoice | None:
        """Choose a step size and quantize; None if none keeps the loss of the copy. A collective.

        Args:
            metric: of the copy; None if nothing is measured.
        """
        save = self.save
        unchanged = unchanged_tensors(copy.sources, save.state, save.reference, save.tensors)
        candidates = self._candidates(copy, memory, unchanged)

        def measure(quantized: QuantizedWeights, *, mirrored: bool = False) -> Degradation:
            assert metric is not None
            return metric.degradation(quantized.mirrored_values(candidates.weights) if mirrored else quantized.values)

        no_bits = StateBits(math.inf, 0.0, is_first=False)  # a ratio is that of the model's weights
        choice = objective.choose(candidates, memory.run, None if metric is None else measure, no_bits)
        if choice.weights is None or (metric is not None and metric.failure is not None):
            return None
        memory.starts = candidates.lattice_starts(choice.weights)
        memory.quality = memory.quality if metric is None else metric.baseline.value
        points = {name: x for name, x in choice.weights.points.items() if isinstance(x, LatticeTensor)}
        return memory.accept(copy, choice, unchanged, relative_error(points, save.state, save.tensors))

    def _candidates(
        self, copy: WeightCopy, memory: CopyMemory, unchanged: Mapping[str, QuantizedTensor]
    ) -> StepCandidates:
        """The weights of a copy but for unchanged ones, with the curvature of the model's weights."""
        state, tensors, evaluator = self.save.state, self.save.tensors, self.save.evaluator
        kept = tensors.union(unchanged)
        moved = {name: state.tensors[name] for name in copy.sources if name not in unchanged}
        names = [name for name in copy.global_names if name not in kept]
        casts = self.save.selection.cast_sources
        sources = {name: casts.get(weight, weight) for name, weight in copy.sources.items()}
        models = {name: state.tensors[name] for name in sources.values()}
        sums = self.save.selection.sums
        curvatures = self.find_curvatures(GlobalWeights(tensors, models, sorted(tensors.union(models)), sums))
        layer_types = {} if evaluator is None else evaluator.layer_types
        return StepCandidates(
            GlobalWeights(tensors, moved, names, copy.sums),
            {name: replace(curvatures[sources[name]], first=None) for name in moved},  # the slope is the model's own
            self.save.reference,
            memory.run.log_step,
            self.lossy_restores,
            self.seed,
            {name: layer_types[weight] for name, weight in copy.sources.items() if weight in layer_types},
            memory.starts,
        )


def frozen_points(
    copy: WeightCopy, state: FlatState, tensors: GlobalTensors, reference: Reference | None
) -> dict[str, QuantizedTensor] | None:
    """The points that the parent checkpoint has of a copy, if all values round to them still; a collective.

    That is so of a reference that nothing trains. Where a sample of a copy has moved, nothing more is compared.

    Returns:
        By local name; None if some have moved.
    """
    points = dict[str, QuantizedTensor]()
    for name in copy.sources:
        parent = None if reference is None else reference.quantized.get(name)
        if isinstance(parent, LatticeTensor) and parent.codes.shape == state.tensors[name].shape:
            points[name] = parent
    names = {*copy.global_names}
    unmoved = {n: n in points and _is_sample_unmoved(n, state.tensors[n], tensors, reference) for n in copy.sources}
    if tensors.tensors_where_all(unmoved) != names:
        unchanged = unchanged_tensors(copy.sources, state, reference, tensors)
        return unchanged if tensors.tensors_where_all({n: n in unchanged for n in copy.sources}) == names else None

    def rounds_to_parent(name: str, threads: int) -> bool:
        parent = points[name]
        assert isinstance(parent, LatticeTensor)
        found = quantize_to_lattice(state.tensors[name], parent.lattice, threads=threads)
        return found is not None and torch.equal(found.codes.cpu().short(), parent.codes.cpu().short())

    flags = map_tensors(rounds_to_parent, {name: state.tensors[name] for name in copy.sources})
    return points if tensors.tensors_where_all(flags) == names else None


def _is_sample_unmoved(name: str, tensor: Tensor, tensors: GlobalTensors, reference: Reference | None) -> bool:
    """True if the sampled rows of a tensor are what they were at the parent's save, before they were quantized."""
    rows = tensors.local_shards[name].spec.sampled_rows(MAX_SAMPLED_VALUES)
    before = None if reference is None else reference.original_rows(name, tuple(tensor.shape), rows)
    return before is not None and torch.equal(as_matrix(tensor)[rows].cpu(), before.cpu())


def relative_error(points: Mapping[str, LatticeTensor], state: FlatState, tensors: GlobalTensors) -> float:
    """The error of points relative to the weights, as norms, on a sample of the rows; a collective."""

    def squares(name: str) -> tuple[float, float]:
        rows = tensors.local_shards[name].spec.sampled_rows(MAX_SAMPLED_VALUES)
        own = as_matrix(state.tensors[name])[rows].to("cpu", torch.float64)
        decoded = points[name].dequantize_rows(rows, torch.float32)
        return float((decoded.cpu() - own).square().sum()), float(own.square().sum())

    parts = [squares(name) for name in points if name in tensors.primary]
    error, total = tensors.collectives.sum_over_ranks(sum(e for e, _ in parts), sum(t for _, t in parts))
    return math.sqrt(error / total) if total else 0.0
