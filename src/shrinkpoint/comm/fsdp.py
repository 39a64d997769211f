"""Compression of the weights and gradients of FSDP2 (`fully_shard`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from shrinkpoint import validate
from shrinkpoint.comm.accordion import Accordion
from shrinkpoint.comm.compressed_allreduce import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedCollective,
    CompressedReduceScatter,
    all_gather_tensor,
    as_feedback,
    check_hops,
    check_layouts,
    check_replica_options,
    check_replica_state,
    describe_rank,
    has_memory,
    reduce_numbers,
)
from shrinkpoint.comm.compressors.base import Identity
from shrinkpoint.comm.error_feedback import ErrorFeedback, NoFeedback
from shrinkpoint.comm.fsdp_replicas import ReplicaAllReduce, replicate_group
from shrinkpoint.comm.gradient_record import RecordHolder, check_refusal, check_single_record
from shrinkpoint.comm.link import CompressorLike, NonfinitePolicy
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck, replica_check
from shrinkpoint.comm.shard_record import ShardRecord
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.info import JSON


def compress_fsdp(
    root: nn.Module,
    all_gather: CompressorLike = "q8:64",
    reduce_scatter: CompressorLike = "q4:64",
    *,
    all_reduce: CompressorLike = None,
    accordion: Accordion[CompressorLike] | None = None,
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
        accordion: switches between two compressors; then `reduce_scatter` is not used.
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
    return FSDPCompression(root, all_gather, reduce_scatter, all_reduce, accordion, min_numel, nonfinite, timeout)


class FSDPCompression(RecordHolder[ShardRecord]):
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
        accordion: Accordion[CompressorLike] | None,
        min_numel: int,
        nonfinite: NonfinitePolicy,
        timeout: float,
    ) -> None:
        check_replica_options("compress_fsdp", accordion, min_numel, nonfinite, timeout)
        expected, advice = "a module that fully_shard was applied to", "apply it first"
        validate.check_instance("compress_fsdp, root", root, nn.Module, expected=expected, do=advice)
        self.link_stats = {"all-gather": LinkStats(), "reduce-scatter": LinkStats()}
        self._accordion, self._timeout, self._raise_nonfinite = accordion, timeout, nonfinite == "raise"
        gradients = gradients if accordion is None else accordion.compressor
        weight_feedback = None if weights is None else _as_stateless(weights)
        gradient_feedback = None if gradients is None else as_feedback(gradients)
        weight_spec = weight_feedback and weight_feedback.shared_spec
        gradient_spec = accordion.describe() if accordion else gradient_feedback and gradient_feedback.shared_spec
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
        self._all_reduces: dict[str, ReplicaAllReduce] = {}
        self._reduce_scatters: dict[str, _ReduceScatter] = {}
        self._reduced_modules: set[str] = set()
        for name, param_group in _param_groups(root):
            _check_uncompressed(param_group)
            if is_lossy:
                _check_tensor_parallel(name, param_group)
            self._original_comms.append((param_group, param_group._all_gather_comm, param_group._reduce_scatter_comm))
            if weight_feedback is not None:
                gather = CompressedAllGather(weight_feedback, self.link_stats["all-gather"], name=f"fsdp {name}")
                self._gathers[name] = gather
                param_group._all_gather_comm = _AllGather(gather, min_numel, self)
            if gradient_feedback is not None:
                stats = self.link_stats["reduce-scatter"]
                scatter = CompressedReduceScatter(gradient_feedback, stats, name=f"fsdp {name}")
                hook = _ReduceScatter(scatter, min_numel, self, name)
                self._reduce_scatters[name] = param_group._reduce_scatter_comm = hook
            self._add_replicas(name, param_group, replicas, min_numel)
        if replicas is not None and not self._all_reduces:
            problem, do = (
                "a model without replicas",
                "shard it over a mesh of (replicas, shards), or leave out all_reduce",
            )
            raise PolicyError(
                "compress_fsdp(all_reduce=...)", found=problem, expected="replicated shards (HSDP)", do=do
            )
        self._config_checks = self._make_config_checks()

    def detach(self) -> None:
        """Restore the original communication of every module."""
        for param_group, gathers, scatters in self._original_comms:
            param_group._all_gather_comm, param_group._reduce_scatter_comm = gathers, scatters
        for all_reduce in self._all_reduces.values():
            all_reduce.detach()
        self._original_comms, self._config_checks = [], {}

    def state_dict(self) -> dict[str, Any]:
        """The feedback and Accordion state of this rank; each rank has its own. Tensors are not copied."""
        state: dict[str, Any] = {
            "words": self._config,
            "all_gather": {name: gather.state_dict() for name, gather in self._gathers.items()},
            "reduce_scatter": {name: hook.scatter.state_dict() for name, hook in self._reduce_scatters.items()},
        }
        if self._has_memory:
            state["rank"] = describe_rank(self.group)
        if self._all_reduces:
            state["all_reduce"] = {name: one.all_reduce.state_dict() for name, one in self._all_reduces.items()}
        if self._accordion is not None:
            state["accordion"] = self._accordion.state_dict()
            state["step"] = {"seen": sorted(self._reduced_modules), "square": float(self._accordion.step_square)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this rank returned; on all ranks, or on none.

        Raises:
            MismatchError: it has another configuration, or is of another rank, whose messages have lost something else;
                or, at the next message, ranks loaded different steps.
        """
        self._check_state(state)
        if self._accordion is not None:
            self._accordion.load_state_dict(state["accordion"])
            self._accordion.step_square = float(state["step"]["square"])
            self._reduced_modules = set(state["step"]["seen"])
            self._switch(self._accordion.compressor)
        for name, saved_state in state["all_gather"].items():
            self._gathers[name].load_state_dict(saved_state)
        for name, saved_state in state["reduce_scatter"].items():
            self._reduce_scatters[name].scatter.load_state_dict(saved_state)
        for name, saved_state in state.get("all_reduce", {}).items():
            self._all_reduces[name].all_reduce.load_state_dict(saved_state)
        self._config_checks = self._make_config_checks()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error for what `state_dict` of this rank and configuration does not return."""
        own = self.state_dict()
        check_replica_state("compress_fsdp", state, own)
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            saved_states = state.get(kind, {})
            if not isinstance(saved_states, Mapping) or saved_states.keys() != own.get(kind, {}).keys():
                problem, expected = f"{kind} of {validate.describe_value(saved_states)}", "of the same modules"
                raise MismatchError("compress_fsdp", found=problem, expected=expected, do="load it into this model")
            for name, saved_state in saved_states.items():
                check = check_hops if kind == "all_reduce" else check_layouts
                check(f"compress_fsdp, {kind} of {name or 'the root'}", saved_state)

    @property
    def _has_memory(self) -> bool:
        return has_memory([collective.feedback for collective in self._collectives().values()], self._accordion)

    @property
    def module(self) -> nn.Module:
        """The sharded model."""
        return self._root

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks: those of the default group."""
        group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        return group

    @property
    def has_feedback(self) -> bool:
        """Whether ranks remember what their messages to each other have lost."""
        return any(not collective.feedback.is_stateless for collective in self._collectives().values())

    def parameters(self) -> list[Tensor]:
        """This rank's shards of the parameters, and the parameters that are not sharded."""
        return [parameter for _, parameter in self._named_shards()]

    def config(self) -> dict[str, Any]:
        """What a run that is resumed from a journal must have in common with this one, on this rank."""
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
            PolicyError: an Accordion; a compressor with feedback; they are kept for another journal.
        """
        if self._accordion is not None:
            check_refusal("an Accordion, whose choice is not in a record", "use one compressor")
        check_single_record("compress_fsdp", self._record)
        feedback = as_feedback(compressor)
        if not isinstance(feedback, NoFeedback):
            check_refusal(f"shard_compressor={feedback.spec}", "leave out the feedback")
        named_shards = [(name, parameter) for name, parameter in self._named_shards() if parameter.requires_grad]
        self._shard_spec = feedback.spec
        self._record = ShardRecord(named_shards, feedback.compressor, self.group.rank())
        return self._record

    def check_config(self, group: dist.ProcessGroup) -> None:
        """Compare the configuration of the ranks of a group, before its first message."""
        if id(group) in self._config_checks:
            self._config_checks.pop(id(group)).check()

    def begin_reduction(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        """Called before the gradients of a module are summed; a module that was summed already starts the next step."""
        if self._accordion is None:
            return
        if name in self._reduced_modules:
            self._reduced_modules.clear()
            if self._accordion.end_step(lambda numbers: reduce_numbers(numbers, group, device)):
                self._switch(self._accordion.compressor)
        self._reduced_modules.add(name)

    def end_reduction(self, name: str, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Called after the gradients of a module were summed; a PolicyError if they must be finite and are not."""
        if self._accordion is not None:
            self._accordion.add_gradient(shard)
        if not self._raise_nonfinite:
            return
        count = reduce_numbers([float(shard.isfinite().logical_not().sum())], group, shard.device)
        if name in self._replicate_groups:  # whose ranks would wait for an average
            count = reduce_numbers(count, self._replicate_groups[name], shard.device)
        if count[0]:
            advice = 'look for what overflowed, or let such values pass: nonfinite="pass"'
            raise PolicyError(f"gradients of {name or 'the root'}", found="values that are not finite", do=advice)

    def _named_shards(self) -> list[tuple[str, Tensor]]:
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass alone the root has whole parameters
        return list(self._root.named_parameters())

    def _collectives(self) -> dict[str, CompressedCollective]:
        """What sends messages, by kind and name of the module."""
        result: dict[str, CompressedCollective] = {f"gather {name}": hop for name, hop in self._gathers.items()}
        result |= {f"scatter {name}": hook.scatter for name, hook in self._reduce_scatters.items()}
        for name, replicas in self._all_reduces.items():
            result |= {f"hop {index} {name}": hop for index, hop in enumerate(replicas.all_reduce.hops)}
        return result

    def _add_replicas(self, name: str, param_group: Any, compressor: CompressorLike, min_numel: int) -> None:
        """Note the group of a module's replicas, and let it average in compressed messages if that is asked for."""
        group = replicate_group(param_group)
        if group is None:
            return
        self._replicate_groups[name] = group
        if compressor is None:
            return
        hops = {hop: self.link_stats.setdefault(hop, LinkStats()) for hop in ("first hop", "second hop")}
        all_reduce = CompressedAllReduce(compressor, name=f"fsdp {name}", link_stats=hops)
        self._all_reduces[name] = ReplicaAllReduce(param_group, all_reduce, min_numel, self.check_config)

    def _switch(self, compressor: CompressorLike) -> None:
        for hook in self._reduce_scatters.values():
            hook.scatter.switch(as_feedback(compressor))

    def _make_config_checks(self) -> dict[int, ConfigCheck]:
        """One check for each group that messages are sent in."""
        counts: dict[str, Any] = {name: hook.scatter.counts() for name, hook in self._reduce_scatters.items()}
        counts |= {f"{name}, all-gather": gather.counts() for name, gather in self._gathers.items()}
        for name, one in self._all_reduces.items():
            counts[f"{name}, all-reduce"] = [hop.counts() for hop in one.all_reduce.hops]
        config = {**self._config, "counts": counts}
        if self._accordion is not None:
            config |= self._accordion.progress()
        checks: dict[int, ConfigCheck] = {}
        for param_group, _, _ in self._original_comms:
            for group in (param_group._all_gather_process_group, param_group._reduce_scatter_process_group):
                if id(group) not in checks and group.size() > 1:
                    checks[id(group)] = replica_check(group, "compress_fsdp", config, self._timeout)
        for all_reduce in self._all_reduces.values():
            if id(all_reduce.group) not in checks and all_reduce.group.size() > 1:
                checks[id(all_reduce.group)] = replica_check(all_reduce.group, "compress_fsdp", config, self._timeout)
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
        self._compression.begin_reduction(self._name, group, output_tensor.device)
        rows = input_tensor.view(group.size(), -1)
        # Complex gradients cannot be rounded.
        is_exact = not input_tensor.is_floating_point() or rows.shape[1] < max(self._min_numel, 1)
        scatter = self._uncompressed if is_exact else self.scatter
        output_tensor.copy_(_apply_reduce_op_(scatter(rows, group, f"{rows.shape[1]}"), op, group.size()))
        self._compression.end_reduction(self._name, output_tensor, group)


