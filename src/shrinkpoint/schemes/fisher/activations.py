"""Records what the layers of a model see: second moments of inputs, and mean squares of the gradients of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError, error_text
from shrinkpoint.tensors.memory import callers_default

MAX_POSITIONS = 1 << 13
"""Positions (tokens, places of an image) of one forward pass whose inputs are multiplied at most: a sample of them."""
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)


@dataclass
class _Average:
    """A decaying sum of tensors, and of their weights."""

    total: Tensor | None = None
    weight: float = 0.0

    def add(self, value: Tensor, decay: float) -> None:
        if not bool(value.isfinite().all()):  # a diverged batch
            return
        if self.total is None or self.total.shape != value.shape:
            self.total, self.weight = torch.zeros_like(value), 0.0
        self.total.mul_(decay).add_(value)
        self.weight = decay * self.weight + 1

    @property
    def mean(self) -> Tensor | None:
        return None if self.total is None else self.total / self.weight

    @property
    def mean_diagonal(self) -> Tensor | None:
        return None if self.total is None else self.total.diagonal() / self.weight


@dataclass
class LayerStatistics:
    """Statistics of the layers that use one weight: a linear one or a convolution, an embedding, or both.

    Attributes:
        inputs: second moments of the inputs, float32 [columns, columns] of the weight seen as a matrix.
        outputs: squared gradients of the outputs, summed over the positions of a batch, float32 [rows].
        frequencies: of an embedding: the share of positions that look up each row, float32 [rows].
        lookups: the squared gradients of what an embedding gives, summed over positions, float32 [columns].
    """

    inputs: _Average = field(default_factory=_Average)
    outputs: _Average = field(default_factory=_Average)
    frequencies: _Average = field(default_factory=_Average)
    lookups: _Average = field(default_factory=_Average)

    @property
    def is_empty(self) -> bool:
        """True if nothing finite was seen."""
        return self.inputs.total is None and self.frequencies.total is None


class _LayerRecorder:
    """Averages over the forward passes of layers.

    Args:
        decay: weight of what was recorded before; 1: a plain mean.
        max_inputs: widest layer whose inputs are multiplied.
    """

    def __init__(self, decay: float, max_inputs: int) -> None:
        self._decay, self._max_inputs = decay, max_inputs
        self._generator = torch.Generator().manual_seed(0)  # not the global one: training must not notice
        self.layers: dict[str, LayerStatistics] = {}

    @torch.inference_mode(False)  # tensors of inference mode, as of a first validation, take no training pass
    @torch.no_grad()
    def record(self, name: str, layer: nn.Module, inputs: Tensor, output: Tensor) -> None:
        """Record a forward pass, and the gradient of its output when it is computed."""
        if hasattr(inputs, "to_local"):  # averages of DTensors would wait for other ranks in a save of one rank
            found, do = "a layer in tensor parallelism", "leave activations= and calibrate= out"
            raise PolicyError(f"activations, {name}", found=found, expected="a layer that this rank has whole", do=do)
        statistics = self.layers.setdefault(name, LayerStatistics())
        if not _has_values(inputs, output) or not inputs.numel():
            return
        inputs = inputs.values() if inputs.is_nested else inputs
        if isinstance(layer, nn.Embedding):
            counts = torch.bincount(inputs.reshape(-1), minlength=layer.num_embeddings)
            statistics.frequencies.add(counts.to(torch.float32) / inputs.numel(), self._decay)
            gradients, places = statistics.lookups, 0
        else:
            positions = self._positions(layer, inputs.detach())
            if positions is None:
                return
            with torch.autocast(positions.device.type, enabled=False):  # its products are those of bfloat16
                statistics.inputs.add(positions.T @ positions / len(positions), self._decay)
            places = 0 if isinstance(layer, nn.Linear) else cast(Tensor, layer.weight).dim() - 2
            gradients = statistics.outputs
        if output.requires_grad:

            @torch.no_grad()
            def add_gradient(gradient: Tensor) -> None:
                values = gradient.values() if gradient.is_nested else gradient
                squares = values.detach().to(torch.float32).square()
                other_axes = [i for i in range(squares.dim()) if i != squares.dim() - 1 - places]
                gradients.add(squares.sum(other_axes) if other_axes else squares, self._decay)

            output.register_hook(add_gradient)

    def _positions(self, layer: nn.Module, inputs: Tensor) -> Tensor | None:
        """Inputs of a sample of positions, float32 [positions, columns of the weight]; None for too wide a layer."""
        if isinstance(layer, nn.Linear):
            if layer.in_features > self._max_inputs:
                return None
            return self._sample(inputs.reshape(-1, layer.in_features), MAX_POSITIONS).to(torch.float32)
        assert isinstance(layer, nn.Conv1d | nn.Conv2d)
        if layer.groups != 1 or layer.weight[0].numel() > self._max_inputs:
            return None
        kernel, stride, dilation = ((1, *x)[-2:] for x in (layer.kernel_size, layer.stride, layer.dilation))
        images = inputs if inputs.dim() == layer.weight.dim() else inputs[None]
        places = images[0, 0].numel() // (stride[0] * stride[1]) or 1
        images = self._sample(images, -(-MAX_POSITIONS // places)).to(torch.float32)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        images = F.pad(images, layer._reversed_padding_repeated_twice, mode=mode)
        images = images if images.dim() == 4 else images[:, :, None]
        patches = F.unfold(images, kernel, dilation=dilation, stride=stride)
        return self._sample(patches.transpose(1, 2).reshape(-1, patches.shape[1]), MAX_POSITIONS)

    def _sample(self, values: Tensor, count: int) -> Tensor:
        if len(values) <= count:
            return values
        chosen = torch.randint(len(values), (count,), generator=self._generator, device="cpu")
        return values[chosen.to(values.device)]


def _has_values(*tensors: Tensor) -> bool:
    """False of what a layer is traced with, of values within a transformation such as `vmap`, and of sparse tensors."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    is_traced = any(x.is_meta or hasattr(x, "fake_mode") for x in tensors)
    return not is_traced and all(x.layout is (torch.jagged if x.is_nested else torch.strided) for x in tensors)


