"""Evaluates trial values with the user's `evaluate`, restores the model, and compares the results."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shrinkpoint import humanize
from shrinkpoint.errors import PolicyError, error_text, warn_user
from shrinkpoint.progress import Task
from shrinkpoint.quantize.layer_types import layer_types_of_model
from shrinkpoint.schemes.confidence_interval import paired_mean_interval
from shrinkpoint.schemes.influence import InfluenceRecorder, local_shard
from shrinkpoint.sharding.global_tensors import GlobalTensors, recorder_values
from shrinkpoint.tensors.dtypes import as_bits
from shrinkpoint.tensors.flat_state import FlatState, unflatten
from shrinkpoint.tensors.memory import callers_default, is_out_of_memory
from shrinkpoint.tensors.nest import map_nested_tensors
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.tensors.wrappers import unwrapped

_log = logging.getLogger("shrinkpoint")
MEMORY_ADVICE = "free memory, or evaluate on fewer examples at once"
_TABLES = ("_parameters", "_buffers", "_modules")
_KEPT = (bool, int, float, str, tuple, Tensor)  # Attributes of modules that are restored: counters, sizes, schedules


class ModelStateGuard:
    """Saves the state of a model once and restores it after every measurement, so that training does not notice them.

    The state is: values of tensors; classes of modules, what these hold (a forward pass may bind a new buffer), in
    which memory (`half` exchanges it), gradients, modes and plain attributes (a counter); and the random generators.

    Args:
        tensors: their values are copied.
        modules: with all their submodules.
        reshard: of sharded modules, drops gathered weights before anything is restored. What these modules hold is left
            alone: a sharded parameter has no memory of its own.
    """

    def __init__(
        self, tensors: Iterable[Tensor], modules: Iterable[nn.Module], reshard: Callable[[], None] | None = None
    ) -> None:
        self._rng_state, self._reshard = get_rng_state(), reshard
        self._copies = [(bits, bits.clone()) for bits in map(_stored_bits, tensors)]
        parts = [part for module in modules for part in module.modules()]
        self._modes = [(part, part.training) for part in parts]
        parameters = dict.fromkeys(parameter for part in parts for parameter in part.parameters(recurse=False))
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        plain = [] if reshard else [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        attributes = [{k: v for k, v in vars(part).items() if isinstance(v, _KEPT)} for part in plain]
        tables = [{name: dict(vars(part)[name]) for name in _TABLES} for part in plain]
        self._bindings = [*zip(plain, map(type, plain), tables, attributes, strict=True)]
        self._memory = [] if reshard else [(x, x.data, x.requires_grad) for x in parameters]

    def clear_gradients(self) -> None:
        """Set all gradients to None, so that `evaluate` cannot add to those of training, or clear them."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        """Restore the state; can be called again after an interruption."""
        if self._reshard is not None:
            self._reshard()
        for module, training in self._modes:
            module.training = training
        for module, kind, tables, attributes in self._bindings:
            if type(module) is not kind:
                module.__class__ = kind
            for name, members in tables.items():
                _rebind(vars(module)[name], members)
            vars(module).update(attributes)
        for parameter, data, requires_grad in self._memory:
            if parameter.data_ptr() != data.data_ptr() or parameter.dtype != data.dtype:
                parameter.data = data
            parameter.requires_grad_(requires_grad)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, copy in self._copies:
                if not torch.equal(tensor, copy):  # a write would increase the version, which other code may watch
                    tensor.copy_(copy)
        torch.clear_autocast_cache()  # within autocast, it has casts of the values of a trial, and without gradients
        set_rng_state(self._rng_state)


def _stored_bits(tensor: Tensor) -> Tensor:
    """The memory of a tensor as integers; of a lazy negation or conjugate, that of its base."""
    tensor = tensor.detach()
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    return as_bits(tensor.conj() if tensor.is_conj() else tensor)


def _rebind(current: dict[str, Any], saved: dict[str, Any]) -> None:
    if list(current) != list(saved) or any(current[name] is not value for name, value in saved.items()):
        current.clear()
        current.update(saved)


TrialValues = Mapping[str, Tensor]
MEASURE_ADVICE = 'Pass evaluate= to a scheme that measures, such as Fisher(budget="1%", evaluate=...)'


@dataclass(frozen=True)
class Reading:
    """The result of `evaluate` for one set of weights.

    Attributes:
        value: the loss or the score; the mean of `examples` if they are known.
        examples: the loss or the score of each example, or batch of equal size; float64 [n], n >= 2, on the CPU. None
            if unknown.
        failure: why nothing could be measured, where `value` is nan for that; "" otherwise.
        advice: what the user can do about the failure.
        unit: the name of what `examples` are: examples or batches.
    """

    value: float
    examples: Tensor | None = field(default=None, repr=False)
    failure: str = ""
    advice: str = MEASURE_ADVICE
    unit: str = "examples"

    @classmethod
    def from_answer(cls, answer: Any) -> Reading:
        """Convert what a user's function returned: a number, or the losses or scores of examples.

        Args:
            answer: a number of Python, numpy or torch; or a 1-D tensor, a 1-D numpy array or a list of numbers.

        Raises:
            TypeError, ValueError, RuntimeError: it is neither.
        """
        if isinstance(answer, Reading):
            return answer
        if answer is None:
            raise TypeError("evaluate returned None")
        if isinstance(answer, list):  # no tuple: that may be a loss with something else
            answer = torch.tensor([float(number) for number in answer], dtype=torch.float64, device="cpu")
        elif isinstance(answer, np.ndarray):
            answer = torch.from_numpy(np.array(answer, dtype=np.float64, order="C"))
        if isinstance(answer, Tensor) and answer.dim() == 1 and answer.numel() > 1:
            examples = answer.detach().to("cpu", torch.float64)
            return cls(float(examples.mean()), examples)
        return cls(float(answer.detach() if isinstance(answer, Tensor) else answer))

    @classmethod
    def of_batches(cls, losses: Sequence[float]) -> Reading:
        """The mean of the losses of batches, at least one."""
        examples = torch.tensor(losses, dtype=torch.float64, device="cpu") if len(losses) > 1 else None
        return cls(sum(losses) / len(losses), examples, unit="batches")

    @property
    def is_finite(self) -> bool:
        """True if the value is neither nan nor infinite."""
        return math.isfinite(self.value)

    def equals(self, other: Reading) -> bool:
        """True if both have the same examples, or the same value if examples are unknown; nan equals nothing."""
        if self.examples is not None and other.examples is not None:
            return torch.equal(self.examples, other.examples)
        return self.value == other.value


@dataclass(frozen=True)
class Degradation:
    """The difference by which trial weights are worse than those of the state, in the unit of `evaluate`.

    Attributes:
        rise: positive if they are worse; nan if it could not be measured.
        interval: the 95% confidence interval of the rise on other examples of the same kind; None if unknown.
        differences: the rise of each example; None if unknown.
    """

    rise: float
    interval: tuple[float, float] | None = None
    differences: Tensor | None = field(default=None, repr=False)


class DegradationMetric:
    """Measures the degradation that trial values cause.

    Args:
        evaluate: evaluates with trial values in place of the state's own.
        higher_is_better: `evaluate` returns a score, not a loss.
        task: counts the evaluations; None: nothing does.

    Attributes:
        higher_is_better: as given.
        baseline: the reading of the unchanged weights; the caller sets it before the first comparison.
        failure: the first reading that failed; nothing is evaluated after it. None: none has failed.
        first_trial: the first reading of other weights that was compared with it.
        least_rise: of all degradations; negative if one was better than the baseline.
    """

    def __init__(
        self, evaluate: Callable[[TrialValues], Reading], *, higher_is_better: bool, task: Task | None = None
    ) -> None:
        self._evaluate, self.higher_is_better, self._task = evaluate, higher_is_better, task
        self._sign = -1.0 if higher_is_better else 1.0
        self.baseline = Reading(math.nan)
        self.failure: Reading | None = None
        self.first_trial: Reading | None = None
        self.least_rise = 0.0

    def evaluate(self, values: TrialValues) -> Reading:
        """The reading for these values; once a reading has failed, that one."""
        if self.failure is not None:
            return self.failure
        reading = self._evaluate(values)
        if reading.failure:
            self.failure = reading
        if self._task is not None:
            self._task.advance()
        return reading

    def of_other_weights(self, complete: Callable[[TrialValues], TrialValues]) -> DegradationMetric:
        """A metric of other weights in the model, measured at once; `complete` adds those that a trial leaves out."""
        other = DegradationMetric(
            lambda values: self._evaluate(complete(values)), higher_is_better=self.higher_is_better, task=self._task
        )
        other.baseline = other.evaluate({})
        return other

    @property
    def scale(self) -> float:
        """The number that rises are divided by to make them relative."""
        return scale_of(self.baseline.value)

    def rise_of(self, reading: Reading) -> float:
        """The difference by which a reading is worse than the baseline; negative if it is better."""
        return self._sign * (reading.value - self.baseline.value)

    def degradation(self, values: TrialValues) -> Degradation:
        """The degradation that these values cause."""
        reading = self.evaluate(values)
        self.first_trial = self.first_trial or reading
        before, after = self.baseline.examples, reading.examples
        rise = self.rise_of(reading)
        if rise == -math.inf:  # no weights are that much better: something broke
            return Degradation(math.nan)
        self.least_rise = min(self.least_rise, rise)  # which it stays where the rise is nan
        if before is None or after is None or before.shape != after.shape:
            return Degradation(rise)
        interval = paired_mean_interval(after, before) if self.higher_is_better else paired_mean_interval(before, after)
        return Degradation(rise, interval, self._sign * (after - before))


def scale_of(baseline: float) -> float:
    """The number that rises are relative to: the magnitude of the baseline; 1 if it is zero, as an accuracy may be."""
    return abs(baseline) or 1.0


Evaluate = Callable[[Any], Any]


class TrialEvaluator:
    """Evaluates a state without a live model: `evaluate` gets a nest like the one that is saved, with trial values.

    Whatever `evaluate` does to the tensors of the state (they may be those of a live model), to the random generators
    or to autograd's mode is undone after every measurement, also when it raises or is interrupted.

    Memory: one copy of the state's tensors while a search runs.

    Args:
        state: the state that is to be saved.
        evaluate: the user's function.

    Attributes:
        layer_types: types of layers by name of a tensor, if they are known from a module.
        quantizable: names of the tensors that trial values reach; None for all of the state.
        frozen: names of the model's parameters that take no gradients.
        copied: names of those of which other ranks have copies that they do not save: no trial values reach these.
        recordings: what a gradient recorder had when the state was saved, by name in the model; None: plan at once,
            with what it has then.
        influence: records which weights `evaluate` reads and uses; None: nothing does.
    """

    def __init__(self, state: FlatState, evaluate: Evaluate) -> None:
        self.recordings: Mapping[str, Tensor] | None = None
        self.influence: InfluenceRecorder | None = None
        self.layer_types: dict[str, str] = {}
        self.quantizable: frozenset[str] | None = None
        self.frozen: frozenset[str] = frozenset()
        self.copied: frozenset[str] = frozenset()
        self._state, self._evaluate = state, evaluate
        self._guard: ModelStateGuard | None = None

    def __enter__(self) -> TrialEvaluator:
        try:
            self._guard = self._make_guard()
        except Exception as error:
            if not is_out_of_memory(error):  # then `evaluate` has no memory for a guard either, and says so
                raise
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the state once more: the last measurement may have been interrupted."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.restore()

    def evaluate(self, values: Mapping[str, Tensor]) -> Reading:
        """Evaluate the state with these values in place of its own.

        An `evaluate` that raises, returns no number, or runs out of memory does not end the run that saves: its error
        is the failure of the reading.

        Args:
            values: by name of a tensor of the state, of its shape and dtype.
        """
        try:
            guard = self._guard or self._make_guard()
            with torch.no_grad():
                try:
                    guard.clear_gradients()
                    argument = self._argument(values)
                    with self.influence or nullcontext():
                        reading = call_evaluate(self._evaluate, argument)
                    if self.influence is not None:
                        self.influence.note_answer(reading.value)
                    return reading
                finally:
                    guard.restore()
        except PolicyError as error:
            _log.info("evaluate failed", exc_info=True)
            return Reading(math.nan, failure=error.found, advice=error.do)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return Reading(math.nan, failure=error_text(error), advice=MEMORY_ADVICE)

    def recorder_values(self, recordings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A gradient recorder's values by name in the state, given those by name in the model; none without a model."""
        return {}

    def _make_guard(self) -> ModelStateGuard:
        """A guard of everything that `evaluate` may change."""
        return ModelStateGuard(self._state.tensors.values(), ())

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        tensors = {
            name: values[name].to(tensor.device) if name in values else tensor
            for name, tensor in self._state.tensors.items()
        }
        return unflatten(self._state.tree, tensors, where="a trial")


