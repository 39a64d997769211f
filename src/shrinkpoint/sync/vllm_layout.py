"""The layout of a vLLM model: which parts of its parameters each tensor of a checkpoint fills."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import ModelConfig
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from shrinkpoint.errors import MismatchError

View: TypeAlias = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a part of a tensor
_Plans: TypeAlias = "dict[nn.Module, dict[str, ParameterPlan]]"
_STAGED_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))  # all they derive is in the layer
_TENSOR_DICTS = ("_parameters", "_buffers", "_non_persistent_buffers_set")


class ParameterPlan(NamedTuple):
    """A parameter as it is before it is processed, and its pieces: tensor's name, part of it, part of the parameter."""

    like: Tensor
    pieces: list[tuple[str, View, View]]

    def fill(self, tensors: Mapping[str, Tensor]) -> Any:
        values = torch.empty_strided(self.like.shape, self.like.stride(), dtype=self.like.dtype, device="cpu").zero_()
        for source, (size, strides, offset), target in self.pieces:
            tensor = tensors[source].contiguous()
            values.as_strided(*target).copy_(tensor.as_strided(size, strides, offset + int(tensor.storage_offset())))
        values.__class__, values.__dict__ = type(self.like), dict(vars(self.like))
        return values


class LayerPlan:
    """The plans of a layer's parameters."""

    def __init__(self, layer: nn.Module, parameters: dict[str, ParameterPlan]) -> None:
        self.layer, self._parameters = layer, parameters
        self.sources = {source for plan in parameters.values() for source, _, _ in plan.pieces}  # tensors it needs
        self._is_packed = type(getattr(getattr(layer, "scheme", None), "kernel", None)) is CPUInt8ScaledMMLinearKernel
        is_simple = self._is_packed or type(getattr(layer, "quant_method", None)) in _STAGED_METHODS
        self.is_staged = is_simple and all(map(self._is_filled, parameters.values()))  # in a copy, while others run

    def _is_filled(self, plan: ParameterPlan) -> bool:
        """True if pieces or zeros fill a vector or a matrix: other shapes are stored in their own ways."""
        if plan.like.dim() > 2 or is_deferred_attention_layer(self.layer):
            return False
        num_filled = sum(target[0].numel() for _, _, target in plan.pieces)
        return num_filled == plan.like.numel() or isinstance(self.layer, VocabParallelEmbedding)

    def stage(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Callable[[], None]:
        """Prepare new parameters in the layout that kernels read; the result lets the live layer take them over."""
        shadow: Any = copy.copy(self.layer)
        filled = {name: plan.fill(tensors) for name, plan in self._parameters.items()}
        shadow._parameters = {**self.layer._parameters, **filled}
        if self._is_packed:  # its kernel keeps pointers to the parameters
            shadow.scheme = copy.copy(shadow.scheme)
            shadow.scheme.kernel = copy.copy(shadow.scheme.kernel)
        if (method := getattr(self.layer, "quant_method", None)) is not None:
            with _default_dtype(dtype):
                method.process_weights_after_loading(shadow)
        attributes = {name: x for name, x in vars(shadow).items() if vars(self.layer).get(name) is not x}
        new = {} if self._is_packed else attributes.pop("_parameters")
        copied = [(live, new[name]) for name, live in _parameters(self.layer) if name in new]
        return partial(_take_over, self.layer, copied, attributes)


def _take_over(layer: nn.Module, copied: Sequence[tuple[Tensor, Tensor]], attributes: dict[str, Any]) -> None:
    for live, values in copied:
        if values is not live and values.numel():  # else the kernels read only what was derived from the parameter
            live.data.copy_(values)
    layer.__dict__.update(attributes)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Show a default dtype to this thread alone: torch's own holds for the model that generates meanwhile, too."""
    get_default_dtype, thread = torch.get_default_dtype, get_ident()
    torch.get_default_dtype = lambda: dtype if get_ident() == thread else get_default_dtype()
    try:
        yield
    finally:
        torch.get_default_dtype = get_default_dtype


class _Recorder(TorchDispatchMode):
    """Records copies between tensors without memory, and whether their values are read otherwise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.is_reading = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            self.copies.append((args[0], args[1]))
            return args[0]
        is_read = any(isinstance(arg, Tensor) and arg.is_meta for arg in args)
        self.is_reading |= is_read and not func.is_view and func is not torch.ops.aten.fill_.Scalar
        return func(*args, **(kwargs or {}))


def plan_layers(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[LayerPlan] | None:
    """Find the layout by letting the model load tensors that have no memory; no weight changes.

    Returns:
        a plan for each layer; None if the model does more than to copy parts of tensors, and must be loaded whole.

    Raises:
        MismatchError: the model does not load such tensors, or keeps two of them in one parameter.
    """
    metas: dict[tuple[int, torch.Size], Tensor] = {}  # tied tensors once
    sources = {
        name: metas.setdefault((tensor.data_ptr(), tensor.shape), torch.empty_like(tensor, device="meta"))
        for name, tensor in tensors.items()
    }
    with _on_meta(model), _Recorder() as recorder:
        try:
            loaded = model.load_weights(iter(sources.items()))  # type: ignore[operator]
        except Exception as error:
            if "meta" in str(error):  # it looks at values, which are not there
                return None
            do = "publish the tensors of the checkpoint that the server was started from, by their names there"
            raise MismatchError("model", found=f"{error}", expected="tensors that the model loads", do=do) from error
        plans = _plan_parameters(model, sources, recorder.copies)
    if plans is None or loaded is None or recorder.is_reading or not _has_all_loaded(model, loaded, plans):
        return None
    if any(is_deferred_attention_layer(layer) and type(layer) is not Attention for layer in model.modules()):
        return None  # attention such as MLA derives matrices from the weights of other layers
    _add_tied(model, plans)
    return [LayerPlan(layer, plan) for layer, plan in plans.items()]


def _plan_parameters(
    model: nn.Module, sources: Mapping[str, Tensor], copies: Sequence[tuple[Tensor, Tensor]]
) -> _Plans | None:
    """The plans of parameters that were copied to; None if a copy is not from a tensor to a parameter."""
    names = {_memory(source): name for name, source in sources.items()}
    owners = {_memory(x): (layer, name, x) for layer in model.modules() for name, x in _parameters(layer)}
    plans: _Plans = {}
    for target, source in copies:
        if _memory(target) not in owners or _memory(source) not in names:
            return None
        layer, name, parameter = owners[_memory(target)]
        plan = plans.setdefault(layer, {}).setdefault(name, ParameterPlan(parameter, []))
        plan.pieces.append((names[_memory(source)], _view(source), _view(target)))
    return plans


def _has_all_loaded(model: nn.Module, loaded: Iterable[str], plans: _Plans) -> bool:
    layers = dict(model.named_modules(remove_duplicate=False))
    owners = ((layers.get(path), name) for path, _, name in (full.rpartition(".") for full in loaded))
    return all(layer in plans and name in plans[layer] for layer, name in owners)


def _add_tied(model: nn.Module, plans: _Plans) -> None:
    """Plan layers that share a parameter with a planned one, such as an output layer tied to the embedding."""
    planned = {id(layer._parameters[name]): plan[name] for layer, plan in plans.items() for name in plan}
    for layer in model.modules():
        for name, parameter in _parameters(layer):
            plan = planned.get(id(parameter))
            if plan is not None and plans.setdefault(layer, {}).setdefault(name, plan).pieces != plan.pieces:
                found = f"{plans[layer][name].pieces[0][0]!r} and {plan.pieces[0][0]!r} in one parameter"
                do = "start the server from a checkpoint in which the two differ, or tie them in the trainer"
                raise MismatchError("model", found=found, expected="a parameter for each", do=do)


def reload_layers(
    model: nn.Module, plans: Sequence[LayerPlan] | None, tensors: Mapping[str, Tensor], config: ModelConfig
) -> None:
    """Load layers by the model's own loader, which quantizes them again; `plans=None`: the whole model."""
    layers = [model] if plans is None else [plan.layer for plan in plans]
    names = list(tensors) if plans is None else sorted({name for plan in plans for name in plan.sources})
    begin, end = initialize_layerwise_reload, finalize_layerwise_reload
    if (device := next(model.parameters()).device).type == "cpu":
        begin, end = _begin_anew, lambda layer, config: process_weights_after_loading(layer, config, device)
    with torch.no_grad(), set_default_torch_dtype(config.dtype):  # as at the first load
        for layer in layers:
            begin(layer)
        model.load_weights((name, tensors[name]) for name in names)  # type: ignore[operator]
        for layer in layers:
            end(layer, config)


def _begin_anew(layers: nn.Module) -> None:
    """Give layers new parameters on the CPU: values that move back into the old ones do not reach 8-bit kernels."""
    for layer in layers.modules():
        if _parameters(layer) and not is_deferred_attention_layer(layer):
            buffers = dict(layer._buffers)  # such as tables of rotary embeddings, which no checkpoint has
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            materialize_layer(layer, get_layerwise_info(layer))
            layer._buffers.update(buffers)


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Give every layer the parameters that it had before loading, without memory, and afterwards its own again."""
    copies = {layer: {name: copy.copy(vars(layer)[name]) for name in _TENSOR_DICTS} for layer in model.modules()}
    before = {layer: {**vars(layer), **tensors} for layer, tensors in copies.items()}
    try:
        for layer in before:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
        yield
    finally:
        for layer, attributes in before.items():
            layer.__dict__.update(attributes)


def _parameters(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in layer._parameters.items() if parameter is not None]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: Tensor) -> View:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())
