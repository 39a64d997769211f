"""Compression of the weights and gradients of FSDP2 (`fully_shard`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from shrinkpoint import validate
from shrinkpoint.comm.compressed_allreduce import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedCollective,
    CompressedReduceScatter,
    all_gather_tensor,
    as_feedback,
    as_stateless,
    check_hops,
    check_layouts,
    reduce_numbers,
)
from shrinkpoint.comm.compressors.base import Identity
from shrinkpoint.comm.error_feedback import ErrorFeedback, NoFeedback
from shrinkpoint.comm.gradient_averaging import GradientAveraging, not_replayable
from shrinkpoint.comm.gradient_record import ShardRecord
from shrinkpoint.comm.link import CompressorLike, LinkStats, NonfinitePolicy, nonfinite_error
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck, replica_check
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.info import JSON


def compress_fsdp(
    root: nn.Module,
    all_gather: CompressorLike = "q8:64",
    reduce_scatter: CompressorLike = "q4:64",
    *,
    all_reduce: CompressorLike = None,
    min_numel: int = 0,
    nonfinite: NonfinitePolicy = "pass",
    timeout: float = CONFIG_TIMEOUT,
) -> FSDPCompression:
    """Gather weights and scatter gradients in compressed messages, in every module that `fully_shard` was applied to.

    The sharded weights that the optimizer updates are not changed; all ranks compute with the same decoded copies.
    Weights that torch prefetches are sent while others are computed with, on a CPU, too; gradients on a CPU are sent
    while nothing is computed. Gradients are added up in float32. With replicated shards (HSDP) `all_reduce` compresses
    what replicas exchange: exact inside a machine and compressed between machines is `compress_fsdp(model, None, None,
    all_reduce="q4:64")`.

    Args:
        root: with all `fully_shard` calls made, before the first forward pass; on every rank.
        all_gather: the compressor of weights, without feedback; None for torch's own all-gather.
        reduce_scatter: the compressor of gradients, or a feedback; None for torch's own reduce-scatter.
        all_reduce: the compressor of gradients between replicas, or a feedback; None for torch's own all-reduce.
        min_numel: smaller shards are sent uncompressed.
        nonfinite: "pass": a value that is not finite stays so, with the values encoded together with it. "raise": it is
            an error on every rank, for which the ranks exchange a number per module.
        timeout: seconds that the first message waits for the configuration of each other rank.

    Returns:
        The handle: statistics, state, and `detach`.

    Raises:
        PolicyError: another kind of model, or an unusable compressor or invalid spec.
        MismatchError: in the first forward pass: ranks are configured differently. On every rank that called this; one
            that did not gets torch's error once another has ended.
    """
    return FSDPCompression(root, all_gather, reduce_scatter, all_reduce, min_numel, nonfinite, timeout)


class FSDPCompression(GradientAveraging[ShardRecord]):
    """Handle of the compressed messages of one sharded model, which `compress_fsdp` returns.

    Attributes:
        link_stats: statistics of "all-gather" and "reduce-scatter" since the start; with compressed replicas of "first
            hop" and "second hop" as well.
    """

    def __init__(
        self,
        root: nn.Module,
        weights: CompressorLike,
        gradients: CompressorLike,
        replicas: CompressorLike,
        min_numel: int,
        nonfinite: NonfinitePolicy,
        timeout: float,
    ) -> None:
        super().__init__("compress_fsdp", min_numel, nonfinite, timeout)
        expected, advice = "a module that fully_shard was applied to", "apply it first"
        validate.check_instance("compress_fsdp, root", root, nn.Module, expected=expected, do=advice)
        self.link_stats = {"all-gather": LinkStats(), "reduce-scatter": LinkStats()}
        # without feedback: weights are sent again in the backward pass, unchanged
        weight_feedback = None if weights is None else as_stateless("all-gather", weights)
        gradient_feedback = None if gradients is None else as_feedback(gradients)
        weight_spec = weight_feedback and weight_feedback.shared_spec
        gradient_spec = gradient_feedback and gradient_feedback.shared_spec
        specs = {"all_gather": weight_spec, "reduce_scatter": gradient_spec}
        if replicas is not None:
            specs["all_reduce"] = as_feedback(replicas).shared_spec
        is_lossy = any(spec not in (None, "exact") for spec in specs.values())
        self._config = {**specs, "min_numel": min_numel, "nonfinite": nonfinite}
        self._root = root
        self._shard_spec: str | None = None  # of the compressor of what is recorded
        self._original_comms: list[tuple[Any, Any, Any]] = []
        self._gathers: dict[str, CompressedAllGather] = {}
        self._replicate_groups: dict[str, dist.ProcessGroup] = {}
        self._all_reduces: dict[str, _ReplicaAllReduce] = {}
        self._reduce_scatters: dict[str, _ReduceScatter] = {}
        for name, param_group in _param_groups(root):
            _check_param_group(name, param_group, is_lossy)
            self._attach(name, param_group, weight_feedback, gradient_feedback, replicas)
        if replicas is not None and not self._all_reduces:
            where, expected = "compress_fsdp, all_reduce", "replicated shards (HSDP)"
            advice = "shard it over a mesh of (replicas, shards), or leave out all_reduce"
            raise PolicyError(where, found="a model without replicas", expected=expected, do=advice)
        self._config_checks = self._make_config_checks()

    def _attach(
        self,
        name: str,
        param_group: Any,
        weights: ErrorFeedback | None,
        gradients: ErrorFeedback | None,
        replicas: CompressorLike,
    ) -> None:
        """Let a module communicate in compressed messages; None for torch's own messages."""
        self._original_comms.append((param_group, param_group._all_gather_comm, param_group._reduce_scatter_comm))
        if weights is not None:
            gather = CompressedAllGather(weights, self.link_stats["all-gather"], name=f"fsdp {name}")
            self._gathers[name] = gather
            param_group._all_gather_comm = _AllGather(gather, self._min_numel, self)
        if gradients is not None:
            scatter = CompressedReduceScatter(gradients, self.link_stats["reduce-scatter"], name=f"fsdp {name}")
            hook = _ReduceScatter(scatter, self._min_numel, self, name)
            self._reduce_scatters[name] = param_group._reduce_scatter_comm = hook
        group = getattr(param_group.mesh_info, "replicate_process_group", None)
        if group is not None:
            self._replicate_groups[name] = group
        if group is not None and replicas is not None:
            hops = {hop: self.link_stats.setdefault(hop, LinkStats()) for hop in ("first hop", "second hop")}
            all_reduce = CompressedAllReduce(replicas, name=f"fsdp {name}", link_stats=hops)
            self._all_reduces[name] = _ReplicaAllReduce(param_group, all_reduce, self._min_numel, self.check_config)

    def detach(self) -> None:
        """Restore the original communication of every module."""
        for param_group, gathers, scatters in self._original_comms:
            param_group._all_gather_comm, param_group._reduce_scatter_comm = gathers, scatters
        for all_reduce in self._all_reduces.values():
            all_reduce.detach()
        self._original_comms, self._config_checks = [], {}

    def state_dict(self) -> dict[str, Any]:
        """The feedback state of this rank; each rank has its own. Tensors are not copied."""
        state: dict[str, Any] = {
            "words": self._config,
            "all_gather": {name: gather.state_dict() for name, gather in self._gathers.items()},
            "reduce_scatter": {name: hook.scatter.state_dict() for name, hook in self._reduce_scatters.items()},
            **self._rank_state(),
        }
        if self._all_reduces:
            state["all_reduce"] = {name: one.all_reduce.state_dict() for name, one in self._all_reduces.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this rank returned; on all ranks, or on none.

        Raises:
            MismatchError: it has another configuration, or is of another rank, whose messages have lost something else;
                or, at the next message, ranks loaded different steps.
        """
        own = self.state_dict()
        self._check_common_state(state, own)
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            saved_states = state.get(kind, {})
            if not isinstance(saved_states, Mapping) or saved_states.keys() != own.get(kind, {}).keys():
                problem, expected = f"{kind} of {validate.describe_value(saved_states)}", "the same modules"
                raise MismatchError("compress_fsdp", found=problem, expected=expected, do="load that of this model")
            for name, saved_state in saved_states.items():
                check = check_hops if kind == "all_reduce" else check_layouts
                check(f"compress_fsdp, {kind} of {name or 'the root'}", saved_state)
        for name, saved_state in state["all_gather"].items():
            self._gathers[name].load_state_dict(saved_state)
        for name, saved_state in state["reduce_scatter"].items():
            self._reduce_scatters[name].scatter.load_state_dict(saved_state)
        for name, saved_state in state.get("all_reduce", {}).items():
            self._all_reduces[name].all_reduce.load_state_dict(saved_state)
        self._config_checks = self._make_config_checks()

    def _feedbacks(self) -> Iterable[ErrorFeedback]:
        return [collective.feedback for collective in self._collectives().values()]

    @property
    def module(self) -> nn.Module:
        """The sharded model."""
        return self._root

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks: those of the default group."""
        group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        return group

    def parameters(self) -> list[Tensor]:
        """This rank's shards of the parameters, and the parameters that are not sharded."""
        return [parameter for _, parameter in self._named_shards()]

    def config(self) -> dict[str, Any]:
        """The configuration that a run which is resumed from a journal must have on this rank, too."""
        layout = None if self._record is None else self._record.layout_digest
        return {**self._config, "shard_compressor": self._shard_spec, "layout": layout}

    def counts(self) -> JSON:
        """The numbers of messages so far, by kind and module, and by layout."""
        return {name: counts for name, hop in self._collectives().items() if (counts := dict(hop.counts()))}

    def restart(self, counts: JSON) -> None:
        """Go on as if so many messages had been sent, without feedback of earlier ones; on all ranks alike."""
        collectives = self._collectives()
        if not _is_counts(counts) or not counts.keys() <= collectives.keys():
            expected, advice = "numbers of messages by module", "restore what this model has written"
            raise MismatchError("compress_fsdp", found=f"{counts!r:.60}", expected=expected, do=advice)
        for name, collective in collectives.items():
            collective.restart(counts.get(name, {}))
        self._config_checks = self._make_config_checks()

    def record_gradients(self, compressor: CompressorLike = None) -> ShardRecord:
        """Keep this rank's shards of the averaged gradients of each step from now on, for a journal.

        Args:
            compressor: rounds them, in place, when they are asked for; None: they are kept as they are.

        Raises:
            PolicyError: a compressor with feedback; they are kept for another journal.
        """
        self._check_not_recorded()
        feedback = as_feedback(compressor)
        if not isinstance(feedback, NoFeedback):
            raise not_replayable(f"shard_compressor={feedback.spec}", "leave out the feedback")
        named_shards = [(name, parameter) for name, parameter in self._named_shards() if parameter.requires_grad]
        self._shard_spec = feedback.spec
        self._record = ShardRecord(named_shards, feedback.compressor, self.group.rank())
        return self._record

    def check_config(self, group: dist.ProcessGroup) -> None:
        """Compare the configuration of the ranks of a group, before its first message."""
        if id(group) in self._config_checks:
            self._config_checks.pop(id(group)).check()

    def check_finite(self, name: str, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Raise PolicyError on every rank if the summed gradients of a module must be finite and are not."""
        if self._nonfinite != "raise":
            return
        count = reduce_numbers([float(shard.isfinite().logical_not().sum())], group, shard.device)
        if name in self._replicate_groups:  # whose ranks would wait for an average
            count = reduce_numbers(count, self._replicate_groups[name], shard.device)
        if count[0]:
            raise nonfinite_error(f"gradients of {name or 'the root'}")

    def _named_shards(self) -> list[tuple[str, Tensor]]:
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass alone the root has whole parameters
        return list(self._root.named_parameters())

    def _collectives(self) -> dict[str, CompressedCollective]:
        """The senders of messages, by kind and name of the module."""
        result: dict[str, CompressedCollective] = {f"gather {name}": hop for name, hop in self._gathers.items()}
        result |= {f"scatter {name}": hook.scatter for name, hook in self._reduce_scatters.items()}
        for name, replicas in self._all_reduces.items():
            result |= {f"hop {index} {name}": hop for index, hop in enumerate(replicas.all_reduce.hops)}
        return result

    def _make_config_checks(self) -> dict[int, ConfigCheck]:
        counts: dict[str, Any] = {name: hook.scatter.counts() for name, hook in self._reduce_scatters.items()}
        counts |= {f"{name}, all-gather": gather.counts() for name, gather in self._gathers.items()}
        for name, one in self._all_reduces.items():
            counts[f"{name}, all-reduce"] = [hop.counts() for hop in one.all_reduce.hops]
        config = {**self._config, "counts": counts}
        groups: list[dist.ProcessGroup] = []
        for param_group, _, _ in self._original_comms:
            groups += param_group._all_gather_process_group, param_group._reduce_scatter_process_group
        groups += (all_reduce.group for all_reduce in self._all_reduces.values())
        checks: dict[int, ConfigCheck] = {}
        for group in groups:
            if id(group) not in checks and group.size() > 1:
                checks[id(group)] = replica_check(group, "compress_fsdp", config, self._timeout)
        return checks


class _CommAllocator:
    """Allocates the buffers of torch's all-gather and reduce-scatter interfaces."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(math.prod(size), dtype=dtype, device=device).view(*size)


class _AllGather(_CommAllocator):
    def __init__(self, gather: CompressedAllGather, min_numel: int, compression: FSDPCompression) -> None:
        self._gather, self._min_numel, self._compression = gather, min_numel, compression

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather; on a CPU without waiting, since torch waits for what is returned where it needs the weights."""
        self._compression.check_config(group)
        async_op = async_op or input_tensor.device.type == "cpu"  # elsewhere it is called on a stream of its own
        # torch passes weights of several dtypes as bytes, which cannot be rounded.
        if not input_tensor.is_floating_point() or input_tensor.numel() < max(self._min_numel, 1):
            work: dist.Work | None = all_gather_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        if group.size() == 1:
            output_tensor.copy_(input_tensor)
            return None
        rows = output_tensor.view(group.size(), -1)
        return self._gather(input_tensor.view(-1), rows, group, async_op=async_op)


class _ReduceScatter(_CommAllocator):
    def __init__(
        self, scatter: CompressedReduceScatter, min_numel: int, compression: FSDPCompression, name: str
    ) -> None:
        self.scatter, self._min_numel, self._compression, self._name = scatter, min_numel, compression, name
        self._uncompressed = CompressedReduceScatter(NoFeedback(Identity()), scatter.stats, name=scatter.name)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce synchronously, whatever `async_op` is."""
        self._compression.check_config(group)
        rows = input_tensor.view(group.size(), -1)
        # Complex gradients cannot be rounded.
        is_exact = not input_tensor.is_floating_point() or rows.shape[1] < max(self._min_numel, 1)
        scatter = self._uncompressed if is_exact else self.scatter
        output_tensor.copy_(_apply_reduce_op_(scatter(rows, group, f"{rows.shape[1]}"), op, group.size()))
        self._compression.check_finite(self._name, output_tensor, group)


class _ReplicaAllReduce:
    """Averages the gradient shards of one module over its replicas, instead of torch's own all-reduce.

    For torch the module is then sharded in one dimension, with a hook of a user that runs after each reduce-scatter.
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
        self._partial: Tensor | None = None  # the sum of gradients that are not averaged yet
        self._original_infos = param_group.mesh_info, param_group.post_forward_mesh_info
        if getattr(param_group, "_all_reduce_hook", "missing") is not None:
            problem = "a hook of the user's, or a torch without such hooks"
            where, advice = "compress_fsdp, all_reduce", "remove it, or use torch's own all-reduce"
            raise PolicyError(where, found=problem, expected="no all-reduce hook", do=advice)
        # FSDP2's description of a mesh of replicas and shards, without the replicas
        mesh_info = param_group.mesh_info
        [kind] = [one for one in type(mesh_info).__mro__ if one.__name__ == "FSDPMeshInfo"]
        known = {field.name: getattr(mesh_info, field.name) for field in dataclasses.fields(kind) if field.init}
        shard_info = kind(**(known | {"replicate_mesh_dim": None}))
        shard_info.reduce_scatter_process_group = getattr(mesh_info, "reduce_scatter_process_group", None)
        if param_group.post_forward_mesh_info is param_group.mesh_info:
            param_group.post_forward_mesh_info = shard_info
        param_group.mesh_info, param_group._all_reduce_hook = shard_info, self._average_

    def detach(self) -> None:
        """Restore torch's own all-reduce."""
        self._param_group.mesh_info, self._param_group.post_forward_mesh_info = self._original_infos
        self._param_group._all_reduce_hook = None

    def _average_(self, shard: Tensor) -> None:
        """Average a flat gradient shard over the replicas; sum it where the user has set what sums are divided by.

        After `set_requires_all_reduce(False)` it is kept for the next average.
        """
        if self._partial is not None:
            shard.add_(self._partial)
            self._partial = None
        if not self._param_group.all_reduce_grads:
            self._partial = shard.clone()
            shard.zero_()
            return
        self._check_config(self.group)
        is_small = shard.numel() < max(self._min_numel, 1)
        (self._uncompressed if is_small else self.all_reduce).average_(shard, self.group, f"{shard.numel()}")
        if self._param_group.gradient_divide_factor is not None:
            shard.mul_(self.group.size())


def _is_counts(value: JSON) -> TypeGuard[dict[str, dict[str, int]]]:
    layouts = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(x, dict) and all(type(n) is int and n >= 0 for n in x.values()) for x in layouts)


def _apply_reduce_op_(total: Tensor, op: Any, world_size: int) -> Tensor:
    """Turn a sum into the result of a reduction, in place, and return it."""
    kinds: Any = dist.ReduceOp.RedOpType
    kind = getattr(op, "op", op)
    if kind == kinds.AVG:
        return total.div_(world_size)
    if kind == kinds.PREMUL_SUM:
        return total.mul_(op.factor)
    if kind != kinds.SUM:
        expected, advice = "SUM, AVG or PREMUL_SUM", "reduce by one of these"
        raise PolicyError("reduce-scatter", found=str(kind), expected=expected, do=advice)
    return total


def _check_param_group(name: str, param_group: Any, is_lossy: bool) -> None:
    """Raise PolicyError if the messages of a module are compressed already, or cannot be rounded.

    Values are rounded together with their neighbours in a message. If tensor parallelism splits some parameters of a
    message and replicates others, the neighbours of the replicated ones differ between its ranks, and so would they.
    """
    gather, scatter = param_group._all_gather_comm, param_group._reduce_scatter_comm
    if isinstance(gather, _AllGather) or isinstance(scatter, _ReduceScatter):
        problem, do = "a model that is compressed already", "first call detach() of what compress_fsdp returned"
        raise PolicyError("compress_fsdp", found=problem, expected="a model that is not", do=do)
    mesh_dims = param_group.mesh_info.mesh.ndim
    is_split = {
        any(isinstance(placement, Shard) for placement in param.sharded_param.placements[mesh_dims:])
        for param in param_group.fsdp_params
    }
    if is_lossy and len(is_split) > 1:
        where = f"compress_fsdp, {name or 'the root'}"
        problem = "parameters that are split over ranks, and replicated ones"
        advice = "call fully_shard on modules of one kind each, such as norms by themselves, or pass None, None"
        raise PolicyError(where, found=problem, expected="one kind in each module", do=advice)


def _param_groups(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and parameter group of every module that `fully_shard` was applied to and that is sharded."""
    modules = [(name, module) for name, module in root.named_modules() if isinstance(module, FSDPModule)]
    param_groups = [
        (f"{name}.{index}" if index else name, param_group)
        for name, module in modules
        for index, param_group in enumerate(getattr(module._get_fsdp_state(), "_fsdp_param_groups", []))
        if getattr(param_group.mesh_info, "shard_process_group", None) is not None
    ]
    if not modules:
        advice = "call fully_shard first"
        raise PolicyError("compress_fsdp", found=validate.type_name(root), expected="a sharded model", do=advice)
    if not param_groups or not hasattr(param_groups[0][1], "_reduce_scatter_comm"):
        problem = f"torch {torch.__version__} does not let modules communicate otherwise, or nothing is sharded"
        raise PolicyError("compress_fsdp", found=problem, do="use the newest torch, and shard over a mesh")
    yield from param_groups
