"""Compression of tensor parallelism: activations and their gradients, summed and gathered over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shrinkpoint import validate
from shrinkpoint.comm.compressed_allreduce import as_feedback
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.error_feedback import NoFeedback
from shrinkpoint.comm.link import CompressorLike, NonfinitePolicy, check_nonfinite
from shrinkpoint.comm.placement_exchange import PlacementExchange, redistribute
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck, replica_check
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import PolicyError

Plan = ParallelStyle | Mapping[str, ParallelStyle]
_STYLES = (ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput)
_INPUT_OUTPUT = "PrepareModuleInputOutput"
"""A style that newer releases of torch have; it consists of two others."""


def compress_tensor_parallel(
    plan: Plan,
    forward: CompressorLike = "q8:64",
    backward: CompressorLike = "q8:64",
    *,
    min_numel: int = 0,
    nonfinite: NonfinitePolicy = "pass",
    timeout: float = CONFIG_TIMEOUT,
) -> TensorParallelCompression:
    """Make a plan for `parallelize_module` whose sums and gathers over ranks are compressed messages.

        compressed = compress_tensor_parallel({"up": ColwiseParallel(), "down": RowwiseParallel()})
        parallelize_module(block, mesh, compressed.plan)

    A sum takes two messages: each rank's part of it, and the sum, which all ranks decode from the same bytes. So what
    is replicated keeps the same bits on every rank. Sums are made in float32. Embeddings, uneven shards, and gradients
    of parameters are torch's own messages.

    Args:
        plan: styles of torch by the names of modules, or one style; on every rank. It is not changed.
        forward: the compressor of activations, without feedback; None for torch's own messages.
        backward: that of the gradients of activations.
        min_numel: smaller tensors are torch's own messages.
        nonfinite: "pass": a value that is not finite stays so, with the values encoded together with it. "raise": it is
            an error on every rank.
        timeout: seconds that the first message waits for the configuration of each other rank.

    Returns:
        The handle: the compressed plan, statistics, and `detach`.

    Raises:
        PolicyError: an unusable compressor or invalid spec, or a style that is not one of torch's own.
        MismatchError: in the first pass: ranks are configured differently. On every rank that called this.
    """
    return TensorParallelCompression(plan, forward, backward, min_numel, nonfinite, timeout)


class TensorParallelCompression:
    """Handle of the compressed messages of a plan, which `compress_tensor_parallel` returns.

    Attributes:
        plan: for `parallelize_module`, once or for several modules, over one mesh or several.
        link_stats: statistics of "forward" and "backward", of all modules together.
        inference: whether activations are compressed in modules in evaluation, too; the same on every rank.
    """

    inference: bool = True

    def __init__(
        self,
        plan: Plan,
        forward: CompressorLike,
        backward: CompressorLike,
        min_numel: int,
        nonfinite: NonfinitePolicy,
        timeout: float,
    ) -> None:
        check_nonfinite("compress_tensor_parallel", nonfinite)
        validate.check_int("compress_tensor_parallel, min_numel", min_numel, minimum=0)
        validate.check_float("compress_tensor_parallel, timeout", timeout)
        given = {"forward": forward, "backward": backward}
        self._compressors = {way: _stateless_compressor(way, compressor) for way, compressor in given.items()}
        self.link_stats = {way: LinkStats() for way in given}
        self._min_numel, self._nonfinite, self._timeout = min_numel, nonfinite, timeout
        self._is_attached = True
        self._checks: dict[tuple[int, ...], ConfigCheck] = {}
        styles = {"": plan} if isinstance(plan, ParallelStyle) else _check_plan(plan)
        specs = {way: compressor and compressor.spec for way, compressor in self._compressors.items()}
        described = {name: repr(style) for name, style in styles.items()}
        self._config = {**specs, "min_numel": min_numel, "nonfinite": nonfinite, "plan": described}
        compressed = {name: self._compress(name, style) for name, style in styles.items()}
        self.plan: ParallelStyle | dict[str, ParallelStyle] = (
            compressed[""] if isinstance(plan, ParallelStyle) else compressed
        )

    def detach(self) -> None:
        """Send torch's own messages from now on, in modules that were parallelized already, too; on every rank."""
        self._is_attached, self._checks = False, {}

    def exchanges(self, name: str, module: nn.Module) -> tuple[PlacementExchange, PlacementExchange]:
        """What changes the placement of a module's activations, and of their gradients."""

        def is_enabled() -> bool:
            return self._is_attached and (self.inference or module.training)

        forward = self._exchange("forward", f"{name} forward", is_enabled)
        return forward, self._exchange("backward", f"{name} backward", lambda: self._is_attached)

    def publish_config(self, group: dist.ProcessGroup) -> None:
        """Tell the ranks of a group the configuration of this one, which they compare before the first message."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1 and self._is_attached and ranks not in self._checks:
            self._checks[ranks] = replica_check(group, "compress_tensor_parallel", self._config, self._timeout)

    def _check_config(self, group: dist.ProcessGroup) -> None:
        self._checks[tuple(dist.get_process_group_ranks(group))].check()

    def _exchange(self, way: str, name: str, is_enabled: Callable[[], bool]) -> PlacementExchange:
        return PlacementExchange(
            self._compressors[way],
            self.link_stats[way],
            name=name,
            min_numel=self._min_numel,
            nonfinite=self._nonfinite,
            check_config=self._check_config,
            is_enabled=is_enabled,
        )

    def _compress(self, name: str, style: ParallelStyle) -> ParallelStyle:
        """The compressed form of a style; a PolicyError if it is none of torch's."""
        if isinstance(style, ColwiseParallel | RowwiseParallel) and type(style) in _STYLES:
            return _LinearStyle(style, name, self)
        if type(style) is SequenceParallel:
            return style  # its input has its placement already
        if type(style) is PrepareModuleInput:
            return _ModuleStyle(style, None, name, self)
        if type(style) is PrepareModuleOutput:
            return _ModuleStyle(None, style, name, self)
        if type(style).__name__ == _INPUT_OUTPUT and type(style).__module__ == ParallelStyle.__module__:
            parts: Any = style
            return _ModuleStyle(parts.prepare_module_input, parts.prepare_module_output, name, self)
        expected = f"{', '.join(each.__name__ for each in _STYLES)} or {_INPUT_OUTPUT}"
        advice = "give such modules to parallelize_module in a plan of their own"
        where = f"compress_tensor_parallel, plan[{name!r}]"
        raise PolicyError(where, found=validate.type_name(style), expected=expected, do=advice)


