"""What a search measures on where every rank has a part of the model: all ranks evaluate it together."""

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


class ShardTarget(TrialEvaluator):
    """A model whose parameters are on several ranks (FSDP2, tensor parallelism), or copied on all of them.

    `evaluate` is called on all ranks at the same time, so it may use collectives, as a forward pass of such a model
    does. What ranks return is averaged: each may measure its own batches. An `evaluate` that raises on one rank alone
    leaves the others in whatever collective they have begun.

    Args:
        flat: this rank's tensors, which share memory with its part of the model.
        evaluate: None: nothing will be measured.
        model: a module, or a dict or list of modules; None: it is not known.

    Attributes:
        quantizable: names of the tensors that are parameters; None where there is no model: all of them.
    """

    def __init__(self, flat: FlatState, evaluate: Evaluate | None = None, model: Any = None) -> None:
        super().__init__(flat, evaluate or _unasked)
        self._model, self._modules = model, [*iter_modules(model)]
        self._wholes: GlobalTensors | None = None
        self._measures = evaluate is not None
        self._places: dict[int, list[str]] = {}
        if model is None:
            return
        self._let_go()  # so that a module's parameters are the parts
        for name, x in flat.tensors.items():
            if x.numel():
                self._places.setdefault(x.data_ptr(), []).append(name)  # a tied one has several
        for parameter, kind in self._parameters():
            for name in self._places.get(_local(parameter).data_ptr(), []):
                self.layer_types |= {} if kind is None else {name: kind}
        ours = {_local(parameter).data_ptr() for parameter, _ in self._parameters()}
        self.quantizable = frozenset(name for place, names in self._places.items() if place in ours for name in names)

    def join(self, wholes: GlobalTensors) -> None:
        """Take part in what all ranks do together.

        Raises:
            PolicyError: something is to be measured, and what is saved shares no memory with a model, or a rank has a
                parameter that only another one saves, so that it would not have the trial's values; on every rank.
        """
        self._wholes = wholes
        if not self._measures:
            return
        told = wholes.all_gather((bool(self.quantizable), self._copied(wholes)))
        if not any(alive for alive, _ in told):
            found, do = "no weight that is a parameter of the model in memory", "say which model is saved"
            raise PolicyError("evaluate", found=found, expected="tensors that share memory with it", do=do)
        copied = next((one for _, one in told if one is not None), None)
        if copied is not None:
            found, do = "copies of it on ranks that do not save it", "say how much may be lost without measuring"
            raise PolicyError(copied, found=found, expected="a model in parts, each on one rank", do=do)

    def _copied(self, wholes: GlobalTensors) -> str | None:
        """A parameter that this rank has, and another one saves."""
        for module in self._modules:
            for name, parameter in module.named_parameters():
                local = _local(parameter)
                if local.numel() and local.data_ptr() not in self._places:
                    found = (title for title in wholes.shapes if matches_parameter(title, strip_wrapper_prefix(name)))
                    title = next(found, None)
                    if title is not None:
                        return title
        return None

    def recorded(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a recorder has of this rank's tensors, by their names."""
        assert self._wholes is not None
        return recorder_values(self._wholes, {strip_wrapper_prefix(name): x for name, x in found.items()}, self._state)

    def evaluate(self, values: Mapping[str, Tensor]) -> Reading:
        """See `Target`; a collective: the mean of what all ranks measure."""
        assert self._wholes is not None
        before = self._guard or self._make_guard()
        with torch.no_grad():
            try:
                before.clear_gradients()
                for name, value in values.items():
                    if self.quantizable is not None and name in self.quantizable:
                        self._state.tensors[name].copy_(value)
                self._let_go()
                found = call_evaluate(self._evaluate, self._model)
            finally:
                self._let_go()
                before.restore()
        return _mean(self._wholes.all_gather(found))

    def _make_guard(self) -> ModelStateGuard:
        buffers = {x.data_ptr(): x for module in self._modules for x in map(_local, module.buffers())}
        ours = {self._state.tensors[name].data_ptr(): self._state.tensors[name] for name in self.quantizable or ()}
        return _Before((buffers | ours).values(), self._modules)

    def _let_go(self) -> None:
        """Whole weights that a forward pass has put together: they would be used again as they are."""
        for module in self._modules:
            for part in module.modules():
                reshard = getattr(part, "reshard", None)
                if callable(reshard):
                    reshard()

    def _parameters(self) -> Iterator[tuple[Tensor, str | None]]:
        for module in self._modules:
            kinds = layer_types_of_model(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield parameter, kinds.get(name)


class _Before(ModelStateGuard):
    """The same without the memory that parameters lie in: those that are in parts have none of their own."""

    def __init__(self, tensors: Any, modules: list[nn.Module]) -> None:
        super().__init__(tensors, ())
        self._modes = [(part, part.training) for module in modules for part in module.modules()]
        self._held = [(one, one.grad) for module in modules for one in module.parameters()]

    def clear_gradients(self) -> None:
        """See `Before`."""
        for parameter, _ in self._held:
            parameter.grad = None

    def restore(self) -> None:
        """See `Before`."""
        for part, training in self._modes:
            part.training = training
        for parameter, gradient in self._held:
            parameter.grad = gradient
        super().restore()


def _local(x: Any) -> Tensor:
    """This rank's part of a parameter."""
    local: Tensor = (x.to_local() if hasattr(x, "to_local") else x).detach()
    return local


def _mean(found: list[Reading]) -> Reading:
    """Of what ranks measured; what all of them found, exactly, where they agree.

    Examples are those of all ranks, where each has as many: only then their mean is the mean of the ranks'.
    """
    first, *others = found
    if all(one.equals(first) for one in others):
        return first
    each = [one.examples for one in found if one.examples is not None]
    alike = len(each) == len(found) and len({one.numel() for one in each}) == 1
    return Reading(math.fsum(one.value for one in found) / len(found), torch.cat(each) if alike else None)


def _unasked(_: Any) -> float:
    raise AssertionError("nothing is to be measured")