class ModelEvaluator(TrialEvaluator):
    """Evaluates a live model: `evaluate` gets the model itself, with trial values in place of its own.

    Only what is measured may be lost, so only the model's parameters are quantized (or their float32 master copies);
    buffers, and whatever else is saved beside the model, stay exact.

    Args:
        state: the state that is to be saved, which shares memory with the model.
        evaluate: the user's function; None if nothing is measured, because the setting is fixed.
        model: a module, or a dict or list of modules, as it was passed to be saved.
        prefix: precedes the names of the model's tensors in `state`.

    Attributes:
        state_names: the name in the state by the name in the model of each parameter, without the prefixes of wrappers;
            without names that several modules have.

    Raises:
        PolicyError: `model` is none of these, or its `state_dict` gives copies.
    """

    def __init__(self, state: FlatState, evaluate: Evaluate | None, model: Any, prefix: str) -> None:
        super().__init__(state, evaluate or never_called)
        self._model, self._prefix = model, prefix
        self._modules = [*iter_modules(model)]
        if not self._modules:
            found, do = f"a {type(model).__name__}", "pass the module, or a setting as config="
            raise PolicyError("model", found=found, expected="a torch.nn.Module that can be evaluated", do=do)
        names_by_address = {
            tensor.data_ptr(): name for name, tensor in state.tensors.items() if name.startswith(prefix)
        }
        parameters = [
            (name, names_by_address.get(parameter.data_ptr()), parameter, layer_type)
            for name, parameter, layer_type in _iter_parameters(self._modules)
            if parameter.numel()
        ]
        saved = [(name, stored, x, layer_type) for name, stored, x, layer_type in parameters if stored is not None]
        counts = Counter(name for name, *_ in parameters)
        self.quantizable = frozenset(stored for _, stored, *_ in saved)
        self.frozen = frozenset(stored for _, stored, x, _ in saved if not x.requires_grad)
        self.layer_types = {stored: layer_type for _, stored, _, layer_type in saved if layer_type is not None}
        self.state_names = {name: stored for name, stored, *_ in saved if counts[name] == 1}
        stored_buffers = (names_by_address.get(x.data_ptr()) for m in self._modules for x in m.buffers() if x.numel())
        self._buffers = frozenset(filter(None, stored_buffers))
        if evaluate is not None:
            self._check_shares_memory(
                prefix + name for module in self._modules for name, _ in module.named_parameters()
            )

    def recorder_values(self, recordings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = {strip_wrapper_prefix(name): value for name, value in recordings.items()}
        return {self.state_names[name]: value for name, value in values.items() if name in self.state_names}

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        assert self.quantizable is not None
        for name, value in values.items():
            if name in self.quantizable or name in self._buffers:
                self._state.tensors[name].copy_(value)
        return map_nested_tensors(self._model, _without_replicas, nn.Module)

    def _make_guard(self) -> ModelStateGuard:
        saved = {
            tensor.data_ptr(): tensor for name, tensor in self._state.tensors.items() if name.startswith(self._prefix)
        }
        buffers = {x.data_ptr(): x for module in self._modules for x in module.buffers()}
        return ModelStateGuard((buffers | saved).values(), self._modules)

    def _check_shares_memory(self, names: Iterable[str]) -> None:
        """Check that what is saved under a parameter's name is that parameter, so that trial values reach it.

        Where no parameter is saved, what has the shape of one under another name is a copy.
        """
        assert self.quantizable is not None
        if not self.quantizable:
            shapes = {tensor.shape for module in self._modules for tensor in module.parameters()}
            floats = (name for name, x in self._state.tensors.items() if x.is_floating_point() and x.shape in shapes)
            names = (name for name in floats if name.startswith(self._prefix) and name not in self._buffers)
        for name in names:
            if name in self._state.tensors and name not in self.quantizable and self._state.tensors[name].numel():
                found, do = "a weight that is no parameter of the model in memory", "pass a plain module as model="
                raise PolicyError(name, found=found, expected="a state_dict that shares memory", do=do)


class ShardedModelEvaluator(TrialEvaluator):
    """Evaluates a model whose parameters are sharded over ranks (FSDP2, tensor parallelism), or copied on all of them.

    `evaluate` is called on all ranks at the same time, so it may use collectives, as a forward pass of such a model
    does. Its results are averaged over ranks: each may measure its own batches. If it raises on one rank, the reading
    of all ranks has failed; but a rank that waits for that one in a collective of a forward pass goes on waiting.

    Args:
        state: this rank's tensors, which share memory with its part of the model.
        evaluate: the user's function; None if nothing is measured.
        model: a module, or a dict or list of modules; None if it is unknown.

    Attributes:
        quantizable: names of the tensors that are parameters; None, which is all, without a model.
    """

    def __init__(self, state: FlatState, evaluate: Evaluate | None = None, model: Any = None) -> None:
        super().__init__(state, evaluate or never_called)
        self._model, self._modules = model, [*iter_modules(model)]
        self._global_tensors: GlobalTensors | None = None
        self._measures = evaluate is not None
        self._names_by_address: dict[int, list[str]] = {}
        if model is None:
            return
        self._reshard()  # so that a module's parameters are its shards
        for name, tensor in state.tensors.items():
            if tensor.numel():
                self._names_by_address.setdefault(tensor.data_ptr(), []).append(name)  # tied tensors share an address
        quantizable, frozen = set[str](), set[str]()
        for _, parameter, layer_type in _iter_parameters(self._modules):
            names = self._names_by_address.get(local_shard(parameter).data_ptr(), [])
            quantizable.update(names)
            frozen.update(() if parameter.requires_grad else names)
            self.layer_types |= {} if layer_type is None else dict.fromkeys(names, layer_type)
        self.quantizable, self.frozen = frozenset(quantizable), frozenset(frozen)

    def join(self, global_tensors: GlobalTensors) -> None:
        """Connect the evaluators of all ranks; a collective, to be called before anything is evaluated.

        A weight of which other ranks have copies that they do not save, such as a norm in tensor parallelism, stays
        exact: these copies would not get trial values.

        Raises:
            PolicyError: something is to be measured, and what is saved shares no memory with a model, or there is no
                weight without such copies; on every rank.
        """
        self._global_tensors = global_tensors
        if not self._measures:
            return
        gather = global_tensors.collectives.all_gather
        if not any(gather(bool(self.quantizable))):
            found, do = "no weight that is a parameter of the model in memory", "pass the saved model as model="
            raise PolicyError("evaluate", found=found, expected="tensors that share memory with the model", do=do)
        names: dict[str, Sequence[str]] = {
            name: self._names_by_address.get(local.data_ptr(), ())
            for module in self._modules
            for name, parameter in module.named_parameters()
            if (local := local_shard(parameter)).numel()
        }
        copied = sorted(set[str]().union(*gather({name for name, saved in names.items() if not saved})))
        self.copied = frozenset(saved for name in copied for saved in names.get(name, ()))
        self.quantizable = (self.quantizable or frozenset()) - self.copied
        if not any(gather(bool(self.quantizable))):
            found, do = "copies of it on ranks that do not save it", "pass a scheme that measures nothing"
            raise PolicyError(copied[0], found=found, expected="a model in parts, each on one rank", do=do)
        if matrices := sorted(name for name in self.copied if self._state.tensors[name].dim() > 1):
            warn_user(f"weights that several ranks hold stay exact: {humanize.names(matrices)}. Shard them")

    def recorder_values(self, recordings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Recorded gradients of this rank's tensors, by their local names."""
        assert self._global_tensors is not None
        plain_names = {strip_wrapper_prefix(name): value for name, value in recordings.items()}
        return recorder_values(self._global_tensors, plain_names, self._state)

    def evaluate(self, values: Mapping[str, Tensor]) -> Reading:
        """Evaluate the model with these values, as `TrialEvaluator.evaluate`; a collective that averages over ranks."""
        assert self._global_tensors is not None
        # Examples of all ranks are joined if each rank has as many: only then their mean is the mean of the ranks.
        readings = self._global_tensors.collectives.all_gather(super().evaluate(values))
        first, *rest = readings
        if all(reading.equals(first) for reading in rest):
            return first
        examples = [reading.examples for reading in readings if reading.examples is not None]
        are_equal = len(examples) == len(readings) and len({example.numel() for example in examples}) == 1
        mean = math.fsum(reading.value for reading in readings) / len(readings)
        failed = next((reading for reading in readings if reading.failure), None)
        return failed or Reading(mean, torch.cat(examples) if are_equal else None, unit=first.unit)

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        for name, value in values.items():
            if self.quantizable is not None and name in self.quantizable:
                self._state.tensors[name].copy_(value)
        self._reshard()
        return self._model

    def _make_guard(self) -> ModelStateGuard:
        buffers = {x.data_ptr(): x for module in self._modules for x in map(local_shard, module.buffers())}
        weights = {self._state.tensors[name].data_ptr(): self._state.tensors[name] for name in self.quantizable or ()}
        return ModelStateGuard((buffers | weights).values(), self._modules, self._reshard)

    def _reshard(self) -> None:
        """Drop the gathered weights of a forward pass, which the next one would use instead of the shards."""
        for module in self._modules:
            for part in module.modules():
                reshard = getattr(part, "reshard", None)
                if callable(reshard):
                    reshard()


def call_evaluate(evaluate: Evaluate, argument: Any) -> Reading:
    """Call a user's function, or its method `reading` if it has one, with a model or a state.

    Raises:
        PolicyError: it raised, or returned neither a number nor a number for each example.
    """
    try:
        torch.clear_autocast_cache()  # within autocast, it has casts of the values of before
        with callers_default():
            return Reading.from_answer(getattr(evaluate, "reading", evaluate)(argument))
    except Exception as error:
        expected = "a number, or a 1-D tensor, array or list of the examples' losses"
        do = "make evaluate take what is saved (a model, or a state) and return a loss or a score"
        do = MEMORY_ADVICE if is_out_of_memory(error) else do
        raise PolicyError("evaluate", found=error_text(error), expected=expected, do=do) from error


def _without_replicas(module: nn.Module) -> nn.Module:
    """A module without DistributedDataParallel around it: one rank measures, and its forward pass waits for others."""
    is_replicated = isinstance(getattr(module, "_orig_mod", module), nn.parallel.DistributedDataParallel)
    return unwrapped(module) if is_replicated else module


def iter_modules(model: Any) -> Iterator[nn.Module]:
    """The modules in a module, or in a nest of them."""
    if isinstance(model, nn.Module):
        yield model
    elif isinstance(model, Mapping):
        for part in model.values():
            yield from iter_modules(part)
    elif isinstance(model, list | tuple):
        for part in model:
            yield from iter_modules(part)


def _iter_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor, str | None]]:
    """Name without wrappers, parameter and type of layer; a tied parameter under each of its names."""
    for module in modules:
        layer_types = layer_types_of_model(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield strip_wrapper_prefix(name), parameter, layer_types.get(name)


def strip_wrapper_prefix(name: str) -> str:
    """The name of a parameter in the model before it was wrapped, for several devices or to be compiled."""
    for prefix in ("module.", "_orig_mod.", "module."):
        name = name.removeprefix(prefix)
    return name


def never_called(_: Any) -> float:
    raise AssertionError("a fixed setting is not measured")