class _CompressedStyle(ParallelStyle):
    """Redistributes inputs and outputs of modules in compressed messages."""

    def __init__(self, name: str, compression: TensorParallelCompression) -> None:
        super().__init__()
        self._name, self._compression, self._num_modules = name, compression, 0

    def _exchanges(self, module: nn.Module, mesh: DeviceMesh) -> tuple[PlacementExchange, PlacementExchange]:
        """Those of the next module that the style is applied to."""
        self._compression.publish_config(mesh.get_group())
        self._num_modules += 1
        return self._compression.exchanges(f"{self._name or 'module'} {self._num_modules}", module)


class _LinearStyle(_CompressedStyle):
    """ColwiseParallel or RowwiseParallel of linears; torch splits the weights, and gets inputs as it needs them."""

    def __init__(
        self, style: ColwiseParallel | RowwiseParallel, name: str, compression: TensorParallelCompression
    ) -> None:
        super().__init__(name, compression)
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_linear = isinstance(module, nn.Linear)
        desired, style = self._linear_style() if is_linear else (None, self._style)
        if hasattr(self, "src_data_rank"):  # parallelize_module sets it, in newer releases of torch
            style.src_data_rank = self.src_data_rank
        module = style._apply(module, device_mesh)
        if desired is None:
            return module
        exchanges = self._exchanges(module, device_mesh)
        [source], [target] = self._style.input_layouts, self._style.output_layouts

        def prepare_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return redistribute(inputs[0], device_mesh, source, desired, *exchanges), *inputs[1:]

        def prepare_output(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
            is_local = self._style.use_local_output
            changed: Tensor = _change(output, device_mesh, Replicate(), target, exchanges, is_local=is_local)
            return changed

        module.register_forward_pre_hook(prepare_input, prepend=True)
        module.register_forward_hook(prepare_output)
        return module

    def _linear_style(self) -> tuple[Placement, ParallelStyle]:
        """The placement of inputs that the style needs, and a style that has nothing to redistribute."""
        if isinstance(self._style, ColwiseParallel):
            return Replicate(), ColwiseParallel(use_local_output=False)
        return Shard(-1), RowwiseParallel(output_layouts=Partial(), use_local_output=False)


class _ModuleStyle(_CompressedStyle):
    """PrepareModuleInput, PrepareModuleOutput, or both."""

    def __init__(
        self,
        inputs: PrepareModuleInput | None,
        outputs: PrepareModuleOutput | None,
        name: str,
        compression: TensorParallelCompression,
    ) -> None:
        super().__init__(name, compression)
        self._inputs, self._outputs = inputs, outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        exchanges = self._exchanges(module, device_mesh)

        def change(tensors: tuple[Any, ...], sources: Any, targets: Any, *, is_local: bool) -> list[Any]:
            if len(tensors) != len(sources):
                found, expected = f"{len(tensors)} tensors", f"{len(sources)}, as many as layouts"
                advice = "give a layout, or None, for each of them"
                raise PolicyError(f"plan[{self._name!r}]", found=found, expected=expected, do=advice)
            return [
                _change(tensor, device_mesh, source, target, exchanges, is_local=is_local)
                for tensor, source, target in zip(tensors, sources, targets, strict=True)
            ]

        def prepare_inputs(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            style = self._inputs
            assert style is not None
            is_local = style.use_local_output
            if style.input_layouts is not None:
                inputs = tuple(change(inputs, style.input_layouts, style.desired_input_layouts, is_local=is_local))
            known = [name for name in kwargs if name in style.input_kwarg_layouts]
            sources, targets = (
                [layouts.get(name) for name in known]
                for layouts in (style.input_kwarg_layouts, style.desired_input_kwarg_layouts)
            )
            values = change(tuple(kwargs[name] for name in known), sources, targets, is_local=is_local)
            return inputs, {**kwargs, **dict(zip(known, values, strict=True))}

        def prepare_outputs(_: nn.Module, inputs: object, outputs: Any) -> Any:
            style = self._outputs
            assert style is not None
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sources, targets, is_local = style.output_layouts, style.desired_output_layouts, style.use_local_output
            changed = change(outputs, sources, targets, is_local=is_local)
            return changed[0] if len(changed) == 1 else tuple(changed)

        if self._inputs is not None:
            module.register_forward_pre_hook(prepare_inputs, with_kwargs=True)
        if self._outputs is not None:
            module.register_forward_hook(prepare_outputs)
        return module


def _change(
    tensor: Any,
    mesh: DeviceMesh,
    source: Placement | None,
    target: Placement | None,
    exchanges: tuple[PlacementExchange, PlacementExchange],
    *,
    is_local: bool,
) -> Any:
    """One input or output with its desired placement; the same object without a layout."""
    if source is None:
        return tensor
    changed = redistribute(tensor, mesh, source, source if target is None else target, *exchanges)
    return changed.to_local() if is_local else changed


def _check_plan(plan: object) -> Mapping[str, ParallelStyle]:
    expected, advice = "a style of torch, or a dict of them by the names of modules", 'write {"up": ColwiseParallel()}'
    checked: Mapping[str, ParallelStyle] = validate.check_instance(
        "compress_tensor_parallel, plan", plan, Mapping, expected=expected, do=advice
    )
    return checked


def _stateless_compressor(way: str, compressor: CompressorLike) -> Compressor | None:
    """The compressor of a direction; a PolicyError for a feedback: the next message has nothing to do with this one."""
    if compressor is None:
        return None
    feedback = as_feedback(compressor)
    if not isinstance(feedback, NoFeedback):
        where = f"compress_tensor_parallel, {way}"
        raise PolicyError(where, found=feedback.spec, expected="a compressor", do="leave out the feedback")
    return feedback.compressor
