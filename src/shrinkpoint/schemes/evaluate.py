"""Evaluates trial values with the user's `evaluate`, restores the model, and compares the results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.layer_types import layer_types_of_model
from shrinkpoint.tensors.dtypes import as_bits
from shrinkpoint.tensors.flat_state import FlatState, unflatten
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state


class ModelStateGuard:
    """Taken once, put back after every measurement: a loop must not notice that its model was tried out.

    That is: values of tensors; of modules which tensors they hold (a forward pass may bind a new buffer,
    `load_state_dict` new parameters), the memory these lie in (`half` and `to` exchange it), their gradients and their
    training modes; and the random generators.

    Args:
        tensors: whose values are copied, one copy of each.
        modules: with all that is below them.
    """

    def __init__(self, tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
        self._rng_state = get_rng_state()
        self._copies = [(bits, bits.clone()) for bits in (as_bits(tensor.detach()) for tensor in tensors)]
        parts = [part for module in modules for part in module.modules()]
        self._modules = [(part, part.training, dict(part._parameters), dict(part._buffers)) for part in parts]
        parameters = {id(one): one for part in parts for one in part.parameters(recurse=False)}.values()
        self._parameters = [(one, one.data, one.grad, one.requires_grad) for one in parameters]

    def clear_gradients(self) -> None:
        """Take the gradients away: what `evaluate` adds to them, or clears, is then not the loop's."""
        for parameter, *_ in self._parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Can be repeated, where it was interrupted."""
        for module, training, parameters, buffers in self._modules:
            module.training = training
            _rebind(module._parameters, parameters)
            _rebind(module._buffers, buffers)
        for parameter, data, gradient, requires_grad in self._parameters:
            if parameter.data_ptr() != data.data_ptr() or parameter.dtype != data.dtype:
                parameter.data = data
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, before in self._copies:
                if not torch.equal(tensor, before):  # a write counts as a change for code that watches the version
                    tensor.copy_(before)
        set_rng_state(self._rng_state)


def _rebind(current: dict[str, Any], saved: dict[str, Any]) -> None:
    if list(current) != list(saved) or any(current[name] is not one for name, one in saved.items()):
        current.clear()
        current.update(saved)


TrialValues = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reading:
    """What `evaluate` said of some weights.

    Attributes:
        value: the loss, or the score; the mean of the examples, where these are known.
        examples: of each example, or batch of equal size, by itself; float64 [n], n >= 2, on the CPU. None: not known.
    """

    value: float
    examples: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_answer(cls, answer: Any) -> Reading:
        """Of what a user's function returned: a number, or a 1-D tensor of each example's loss or score.

        Raises:
            TypeError, ValueError, RuntimeError: it is neither.
        """
        if isinstance(answer, Reading):
            return answer
        if isinstance(answer, Tensor) and answer.dim() == 1 and answer.numel() > 1:
            examples = answer.detach().to("cpu", torch.float64)
            return cls(float(examples.mean()), examples)
        return cls(float(answer.detach() if isinstance(answer, Tensor) else answer))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value)

    def equals(self, other: Reading) -> bool:
        """Whether nothing tells the two apart; what is not finite is like nothing."""
        if self.examples is not None and other.examples is not None:
            return torch.equal(self.examples, other.examples)
        return self.value == other.value


@dataclass(frozen=True)
class Degradation:
    """By how much some weights are worse than others, in `evaluate`'s own unit.

    Attributes:
        rise: above zero: worse. nan: it could not be measured.
        interval: where the rise on other examples of the kind may lie, with 95 % confidence; None: not known.
    """

    rise: float
    interval: tuple[float, float] | None = None


class DegradationMetric:
    """What is lost with some values in the place of a state's own.

    Args:
        evaluate: evaluates with these values in place of the state's own.
        higher_is_better: more is better.

    Attributes:
        baseline: what the unchanged weights measure; to be set before anything is compared with it.
    """

    def __init__(self, evaluate: Callable[[TrialValues], Reading], *, higher_is_better: bool) -> None:
        self.evaluate, self._higher_is_better = evaluate, higher_is_better
        self.baseline = Reading(math.nan)

    @property
    def scale(self) -> float:
        """What rises are relative to."""
        return scale_of(self.baseline.value)

    def degradation(self, values: TrialValues) -> Degradation:
        """What the values do."""
        found, sign = self.evaluate(values), -1.0 if self._higher_is_better else 1.0
        before, after = self.baseline.examples, found.examples
        interval = None
        if before is not None and after is not None and before.shape == after.shape:
            interval = (
                paired_mean_interval(after, before) if self._higher_is_better else paired_mean_interval(before, after)
            )
        return Degradation(sign * (found.value - self.baseline.value), interval)


def relative_degradation(value: float, baseline: float, *, higher_is_better: bool) -> float:
    """By how much `value` is worse than `baseline`, relative to it, or to 1 where it is zero; `higher_is_better`:
    more is better.
    """
    change = baseline - value if higher_is_better else value - baseline
    return change / scale_of(baseline)


def scale_of(baseline: float) -> float:
    """What rises are relative to: what was measured; 1 where that is zero, as an accuracy may be in the beginning."""
    return abs(baseline) or 1.0


Evaluate = Callable[[Any], Any]


class TrialEvaluator:
    """A state that is not alive: `evaluate` gets a nest like the one that is saved, with a candidate's values in it.

    Whatever `evaluate` does to the tensors of the state (they may be those of a live model), to the random generators
    or to autograd's mode is undone after every measurement, also when it raises or is interrupted.

    Memory: one copy of the state's tensors while a search runs.

    Args:
        state: the state that is to be saved.
        evaluate: what the user passed.

    Attributes:
        layer_types: the kinds of layers, by name of a tensor, where there is more to go by than the name.
        quantizable: names of the tensors that a trial reaches; None: all of the state.
    """

    def __init__(self, state: FlatState, evaluate: Evaluate) -> None:
        self.layer_types: dict[str, str] = {}
        self.quantizable: frozenset[str] | None = None
        self._state, self._evaluate = state, evaluate
        self._guard: ModelStateGuard | None = None

    def __enter__(self) -> TrialEvaluator:
        self._guard = self._make_guard()
        return self

    def __exit__(self, *_: object) -> None:
        """Put all back once more: the last time may have been interrupted."""
        before, self._guard = self._guard, None
        if before is not None:
            before.restore()

    def evaluate(self, values: Mapping[str, Tensor]) -> Reading:
        """What `evaluate` says of the state with these values in place of its own.

        Args:
            values: by name of a tensor of the state, of its shape and dtype.

        Raises:
            PolicyError: `evaluate` raised, or what it returned is no number.
        """
        before = self._guard or self._make_guard()
        with torch.no_grad():
            try:
                before.clear_gradients()
                return call_evaluate(self._evaluate, self._argument(values))
            finally:
                before.restore()

    def _make_guard(self) -> ModelStateGuard:
        """Of all that `evaluate` may reach."""
        return ModelStateGuard(self._state.tensors.values(), ())

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        """What `evaluate` is called with."""
        tensors = {
            name: values[name].to(tensor.device) if name in values else tensor
            for name, tensor in self._state.tensors.items()
        }
        return unflatten(self._state.tree, tensors, where="a trial")


class ModelEvaluator(TrialEvaluator):
    """A model that is alive: `evaluate` gets the model itself, a candidate's values in place of its own.

    Only what is measured may be lost, so only the model's parameters are quantized (or their float32 master copies);
    buffers, and whatever else is saved beside the model, stay exact.

    Args:
        state: the state that is to be saved, which shares memory with the model.
        evaluate: None: the setting is fixed, and nothing will be measured.
        model: a module, or a dict or list of modules: what was passed to be saved.
        prefix: of the names of its tensors in `state`.

    Attributes:
        state_names: of parameters, by their name in the model: the name in the state. Of several modules, only names
            that no
            two of them have; without the prefixes of wrappers.

    Raises:
        PolicyError: `model` is none of these, or its `state_dict` gives copies.
    """

    def __init__(self, state: FlatState, evaluate: Evaluate | None, model: Any, prefix: str) -> None:
        super().__init__(state, evaluate or never_called)
        self._model, self._prefix = model, prefix
        self._modules = [*iter_modules(model)]
        if not self._modules:
            found, do = f"a {type(model).__name__}", "pass the module, or choose the setting yourself with config="
            raise PolicyError("model", found=found, expected="a torch.nn.Module that can be evaluated", do=do)
        places = {tensor.data_ptr(): name for name, tensor in state.tensors.items() if name.startswith(prefix)}
        found_at = [(name, places.get(x.data_ptr()), kind) for name, x, kind in self._parameters() if x.numel()]
        self.quantizable = frozenset(stored for _, stored, _ in found_at if stored is not None)
        self.layer_types = {stored: kind for _, stored, kind in found_at if stored is not None and kind is not None}
        counts = Counter(name for name, _, _ in found_at)
        self.state_names = {name: stored for name, stored, _ in found_at if stored is not None and counts[name] == 1}
        if evaluate is not None:
            self._check_shares_memory(
                prefix + name for module in self._modules for name, _ in module.named_parameters()
            )

    def _parameters(self) -> Iterator[tuple[str, Tensor, str | None]]:
        """Name, parameter and kind; a tied parameter under each of its names."""
        for module in self._modules:
            kinds = layer_types_of_model(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield strip_wrapper_prefix(name), parameter, kinds.get(name)

    def _argument(self, values: Mapping[str, Tensor]) -> Any:
        assert self.quantizable is not None
        for name, value in values.items():
            if name in self.quantizable:
                self._state.tensors[name].copy_(value)
        return self._model

    def _make_guard(self) -> ModelStateGuard:
        saved = {
            tensor.data_ptr(): tensor for name, tensor in self._state.tensors.items() if name.startswith(self._prefix)
        }
        buffers = {x.data_ptr(): x for module in self._modules for x in module.buffers()}
        return ModelStateGuard((buffers | saved).values(), self._modules)

    def _check_shares_memory(self, names: Iterable[str]) -> None:
        """Make sure that what is saved under a parameter's name is that parameter, so that a trial changes it."""
        assert self.quantizable is not None
        for name in names:
            if name in self._state.tensors and name not in self.quantizable and self._state.tensors[name].numel():
                found, do = "a weight that is no parameter of the model in memory", "pass a plain module as model="
                raise PolicyError(name, found=found, expected="a state_dict that shares memory", do=do)


