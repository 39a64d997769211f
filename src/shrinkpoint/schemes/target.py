"""What a search measures on: the user's `evaluate`, with other values in the weights, after which all is as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.layers import kinds_by_module
from shrinkpoint.state import FlatState, unflatten
from shrinkpoint.state.dtypes import raw
from shrinkpoint.state.rng import capture, reinstate

Evaluate = Callable[[Any], Any]


class Target:
    """A state that is not alive: `evaluate` gets a nest like the one that is saved, with a candidate's values in it.

    Whatever `evaluate` does to the tensors of the state (they may be those of a live model), to the random generators
    or to autograd's mode is undone after every measurement, also when it raises.

    Memory: one copy of the state's tensors while a search runs.

    Args:
        flat: the state that is to be saved.
        evaluate: what the user passed.

    Attributes:
        kinds: the kinds of layers, by name of a tensor, where there is more to go by than the name.
        modules: what training modes are put back on.
    """

    def __init__(self, flat: FlatState, evaluate: Evaluate) -> None:
        self.kinds: dict[str, str] = {}
        self.modules: list[nn.Module] = []
        self._flat, self._evaluate = flat, evaluate
        self._before: dict[str, Tensor] = {}

    def __enter__(self) -> Target:
        self._before = {name: raw(tensor.detach()).clone() for name, tensor in self._watched()}
        return self

    def __exit__(self, *_: object) -> None:
        self._before = {}

    def measure(self, values: Mapping[str, Tensor]) -> float:
        """What `evaluate` says of the state with these values in place of its own.

        Args:
            values: by name of a tensor of the state, of its shape and dtype.

        Raises:
            PolicyError: `evaluate` raised, or what it returned is no number.
        """
        with torch.no_grad(), self._undone():
            argument = self._argument(values)
            try:
                return float(self._evaluate(argument))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                do = "make it take what is saved (a model, or a state) and return a loss or a score"
                raise PolicyError("evaluate", found=found, expected="a number", do=do) from error

    def _watched(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors that `evaluate` may reach."""
        return self._flat.tensors.items()

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        """What `evaluate` is called with."""
        tensors = {
            name: values[name].to(tensor.device) if name in values else tensor
            for name, tensor in self._flat.tensors.items()
        }
        return unflatten(self._flat.tree, tensors, where="a trial")

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        generators = capture()
        modes = [(module, module.training) for one in self.modules for module in one.modules()]
        try:
            yield
        finally:
            for name, tensor in self._before.items():
                _put_back(raw(self._flat.tensors[name].detach()), tensor)
            for module, training in modes:
                module.training = training
            reinstate(generators)


class ModelTarget(Target):
    """A model that is alive: `evaluate` gets the model itself, a candidate's values in place of its own.

    Args:
        flat: the state that is to be saved, which shares memory with the model.
        model: a module, or a dict or list of modules: what was passed to be saved.
        prefix: of the names of its tensors in `flat`.

    Raises:
        PolicyError: `model` is none of these, or its `state_dict` gives copies.
    """

    def __init__(self, flat: FlatState, evaluate: Evaluate, model: Any, prefix: str) -> None:
        super().__init__(flat, evaluate)
        self._model, self._prefix = model, prefix
        self.modules = [*_modules(model)]
        if not self.modules:
            found, do = f"a {type(model).__name__}", "pass the module, or choose the setting yourself with config="
            raise PolicyError("model", found=found, expected="a torch.nn.Module that can be evaluated", do=do)
        names = {tensor.data_ptr(): name for name, tensor in flat.tensors.items() if name.startswith(prefix)}
        self.names: dict[str, str] = {}
        """Of parameters, by their name in the model: the name in the state."""
        for module in self.modules:
            kinds = kinds_by_module(module)
            for name, parameter in module.named_parameters():
                stored = names.get(parameter.data_ptr())
                if stored is not None and parameter.numel():
                    self.names[name] = stored
                    if name in kinds:
                        self.kinds[stored] = kinds[name]

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        alive = set(self.names.values())
        for name, value in values.items():
            if name in alive:
                self._flat.tensors[name].copy_(value)
        return self._model

    def _watched(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._flat.tensors.items() if name.startswith(self._prefix))

    def check(self, names: Iterable[str]) -> None:
        """Make sure that these tensors of the state are the model's own, so that a trial changes what is evaluated.

        Raises:
            PolicyError: one is not.
        """
        alive = set(self.names.values())
        for name in names:
            if name not in alive:
                found, do = "a weight that is no parameter of the model in memory", "pass a plain module as model="
                raise PolicyError(name, found=found, expected="a state_dict that shares memory", do=do)


def _modules(model: Any) -> Iterator[nn.Module]:
    if isinstance(model, nn.Module):
        yield model
    elif isinstance(model, Mapping):
        for one in model.values():
            yield from _modules(one)
    elif isinstance(model, list | tuple):
        for one in model:
            yield from _modules(one)


def _put_back(tensor: Tensor, before: Tensor) -> None:
    """Only where something differs: a write would count as a change for whoever watches the tensor's version."""
    if not torch.equal(tensor, before):
        tensor.copy_(before)