def _is_counts(value: JSON) -> TypeGuard[dict[str, dict[str, int]]]:
    """Whether JSON has the form of `FSDPCompression.counts`."""
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
        raise PolicyError(
            "reduce-scatter", found=str(kind), expected="SUM, AVG or PREMUL_SUM", do="reduce by one of these"
        )
    return total


def _as_stateless(compressor: CompressorLike) -> ErrorFeedback:
    """Return the compressor of weights, without feedback: weights are sent again in backward, unchanged."""
    feedback = as_feedback(compressor)
    if not isinstance(feedback, NoFeedback):
        raise PolicyError("all-gather", found=feedback.spec, expected="a compressor", do="leave out the feedback")
    return feedback


def _check_uncompressed(param_group: Any) -> None:
    """Raise PolicyError if the messages of a module are compressed already."""
    if isinstance(param_group._all_gather_comm, _AllGather) or isinstance(
        param_group._reduce_scatter_comm, _ReduceScatter
    ):
        problem, do = "a model that is compressed already", "call detach() of what compress_fsdp returned first"
        raise PolicyError("compress_fsdp", found=problem, expected="one that is not", do=do)


def _check_tensor_parallel(name: str, param_group: Any) -> None:
    """Raise PolicyError if a message has parameters that tensor parallelism splits, and some that it replicates.

    Values are rounded together with those beside them, which differ between the ranks of tensor parallelism: what these
    must have in common would drift apart.
    """
    mesh_dims = param_group.mesh_info.mesh.ndim
    is_split = {
        any(isinstance(placement, Shard) for placement in param.sharded_param.placements[mesh_dims:])
        for param in param_group.fsdp_params
    }
    if len(is_split) > 1:
        where, problem = (
            f"compress_fsdp, {name or 'the root'}",
            "parameters that are split over ranks, and replicated ones",
        )
        advice = (
            "call fully_shard on modules of one kind each, such as norms by themselves, or compress none: None, None"
        )
        raise PolicyError(where, found=problem, expected="one kind of them in a module", do=advice)


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
