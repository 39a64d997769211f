"""Compression of tensor parallelism: activations and their gradients, summed and gathered over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shrinkpoint import validate
from shrinkpoint.comm.compressed_allreduce import (
    CompressedAllGather,
    CompressedReduceScatter,
    as_stateless,
    reduce_numbers,
    share_numel,
)
from shrinkpoint.comm.link import CompressorLike, LinkStats, NonfinitePolicy, check_nonfinite, nonfinite_error
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck, replica_check
from shrinkpoint.errors import PolicyError

Plan = ParallelStyle | Mapping[str, ParallelStyle]
_STYLES = (ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput)
_INPUT_OUTPUT = "PrepareModuleInputOutput"  # A style that newer releases of torch have; it consists of two others


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
        inference: True if activations are compressed in modules in evaluation, too; the same on every rank.
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
        self._feedbacks = {
            # without feedback: a message has nothing to do with the one before
            way: None if compressor is None else as_stateless(f"compress_tensor_parallel, {way}", compressor)
            for way, compressor in (("forward", forward), ("backward", backward))
        }
        self.link_stats = {way: LinkStats() for way in self._feedbacks}
        self._min_numel, self._nonfinite, self._timeout = min_numel, nonfinite, timeout
        self._is_attached = True
        self._checks: dict[tuple[int, ...], ConfigCheck] = {}
        if not isinstance(plan, ParallelStyle):
            expected = "a style of torch, or a dict of them by the names of modules"
            advice = 'pass e.g. {"up": ColwiseParallel()}'
            validate.check_instance("compress_tensor_parallel, plan", plan, Mapping, expected=expected, do=advice)
        styles = {"": plan} if isinstance(plan, ParallelStyle) else plan
        specs = {way: feedback and feedback.spec for way, feedback in self._feedbacks.items()}
        described = {name: repr(style) for name, style in styles.items()}
        self._config = {**specs, "min_numel": min_numel, "nonfinite": nonfinite, "plan": described}
        compressed = {name: self._compress(name, style) for name, style in styles.items()}
        self.plan: ParallelStyle | dict[str, ParallelStyle] = (
            compressed[""] if isinstance(plan, ParallelStyle) else compressed
        )

    def detach(self) -> None:
        """Send torch's own messages from now on, in modules that were parallelized already, too; on every rank."""
        self._is_attached, self._checks = False, {}

    def publish_config(self, group: dist.ProcessGroup) -> None:
        """Tell the ranks of a group the configuration of this one, which they compare before the first message."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1 and self._is_attached and ranks not in self._checks:
            self._checks[ranks] = replica_check(group, "compress_tensor_parallel", self._config, self._timeout)

    def check_config(self, group: dist.ProcessGroup) -> None:
        """Raise an error on every rank of a group unless all of them have one configuration."""
        self._checks[tuple(dist.get_process_group_ranks(group))].check()

    def _compress(self, name: str, style: ParallelStyle) -> ParallelStyle:
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


class _PlacementExchange:
    """Turns partial sums into sums or shards of them, and shards into whole tensors, over one dimension of a mesh.

    All ranks decode the same bytes, so that what is replicated has the same bits on every rank. Nothing is remembered:
    noise is the same in every call, so that an activation that is computed again has the same bits again.
    """

    def __init__(self, compression: TensorParallelCompression, name: str, module: nn.Module, way: str) -> None:
        self._compression, self._module, self._way, self._name = compression, module, way, f"{name} {way}"
        self._feedback, self._stats = compression._feedbacks[way], compression.link_stats[way]

    def __call__(self, tensor: DTensor, target: Placement) -> DTensor:
        """Return the tensor with another placement on its mesh of one dimension; no graph is recorded."""
        [source], mesh = tensor.placements, tensor.device_mesh
        if source == target:
            return tensor
        exchange = self._find_exchange(tensor, source, target)
        if exchange is None:
            return tensor.redistribute(placements=[target])
        group = mesh.get_group()
        self._compression.check_config(group)
        local = exchange(_local(tensor), group)
        if self._compression._nonfinite == "raise":
            count = float(local.isfinite().logical_not().sum())
            if not isinstance(target, Replicate):  # ranks have different results
                [count] = reduce_numbers([count], group, local.device)
            if count:
                raise nonfinite_error(self._name)
        return _from_local(local, mesh, target, tensor)

    def _find_exchange(
        self, tensor: DTensor, source: Placement, target: Placement
    ) -> Callable[[Tensor, dist.ProcessGroup], Tensor] | None:
        """The exchange that compresses this change; None where torch makes it."""
        ranks, compression = tensor.device_mesh.size(), self._compression
        if self._feedback is None or ranks == 1 or not compression._is_attached:
            return None
        if self._way == "forward" and not (compression.inference or self._module.training):
            return None
        if not tensor.is_floating_point() or tensor.numel() < max(compression._min_numel, 1):
            return None
        dims = [placement.dim for placement in (source, target) if isinstance(placement, Shard)]
        if any(type(placement) not in (Partial, Replicate, Shard) for placement in (source, target)):
            return None  # an embedding's mask, or shards that are not in the order of ranks
        if any(tensor.shape[dim] % ranks for dim in dims):
            return None  # uneven shards
        if isinstance(source, Partial) and source.reduce_op == "sum":
            if isinstance(target, Shard):
                return lambda local, group: self._reduce_scatter(local, group, dims[0])
            return self._all_reduce if isinstance(target, Replicate) else None
        if isinstance(source, Shard) and isinstance(target, Replicate):
            return lambda local, group: self._all_gather(local, group, dims[0])
        return None

    def _all_reduce(self, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum over ranks: every rank sums up a share, and sends it to all."""
        ranks, numel = group.size(), local.numel()
        share = share_numel(numel, ranks)
        rows = F.pad(local.reshape(-1), (0, share * ranks - numel)).view(ranks, share)
        total = self._scatter(rows, group).to(local.dtype)
        gathered = self._gather(total, group)
        return gathered.view(-1)[:numel].view(local.shape)

    def _reduce_scatter(self, local: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        """Sum over ranks the chunk of this rank along a dimension."""
        chunks = local.chunk(group.size(), dim)
        rows = torch.stack([chunk.reshape(-1) for chunk in chunks])
        return self._scatter(rows, group).to(local.dtype).view(chunks[group.rank()].shape)

    def _all_gather(self, local: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        """Join the chunks of all ranks along a dimension."""
        rows = self._gather(local.reshape(-1), group)
        return torch.cat([row.view(local.shape) for row in rows], dim)

    def _scatter(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert self._feedback is not None
        return CompressedReduceScatter(self._feedback, self._stats, name=f"{self._name} first")(rows, group)

    def _gather(self, row: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert self._feedback is not None
        rows = row.new_empty(group.size(), row.numel())
        CompressedAllGather(self._feedback, self._stats, name=f"{self._name} second")(row, rows, group)
        return rows


_Exchanges = tuple[_PlacementExchange, _PlacementExchange]  # Forward and backward


class _Redistribute(torch.autograd.Function):
    """A DTensor with another placement; backward its gradient with the placement of before."""

    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, target: Placement, exchange: _PlacementExchange, backward: _PlacementExchange
    ) -> DTensor:
        [source] = tensor.placements
        ctx.source, ctx.exchange = source, backward
        ctx.set_materialize_grads(False)
        changed = exchange(tensor, target)
        return _from_local(_local(changed), changed.device_mesh, target, changed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[DTensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        # every rank's part of a sum has the gradient of the sum
        target = Replicate() if isinstance(ctx.source, Partial) else ctx.source
        return ctx.exchange(gradient, target), None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _redistribute(
    tensor: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, exchanges: _Exchanges
) -> DTensor:
    """Return a tensor with the target placement on a mesh of one dimension; a compiler would trace torch's messages.

    Args:
        tensor: a DTensor, whose own placement counts, or this rank's part of one that is placed as `source`.
    """
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [source], run_check=False)
    if len(tensor.placements) != 1:
        advice = "parallelize over a mesh of one dimension, such as mesh['tp']"
        raise PolicyError("tensor parallel", found=f"a tensor placed as {tensor.placements}", do=advice)
    target = Shard(target.dim % tensor.dim()) if type(target) is Shard else target
    changed: DTensor = _Redistribute.apply(tensor, target, *exchanges)  # type: ignore[no-untyped-call]
    return changed


def _local(tensor: DTensor) -> Tensor:
    """This rank's part, once it has arrived."""
    local: Tensor = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


def _from_local(local: Tensor, mesh: DeviceMesh, placement: Placement, like: DTensor) -> DTensor:
    strides = torch.empty(like.shape, device="meta").stride()
    local = local.contiguous()
    return DTensor.from_local(
        local.view_as(local), mesh, [placement], run_check=False, shape=like.shape, stride=strides
    )


class _CompressedStyle(ParallelStyle):
    """Redistributes inputs and outputs of modules in compressed messages."""

    def __init__(self, name: str, compression: TensorParallelCompression) -> None:
        super().__init__()
        self._name, self._compression, self._num_modules = name, compression, 0

    def _exchanges(self, module: nn.Module, mesh: DeviceMesh) -> _Exchanges:
        """The exchanges of the next module that the style is applied to, forward and backward."""
        self._compression.publish_config(mesh.get_group())
        self._num_modules += 1
        name = f"{self._name or 'module'} {self._num_modules}"
        make = partial(_PlacementExchange, self._compression, name, module)
        return make("forward"), make("backward")


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
            return _redistribute(inputs[0], device_mesh, source, desired, exchanges), *inputs[1:]

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
                advice = "pass a layout, or None, for each of them"
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _change(
    tensor: Any,
    mesh: DeviceMesh,
    source: Placement | None,
    target: Placement | None,
    exchanges: _Exchanges,
    *,
    is_local: bool,
) -> Any:
    """One input or output with its desired placement; the same object without a layout."""
    if source is None:
        return tensor
    changed = _redistribute(tensor, mesh, source, source if target is None else target, exchanges)
    return changed.to_local() if is_local else changed