def call_evaluate(evaluate: Evaluate, argument: Any) -> Reading:
    """What a user's function says of a model, or of a state; where it has a method `reading`, what that says.

    Raises:
        PolicyError: it raised, or what it returned is neither a number nor one of each example.
    """
    try:
        return Reading.from_answer(getattr(evaluate, "reading", evaluate)(argument))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        expected = "a number, or a 1-D tensor of the examples' losses"
        do = "make it take what is saved (a model, or a state) and return a loss or a score"
        raise PolicyError("evaluate", found=found, expected=expected, do=do) from error


def iter_modules(model: Any) -> Iterator[nn.Module]:
    """The modules in a module, or in a nest of them."""
    if isinstance(model, nn.Module):
        yield model
    elif isinstance(model, Mapping):
        for one in model.values():
            yield from iter_modules(one)
    elif isinstance(model, list | tuple):
        for one in model:
            yield from iter_modules(one)


def strip_wrapper_prefix(name: str) -> str:
    """The name of a parameter in the model, which may have been wrapped (for several devices, or to be compiled)."""
    for prefix in ("module.", "_orig_mod.", "module."):
        name = name.removeprefix(prefix)
    return name


def never_called(_: Any) -> float:
    raise AssertionError("a fixed setting is not measured")


_STUDENT_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t at .975, for 1 to 9 degrees of freedom."""
_NORMAL_QUANTILE = 1.959964


def paired_mean_interval(reference: Tensor, trial: Tensor) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of `after - before`, over the examples both are of.

    Student's interval of the mean difference. Where all values are 0 or 1 (right or wrong), it is that of two paired
    proportions with half a count added to each cell (Agresti and Min 2005): then no example that changed is no proof.

    Args:
        before, after: float64 [n], n >= 2, in the same order.

    Returns:
        The ends; infinite where a difference is not finite.
    """
    difference = trial - reference
    count = difference.numel()
    if not bool(difference.isfinite().all()):
        return -math.inf, math.inf
    if bool(torch.stack([reference, trial]).square().eq(torch.stack([reference, trial])).all()):
        up, down = (float((difference == sign).sum()) + 0.5 for sign in (1, -1))
        mean = (up - down) / (count + 2)
        error = _NORMAL_QUANTILE * math.sqrt(up + down - (up - down) ** 2 / (count + 2)) / (count + 2)
        return mean - error, mean + error
    mean = float(difference.mean())
    error = student_t_quantile(count - 1) * float(difference.std()) / math.sqrt(count)
    return mean - error, mean + error


def student_t_quantile(degrees_of_freedom: int) -> float:
    """The quantile of Student's t at .975, to a thousandth; `degrees_of_freedom` from 1."""
    if degrees_of_freedom <= len(_STUDENT_T_QUANTILES):
        return _STUDENT_T_QUANTILES[degrees_of_freedom - 1]
    z, n = _NORMAL_QUANTILE, float(degrees_of_freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n) + third
