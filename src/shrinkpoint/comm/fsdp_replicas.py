"""Compression of what replicas of sharded gradients exchange under HSDP: the second of two levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce
from shrinkpoint.comm.compressors.base import Identity
from shrinkpoint.errors import PolicyError


def replicate_group(param_group: Any) -> dist.ProcessGroup | None:
    """The group over which the shards of a parameter group are replicated; None without replicas."""
    group: dist.ProcessGroup | None = getattr(param_group.mesh_info, "replicate_process_group", None)
    return group


class ReplicaAllReduce:
    """Averages the gradient shards of one module over its replicas, instead of torch's own all-reduce.

    For torch the module is then sharded in one dimension, with a hook of a user that runs after each reduce-scatter.

    Args:
        param_group: FSDP2's parameter group of the module.
        all_reduce: what averages.
        min_numel: smaller shards are sent uncompressed.
        check_config: called with the replicas before each message.

    Attributes:
        group: the replicas.

    Raises:
        PolicyError: this release of torch has no such hook, or the user has set one.
    """

    def __init__(
        self,
        param_group: Any,
        all_reduce: CompressedAllReduce,
        min_numel: int,
        check_config: Callable[[dist.ProcessGroup], None],
    ) -> None:
        self.all_reduce, self.group = all_reduce, param_group.mesh_info.replicate_process_group
        self._uncompressed = CompressedAllReduce(Identity(), name="fsdp small", link_stats=all_reduce.link_stats)
        self._param_group, self._min_numel, self._check_config = param_group, min_numel, check_config
        self._original_infos = param_group.mesh_info, param_group.post_forward_mesh_info
        if getattr(param_group, "_all_reduce_hook", "missing") is not None:
            problem, do = (
                "a hook of the user's, or a torch without such hooks",
                "remove it, or use torch's own all-reduce",
            )
            raise PolicyError("compress_fsdp(all_reduce=...)", found=problem, expected="no all-reduce hook", do=do)
        shard_info = _shard_info(param_group.mesh_info)
        if param_group.post_forward_mesh_info is param_group.mesh_info:
            param_group.post_forward_mesh_info = shard_info
        param_group.mesh_info, param_group._all_reduce_hook = shard_info, self._average_

    def detach(self) -> None:
        """Restore torch's own all-reduce."""
        self._param_group.mesh_info, self._param_group.post_forward_mesh_info = self._original_infos
        self._param_group._all_reduce_hook = None

    def _average_(self, shard: Tensor) -> None:
        """Average a flat gradient shard over the replicas; sum it where the user has set what sums are divided by."""
        self._check_config(self.group)
        is_small = shard.numel() < max(self._min_numel, 1)
        (self._uncompressed if is_small else self.all_reduce).average_(shard, self.group, f"{shard.numel()}")
        if self._param_group.gradient_divide_factor is not None:
            shard.mul_(self.group.size())


def _shard_info(mesh_info: Any) -> Any:
    """What FSDP2 knows of a mesh of replicas and shards, without the replicas."""
    [kind] = [one for one in type(mesh_info).__mro__ if one.__name__ == "FSDPMeshInfo"]
    known = {field.name: getattr(mesh_info, field.name) for field in dataclasses.fields(kind) if field.init}
    info = kind(**(known | {"replicate_mesh_dim": None}))
    info.reduce_scatter_process_group = getattr(mesh_info, "reduce_scatter_process_group", None)
    return info
