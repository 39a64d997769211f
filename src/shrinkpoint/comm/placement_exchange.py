"""Changes of a DTensor's placement over the ranks of a mesh, in compressed messages, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shrinkpoint.comm.compressed_allreduce import (
    CompressedAllGather,
    CompressedReduceScatter,
    reduce_numbers,
    share_numel,
)
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.error_feedback import NoFeedback
from shrinkpoint.comm.link import NonfinitePolicy
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import PolicyError


class PlacementExchange:
    """Turns partial sums into sums or shards of them, and shards into whole tensors, over one dimension of a mesh.

    All ranks decode the same bytes, so that what is replicated has the same bits on every rank. Nothing is remembered:
    noise is the same in every call, so that an activation that is computed again has the same bits again.

    Args:
        compressor: of messages; None: torch redistributes.
        name: part of the seed of noise, and of errors.
        min_numel: torch redistributes smaller tensors.
        nonfinite: "raise": results that are not finite are an error on every rank.
        check_config: called with the group before each message.
        is_enabled: tells whether messages are compressed now; if not, torch redistributes.
    """

    def __init__(
        self,
        compressor: Compressor | None,
        stats: LinkStats,
        *,
        name: str,
        min_numel: int,
        nonfinite: NonfinitePolicy,
        check_config: Callable[[dist.ProcessGroup], None],
        is_enabled: Callable[[], bool],
    ) -> None:
        self._compressor, self._stats, self._name = compressor, stats, name
        self._min_numel, self._nonfinite = min_numel, nonfinite
        self._check_config, self._is_enabled = check_config, is_enabled

    def __call__(self, tensor: DTensor, target: Placement) -> DTensor:
        """Return the tensor with another placement on its mesh of one dimension; no graph is recorded."""
        [source], mesh = tensor.placements, tensor.device_mesh
        if source == target:
            return tensor
        exchange = self._find_exchange(tensor, source, target)
        if exchange is None:
            return tensor.redistribute(placements=[target])
        group = mesh.get_group()
        self._check_config(group)
        local = exchange(_local(tensor), group)
        self._check_finite(local, group, is_same=isinstance(target, Replicate))
        return _from_local(local, mesh, target, tensor)

    def _find_exchange(
        self, tensor: DTensor, source: Placement, target: Placement
    ) -> Callable[[Tensor, dist.ProcessGroup], Tensor] | None:
        """The exchange that compresses this change; None where torch makes it."""
        ranks = tensor.device_mesh.size()
        if self._compressor is None or ranks == 1 or not self._is_enabled():
            return None
        if not tensor.is_floating_point() or tensor.numel() < max(self._min_numel, 1):
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
        return CompressedReduceScatter(self._feedback(), self._stats, name=f"{self._name} first")(rows, group)

    def _gather(self, row: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = row.new_empty(group.size(), row.numel())
        CompressedAllGather(self._feedback(), self._stats, name=f"{self._name} second")(row, rows, group)
        return rows

    def _feedback(self) -> NoFeedback:
        assert self._compressor is not None
        return NoFeedback(self._compressor)

    def _check_finite(self, local: Tensor, group: dist.ProcessGroup, *, is_same: bool) -> None:
        """Raise PolicyError if a result must be finite and is not; `is_same`: all ranks have the same result."""
        if self._nonfinite != "raise":
            return
        count = float(local.isfinite().logical_not().sum())
        if (count if is_same else reduce_numbers([count], group, local.device)[0]) > 0:
            advice = 'look for what overflowed, or let such values pass: nonfinite="pass"'
            raise PolicyError(self._name, found="values that are not finite", do=advice)


class _Redistribute(torch.autograd.Function):
    """A DTensor with another placement; backward its gradient with the placement of before."""

    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, target: Placement, forward: PlacementExchange, backward: PlacementExchange
    ) -> DTensor:
        [source] = tensor.placements
        ctx.source, ctx.exchange = source, backward
        ctx.set_materialize_grads(False)
        changed = forward(tensor, target)
        return _from_local(_local(changed), changed.device_mesh, target, changed)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[DTensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        # every rank's part of a sum has the gradient of the sum
        target = Replicate() if isinstance(ctx.source, Partial) else ctx.source
        return ctx.exchange(gradient, target), None, None, None


def redistribute(
    tensor: Tensor,
    mesh: DeviceMesh,
    source: Placement,
    target: Placement,
    forward: PlacementExchange,
    backward: PlacementExchange,
) -> DTensor:
    """Return a tensor with the target placement on a mesh of one dimension.

    Args:
        tensor: a DTensor, whose own placement counts, or this rank's part of one that is placed as `source`.
    """
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [source], run_check=False)
    if len(tensor.placements) != 1:
        advice = "parallelize over a mesh of one dimension, such as mesh['tp']"
        raise PolicyError("tensor parallel", found=f"a tensor placed as {tensor.placements}", do=advice)
    target = Shard(target.dim % tensor.dim()) if type(target) is Shard else target
    changed: DTensor = _Redistribute.apply(tensor, target, forward, backward)  # type: ignore[no-untyped-call]
    return changed


def _local(tensor: DTensor) -> Tensor:
    """This rank's part, once it has arrived."""
    local: Tensor = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


def _from_local(local: Tensor, mesh: DeviceMesh, placement: Placement, like: DTensor) -> DTensor:
    """A new DTensor of the shape of another."""
    strides = torch.empty(like.shape, device="meta").stride()
    local = local.contiguous()
    return DTensor.from_local(
        local.view_as(local), mesh, [placement], run_check=False, shape=like.shape, stride=strides
    )
