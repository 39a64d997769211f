"""What a search measures on: the user's `evaluate`, with other values in the weights, after which all is as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.before import Before
from shrinkpoint.schemes.layers import kinds_by_module
from shrinkpoint.schemes.quality import Reading
from shrinkpoint.state import FlatState, unflatten

Evaluate = Callable[[Any], Any]


class Target:
    """A state that is not alive: `evaluate` gets a nest like the one that is saved, with a candidate's values in it.

    Whatever `evaluate` does to the tensors of the state (they may be those of a live model), to the random generators
    or to autograd's mode is undone after every measurement, also when it raises or is interrupted.

    Memory: one copy of the state's tensors while a search runs.

    Args:
        flat: the state that is to be saved.
        evaluate: what the user passed.

    Attributes:
        kinds: the kinds of layers, by name of a tensor, where there is more to go by than the name.
        alive: names of the tensors that a trial reaches; None: all of the state.
    """

    def __init__(self, flat: FlatState, evaluate: Evaluate) -> None:
        self.kinds: dict[str, str] = {}
        self.alive: frozenset[str] | None = None
        self._flat, self._evaluate = flat, evaluate
        self._before: Before | None = None

    def __enter__(self) -> Target:
        self._before = self._taken()
        return self

    def __exit__(self, *_: object) -> None:
        """Put all back once more: the last time may have been interrupted."""
        before, self._before = self._before, None
        if before is not None:
            before.put_back()

    def measure(self, values: Mapping[str, Tensor]) -> Reading:
        """What `evaluate` says of the state with these values in place of its own.

        Args:
            values: by name of a tensor of the state, of its shape and dtype.

        Raises:
            PolicyError: `evaluate` raised, or what it returned is no number.
        """
        before = self._before or self._taken()
        with torch.no_grad():
            try:
                before.without_gradients()
                return measured(self._evaluate, self._argument(values))
            finally:
                before.put_back()

    def _taken(self) -> Before:
        """Of all that `evaluate` may reach."""
        return Before(self._flat.tensors.values(), ())

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        """What `evaluate` is called with."""
        tensors = {
            name: values[name].to(tensor.device) if name in values else tensor
            for name, tensor in self._flat.tensors.items()
        }
        return unflatten(self._flat.tree, tensors, where="a trial")


class ModelTarget(Target):
    """A model that is alive: `evaluate` gets the model itself, a candidate's values in place of its own.

    Only what is measured may be lost, so only the model's parameters are quantized (or their float32 master copies);
    buffers, and whatever else is saved beside the model, stay exact.

    Args:
        flat: the state that is to be saved, which shares memory with the model.
        evaluate: None: the setting is fixed, and nothing will be measured.
        model: a module, or a dict or list of modules: what was passed to be saved.
        prefix: of the names of its tensors in `flat`.

    Attributes:
        names: of parameters, by their name in the model: the name in the state. Of several modules, only names that no
            two of them have; without the prefixes of wrappers.

    Raises:
        PolicyError: `model` is none of these, or its `state_dict` gives copies.
    """

    def __init__(self, flat: FlatState, evaluate: Evaluate | None, model: Any, prefix: str) -> None:
        super().__init__(flat, evaluate or _unasked)
        self._model, self._prefix = model, prefix
        self._modules = [*modules_of(model)]
        if not self._modules:
            found, do = f"a {type(model).__name__}", "pass the module, or choose the setting yourself with config="
            raise PolicyError("model", found=found, expected="a torch.nn.Module that can be evaluated", do=do)
        places = {tensor.data_ptr(): name for name, tensor in flat.tensors.items() if name.startswith(prefix)}
        found_at = [(name, places.get(x.data_ptr()), kind) for name, x, kind in self._parameters() if x.numel()]
        self.alive = frozenset(stored for _, stored, _ in found_at if stored is not None)
        self.kinds = {stored: kind for _, stored, kind in found_at if stored is not None and kind is not None}
        counts = Counter(name for name, _, _ in found_at)
        self.names = {name: stored for name, stored, _ in found_at if stored is not None and counts[name] == 1}
        if evaluate is not None:
            self._check(prefix + name for module in self._modules for name, _ in module.named_parameters())

    def _parameters(self) -> Iterator[tuple[str, Tensor, str | None]]:
        """Name, parameter and kind; a tied parameter under each of its names."""
        for module in self._modules:
            kinds = kinds_by_module(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield unwrapped(name), parameter, kinds.get(name)

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        assert self.alive is not None
        for name, value in values.items():
            if name in self.alive:
                self._flat.tensors[name].copy_(value)
        return self._model

    def _taken(self) -> Before:
        saved = {
            tensor.data_ptr(): tensor for name, tensor in self._flat.tensors.items() if name.startswith(self._prefix)
        }
        buffers = {x.data_ptr(): x for module in self._modules for x in module.buffers()}
        return Before((buffers | saved).values(), self._modules)

    def _check(self, names: Iterable[str]) -> None:
        """Make sure that what is saved under a parameter's name is that parameter, so that a trial changes it."""
        assert self.alive is not None
        for name in names:
            if name in self._flat.tensors and name not in self.alive and self._flat.tensors[name].numel():
                found, do = "a weight that is no parameter of the model in memory", "pass a plain module as model="
                raise PolicyError(name, found=found, expected="a state_dict that shares memory", do=do)


def measured(evaluate: Evaluate, argument: Any) -> Reading:
    """What a user's function says of a model, or of a state; where it has a method `reading`, what that says.

    Raises:
        PolicyError: it raised, or what it returned is neither a number nor one of each example.
    """
    try:
        return Reading.of(getattr(evaluate, "reading", evaluate)(argument))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        expected = "a number, or a 1-D tensor of the examples' losses"
        do = "make it take what is saved (a model, or a state) and return a loss or a score"
        raise PolicyError("evaluate", found=found, expected=expected, do=do) from error


def modules_of(model: Any) -> Iterator[nn.Module]:
    """The modules in a module, or in a nest of them."""
    if isinstance(model, nn.Module):
        yield model
    elif isinstance(model, Mapping):
        for one in model.values():
            yield from modules_of(one)
    elif isinstance(model, list | tuple):
        for one in model:
            yield from modules_of(one)


def unwrapped(name: str) -> str:
    """The name of a parameter in the model, which may have been wrapped (for several devices, or to be compiled)."""
    for prefix in ("module.", "_orig_mod.", "module."):
        name = name.removeprefix(prefix)
    return name


def _unasked(_: Any) -> float:
    raise AssertionError("a fixed setting is not measured")
