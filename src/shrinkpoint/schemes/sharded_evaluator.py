"""Evaluates trial values of a model whose parameters are sharded over ranks: all ranks evaluate it together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.layer_types import layer_types_of_model
from shrinkpoint.schemes.evaluate import (
    Evaluate,
    ModelStateGuard,
    Reading,
    TrialEvaluator,
    call_evaluate,
    iter_modules,
    strip_wrapper_prefix,
)
from shrinkpoint.sharding.global_tensors import GlobalTensors, matches_parameter, recorder_values
from shrinkpoint.tensors.flat_state import FlatState


class ShardedModelEvaluator(TrialEvaluator):
    """Evaluates a model whose parameters are sharded over ranks (FSDP2, tensor parallelism), or copied on all of them.

    `evaluate` is called on all ranks at the same time, so it may use collectives, as a forward pass of such a model
    does. Its results are averaged over ranks: each may measure its own batches. An `evaluate` that raises on one rank
    alone leaves the others waiting in the collective that they have begun.

    Args:
        state: this rank's tensors, which share memory with its part of the model.
        evaluate: the user's function; None if nothing is measured.
        model: a module, or a dict or list of modules; None if it is unknown.

    Attributes:
        quantizable: names of the tensors that are parameters; None, which is all, without a model.
    """

    def __init__(self, state: FlatState, evaluate: Evaluate | None = None, model: Any = None) -> None:
        super().__init__(state, evaluate or _never_called)
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
        quantizable = set()
        for parameter, layer_type in self._parameters():
            names = self._names_by_address.get(_local(parameter).data_ptr(), [])
            quantizable.update(names)
            self.layer_types |= {} if layer_type is None else dict.fromkeys(names, layer_type)
        self.quantizable = frozenset(quantizable)

    def join(self, global_tensors: GlobalTensors) -> None:
        """Connect the evaluators of all ranks; a collective, to be called before anything is evaluated.

        Raises:
            PolicyError: something is to be measured, and what is saved shares no memory with a model, or a rank has a
                parameter that only another rank saves, so that it would not get trial values; on every rank.
        """
        self._global_tensors = global_tensors
        if not self._measures:
            return
        reports = global_tensors.all_gather((bool(self.quantizable), self._find_remote_copy(global_tensors)))
        if not any(has_parameters for has_parameters, _ in reports):
            found, do = "no weight that is a parameter of the model in memory", "say which model is saved"
            raise PolicyError("evaluate", found=found, expected="tensors that share memory with it", do=do)
        copied = next((name for _, name in reports if name is not None), None)
        if copied is not None:
            found, do = "copies of it on ranks that do not save it", "say how much may be lost without measuring"
            raise PolicyError(copied, found=found, expected="a model in parts, each on one rank", do=do)

    def _find_remote_copy(self, global_tensors: GlobalTensors) -> str | None:
        """The global name of a parameter that this rank has and only another rank saves; None if there is none."""
        for module in self._modules:
            for name, parameter in module.named_parameters():
                local = _local(parameter)
                if local.numel() and local.data_ptr() not in self._names_by_address:
                    plain_name = strip_wrapper_prefix(name)
                    for global_name in global_tensors.shapes:
                        if matches_parameter(global_name, plain_name):
                            return global_name
        return None

    def recorder_values(self, recordings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a gradient recorder has of this rank's tensors, by their local names."""
        assert self._global_tensors is not None
        plain_names = {strip_wrapper_prefix(name): value for name, value in recordings.items()}
        return recorder_values(self._global_tensors, plain_names, self._state)

    def evaluate(self, values: Mapping[str, Tensor]) -> Reading:
        """Evaluate the model with these values, as `TrialEvaluator.evaluate`; a collective that averages over ranks."""
        assert self._global_tensors is not None
        guard = self._guard or self._make_guard()
        with torch.no_grad():
            try:
                guard.clear_gradients()
                for name, value in values.items():
                    if self.quantizable is not None and name in self.quantizable:
                        self._state.tensors[name].copy_(value)
                self._reshard()
                reading = call_evaluate(self._evaluate, self._model)
            finally:
                self._reshard()
                guard.restore()
        return _mean(self._global_tensors.all_gather(reading))

    def _make_guard(self) -> ModelStateGuard:
        buffers = {x.data_ptr(): x for module in self._modules for x in map(_local, module.buffers())}
        weights = {self._state.tensors[name].data_ptr(): self._state.tensors[name] for name in self.quantizable or ()}
        return _ShardedModelGuard((buffers | weights).values(), self._modules)

    def _reshard(self) -> None:
        """Drop the gathered weights of a forward pass, which the next one would use instead of the shards."""
        for module in self._modules:
            for part in module.modules():
                reshard = getattr(part, "reshard", None)
                if callable(reshard):
                    reshard()

    def _parameters(self) -> Iterator[tuple[Tensor, str | None]]:
        for module in self._modules:
            layer_types = layer_types_of_model(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield parameter, layer_types.get(name)


class _ShardedModelGuard(ModelStateGuard):
    """A guard that leaves the memory of parameters alone: a sharded parameter has none of its own."""

    def __init__(self, tensors: Any, modules: list[nn.Module]) -> None:
        super().__init__(tensors, ())
        self._modes = [(part, part.training) for module in modules for part in module.modules()]
        self._gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        for part, training in self._modes:
            part.training = training
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        super().restore()


def _local(x: Any) -> Tensor:
    """This rank's shard of a parameter."""
    local: Tensor = (x.to_local() if hasattr(x, "to_local") else x).detach()
    return local


def _mean(readings: list[Reading]) -> Reading:
    """The mean of the readings of all ranks; the reading itself if they agree.

    Examples of all ranks are joined if each rank has as many, for only then their mean is the mean of the ranks.
    """
    first, *others = readings
    if all(reading.equals(first) for reading in others):
        return first
    examples = [reading.examples for reading in readings if reading.examples is not None]
    are_equal = len(examples) == len(readings) and len({example.numel() for example in examples}) == 1
    mean = math.fsum(reading.value for reading in readings) / len(readings)
    return Reading(mean, torch.cat(examples) if are_equal else None)


def _never_called(_: Any) -> float:
    raise AssertionError("nothing is to be measured")