class Activations:
    """Records what the layers of a model see while it trains, or runs: for files that `Fisher(activations=)` writes.

    Second moments of the inputs of every `Linear`, `Conv1d` and `Conv2d`, and how often each row of an `Embedding` is
    looked up; where gradients are computed, their squares at the outputs. Forward hooks do that; outputs do not change.

        seen = sp.Activations(model, every=10)   # before the loop
        ...
        sp.save(state, "last.safetensors", scheme=sp.Fisher(relative_error=0.6, activations=seen))

    Also a context manager, which removes the hooks at its end. Layers with `groups`, and those of more than
    `max_inputs` inputs, are not recorded; a model sharded over ranks is refused when it is saved, and one with tensor
    parallelism in its first pass. Under DDP each rank records its own batches, and the one that saves uses these. A
    layer of n inputs takes 4 n^2 bytes on its device.

    Args:
        model: the model, wrapped by DDP or not; a compiled one before it is compiled.
        every: record one of so many forward passes of each layer.
        decay: weight of what was recorded before, above 0, at most 1 (a plain mean over all that was recorded).
        max_inputs: the widest layer whose inputs are recorded.

    Raises:
        PolicyError: an argument out of range.
    """

    def __init__(self, model: nn.Module, *, every: int = 1, decay: float = 0.95, max_inputs: int = 8192) -> None:
        expected, do = "a torch.nn.Module", "pass the model whose layers are to be recorded"
        validate.check_instance("Activations, model", model, nn.Module, expected=expected, do=do)
        self._every = validate.check_int("Activations, every", every)
        decay = validate.check_float("Activations, decay", decay, maximum=1.0)
        self._max_inputs = validate.check_int("Activations, max_inputs", max_inputs)
        self._decay, self._calls = decay, dict[nn.Module, int]()
        self._recorder = _LayerRecorder(decay, self._max_inputs)
        names = dict[Tensor, str]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, name)
        layers = [layer for layer in model.modules() if isinstance(layer, _LAYERS)]
        self._names: dict[nn.Module, str] = {x: names[x.weight] for x in layers if x.weight in names}
        self._handles: list[RemovableHandle] = [layer.register_forward_hook(self._record) for layer in self._names]

    def _record(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        name = self._names.get(layer)
        if name is None:  # a copy of the layer, as in DataParallel
            return
        calls = self._calls[layer] = self._calls.get(layer, 0) + 1
        if (calls - 1) % self._every == 0 and inputs and isinstance(output, Tensor):
            self._recorder.record(name, layer, inputs[0], output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Activations:
        """This object: a copy of a layer has its hooks, and is not recorded; it would copy the whole model, too."""
        return self

    @property
    def layers(self) -> Mapping[str, LayerStatistics]:
        """Records by name of the weight in the model; a tied weight has its first name."""
        return {name: layer for name, layer in self._recorder.layers.items() if not layer.is_empty}

    def detach(self) -> None:
        """Remove the hooks; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def clear(self) -> None:
        """Forget what was recorded, and free its memory."""
        self._recorder = _LayerRecorder(self._decay, self._max_inputs)

    def __enter__(self) -> Activations:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


Calibrate = Callable[[Any], Any]
"""Runs a model; returns anything, or losses."""


def record_calibration(
    calibrate: Calibrate, argument: Any, tensors: Mapping[str, Tensor]
) -> dict[str, LayerStatistics]:
    """Call a user's function, and record the layers whose weights are tensors of a state, wherever they run.

    If it returns or yields scalars with a gradient (losses), they are propagated back, one after another, so that
    gradients of outputs are known, too. Gradients of parameters are as before afterwards.

    Args:
        argument: of the function.
        tensors: the state's, by name.

    Raises:
        PolicyError: the function raised, or ran no layer with a weight of the state.
    """
    recorder = _LayerRecorder(1.0, 8192)
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        by_shape.setdefault(tuple(tensor.shape), []).append(name)
    names = dict[Tensor, str | None]()

    def find(weight: Tensor) -> str | None:
        if weight not in names:
            like = by_shape.get(tuple(weight.shape), ())
            names[weight] = next((name for name in like if _has_equal_values(tensors[name], weight)), None)
        return names[weight]

    def record(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(layer, _LAYERS) and inputs and isinstance(output, Tensor):
            name = find(layer.weight)
            if name is not None:
                recorder.record(name, layer, inputs[0], output)

    with _preserved_gradients() as preserve, torch.enable_grad():
        handles = [register_module_forward_hook(preserve), register_module_forward_hook(record)]
        try:
            with callers_default():
                result = calibrate(argument)
                is_iterable = isinstance(result, Iterable) and not isinstance(result, Tensor | str | bytes | Mapping)
                for item in result if is_iterable else (result,):  # a generator runs the model here
                    if isinstance(item, Tensor) and item.numel() == 1 and item.requires_grad:
                        with torch.autocast(item.device.type, enabled=False):
                            item.backward()
        except Exception as error:
            found, expected = error_text(error), "a function that runs the model on some batches"
            do = "make it take what is saved (a model, or a state) and run the model, as evaluate= does"
            raise PolicyError("calibrate", found=found, expected=expected, do=do) from error
        finally:
            for handle in handles:
                handle.remove()
    layers = {name: layer for name, layer in recorder.layers.items() if not layer.is_empty}
    if not layers:
        found, expected = "a function that ran no layer with a weight of this state", "one that runs the saved model"
        do = "load the state into the model that it runs; do not compile that model"
        raise PolicyError("calibrate", found=found, expected=expected, do=do)
    return layers


def _has_equal_values(tensor: Tensor, weight: Tensor) -> bool:
    if tensor.data_ptr() == weight.data_ptr() and tensor.device == weight.device:
        return True
    return tensor.dtype == weight.dtype and torch.equal(tensor.detach(), weight.detach().to(tensor.device))


@contextmanager
def _preserved_gradients() -> Iterator[Callable[..., None]]:
    """A forward hook that takes the gradients of all modules it sees out of the way; they are put back at the end."""
    gradients = dict[Tensor, Tensor | None]()

    def preserve(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter not in gradients:
                gradients[parameter], parameter.grad = parameter.grad, None

    try:
        yield preserve
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def check_activations(activations: Any, calibrate: Any) -> tuple[Activations | None, Calibrate | None]:
    """A recorder of activations and a function that runs the model, of which at most one is given.

    Raises:
        PolicyError: both are, or one is something else.
    """
    if activations is not None and calibrate is not None:
        do = "pass the recorder, or the function"
        raise PolicyError("Fisher", found="activations and calibrate", expected="one of them", do=do)
    if activations is not None and not isinstance(activations, Activations):
        raise validate.argument_error("activations", activations, "a recorder", "pass shrinkpoint.Activations(model)")
    return activations, validate.check_optional_callable("calibrate", calibrate)
