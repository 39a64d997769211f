"""FSDP2 (`fully_shard`) whose weights and gradients cross the wire encoded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shrinkpoint import validate
from shrinkpoint.comm.accordion import Accordion, check_accordion
from shrinkpoint.comm.compressed_allreduce import (
    CompressedAllGather,
    CompressedReduceScatter,
    all_gather_tensor,
    as_feedback,
    make_all_reduce_sum,
)
from shrinkpoint.comm.compressors.base import Identity
from shrinkpoint.comm.feedback.base import ErrorFeedback, NoFeedback
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError


def compress_fsdp(
    root: nn.Module,
    all_gather: CompressorLike = "q8:64",
    reduce_scatter: CompressorLike = "q4:64",
    *,
    accordion: Accordion[CompressorLike] | None = None,
    min_numel: int = 0,
    nonfinite: str = "pass",
    timeout: float = CONFIG_TIMEOUT,
) -> FSDPCompression:
    """Gather weights and scatter gradients in encoded messages, in every module that `fully_shard` was applied to.

    The sharded weights that the optimizer changes stay as they are; all ranks compute with the same decoded copies.
    Gradients are added up in float32. With replicated shards (HSDP) the all-reduce between replicas stays torch's own.

    Args:
        root: with all `fully_shard` calls made, before the first forward pass; on every rank.
        all_gather: what weights are sent with: an operator; None: torch's own all-gather.
        reduce_scatter: what gradients are sent with, feedback included; None: torch's own reduce-scatter.
        accordion: switches between two of them; then `reduce_scatter` is not used.
        min_numel: smaller shards are sent as they are.
        nonfinite: "pass": a value that is not finite stays so, with those it was encoded together with. "raise": then
            an error on every rank, for which the ranks exchange a number per module.
        timeout: seconds that the first message waits to learn that all ranks were set up alike.

    Raises:
        PolicyError: no such model, or an operator or a word that cannot be used.
        MismatchError: from the first forward pass, on every rank: they were not set up alike.
    """
    return FSDPCompression(root, all_gather, reduce_scatter, accordion, min_numel, nonfinite, timeout)


class FSDPCompression:
    """The messages of one sharded model; `compress_fsdp` makes it.

    Attributes:
        link_stats: of "all-gather" and "reduce-scatter": bytes and seconds since the start.
    """

    def __init__(
        self,
        root: nn.Module,
        weights: CompressorLike,
        gradients: CompressorLike,
        accordion: Accordion[CompressorLike] | None,
        min_numel: int,
        nonfinite: str,
        timeout: float,
    ) -> None:
        validate.check_choice("compress_fsdp, nonfinite", nonfinite, ("pass", "raise"))
        validate.check_int("compress_fsdp, min_numel", min_numel, minimum=0)
        validate.check_float("compress_fsdp, timeout", timeout)
        check_accordion("compress_fsdp", accordion)
        expected, do = "a module that fully_shard was applied to", "apply it first"
        validate.check_instance("compress_fsdp, root", root, nn.Module, expected=expected, do=do)
        self.link_stats = {"all-gather": LinkStats(), "reduce-scatter": LinkStats()}
        self._accordion, self._timeout, self._raise_nonfinite = accordion, timeout, nonfinite == "raise"
        if accordion is not None:
            for one in (accordion.strong, accordion.mild):
                as_feedback(one)  # what cannot be used is found now, not when it is switched to
            gradients = accordion.compressor
        how = None if weights is None else _as_stateless(weights)
        share = None if gradients is None else as_feedback(gradients)
        self._config = {
            "all_gather": how and how.shared_spec,
            "reduce_scatter": accordion.describe() if accordion else share and share.shared_spec,
            "min_numel": min_numel,
            "nonfinite": nonfinite,
        }
        self._original_comms: list[tuple[Any, Any, Any]] = []
        self._reduce_scatters: dict[str, _ReduceScatter] = {}
        self._reduced_modules: set[str] = set()
        self._squared_norm: Tensor | float = 0.0
        for name, part in _param_groups(root):
            self._original_comms.append((part, part._all_gather_comm, part._reduce_scatter_comm))
            if how is not None:
                gather = CompressedAllGather(how, self.link_stats["all-gather"], name=f"fsdp {name}")
                part._all_gather_comm = _AllGather(gather, min_numel, self)
            if share is not None:
                scatter = CompressedReduceScatter(share, self.link_stats["reduce-scatter"], name=f"fsdp {name}")
                self._reduce_scatters[name] = part._reduce_scatter_comm = _ReduceScatter(scatter, min_numel, self, name)
        self._config_checks = self._make_config_checks()

    def detach(self) -> None:
        """Give back to every module what it communicated with before."""
        for part, gathers, scatters in self._original_comms:
            part._all_gather_comm, part._reduce_scatter_comm = gathers, scatters
        self._original_comms, self._config_checks = [], {}

    def state_dict(self) -> dict[str, Any]:
        """What feedback remembers at this rank, and the regime; each rank has its own. Tensors are not copied."""
        state: dict[str, Any] = {
            "words": self._config,
            "reduce_scatter": {name: one.scatter.state_dict() for name, one in self._reduce_scatters.items()},
        }
        if self._accordion is not None:
            state["accordion"] = self._accordion.state_dict()
            state["step"] = {"seen": sorted(self._reduced_modules), "square": float(self._squared_norm)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of this rank gave; on all ranks, or on none.

        Raises:
            MismatchError: it is that of another set-up; or, from the next message, ranks loaded another step.
        """
        kept = state.get("reduce_scatter", {})
        if state.get("words") != self._config or set(kept) != set(self._reduce_scatters):
            found, expected = f"a state of {state.get('words')}, {sorted(kept)}", f"{self._config}"
            raise MismatchError("compress_fsdp", found=found, expected=expected, do="compress as it was saved")
        if self._accordion is not None:
            self._accordion.load_state_dict(state["accordion"])
            self._reduced_modules, self._squared_norm = set(state["step"]["seen"]), float(state["step"]["square"])
            self._switch(self._accordion.compressor)
        for name, one in kept.items():
            self._reduce_scatters[name].scatter.load_state_dict(one)
        self._config_checks = self._make_config_checks()

    def check_config(self, group: dist.ProcessGroup) -> None:
        """Before each message: whether the ranks of its group were set up alike."""
        if id(group) in self._config_checks:
            self._config_checks.pop(id(group)).check()

    def begin_reduction(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        """Before the gradients of a module are summed. Those of one that was summed already belong to the next step."""
        if self._accordion is None:
            return
        if name in self._reduced_modules:
            self._reduced_modules.clear()
            square, self._squared_norm = float(self._squared_norm), 0.0
            if self._accordion.observe(square, make_all_reduce_sum(group, device)):
                self._switch(self._accordion.compressor)
        self._reduced_modules.add(name)

    def end_reduction(self, name: str, shard: Tensor, group: dist.ProcessGroup) -> None:
        """After they were."""
        if self._accordion is not None:
            self._squared_norm = self._squared_norm + torch.linalg.vector_norm(shard, dtype=torch.float64).square()
        if (
            self._raise_nonfinite
            and make_all_reduce_sum(group, shard.device)([float(shard.isfinite().logical_not().sum())])[0]
        ):
            do = 'look for what overflowed, or let such values pass: nonfinite="pass"'
            raise PolicyError(f"gradients of {name or 'the root'}", found="values that are not finite", do=do)

    def _switch(self, compressor: CompressorLike) -> None:
        for one in self._reduce_scatters.values():
            one.scatter.feedback = as_feedback(compressor)

    def _make_config_checks(self) -> dict[int, ConfigCheck]:
        """One for each group that messages go through."""
        counts = {name: one.scatter.counts() for name, one in self._reduce_scatters.items()}
        words = {**self._config, "counts": counts}
        if self._accordion is not None:
            words["critical"], words["steps"] = self._accordion.critical, self._accordion.steps
        agreements: dict[int, ConfigCheck] = {}
        for part, _, _ in self._original_comms:
            for group in (part._all_gather_process_group, part._reduce_scatter_process_group):
                if id(group) not in agreements and group.size() > 1:
                    agreements[id(group)] = ConfigCheck(group, "compress_fsdp", words, self._timeout)
        return agreements


class _CommAllocator:
    """What both of a module's communications have: where they put their values."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(math.prod(size), dtype=dtype, device=device).view(*size)


class _AllGather(_CommAllocator):
    def __init__(self, gather: CompressedAllGather, min_numel: int, compression: FSDPCompression) -> None:
        self._gather, self._min_numel, self._compression = gather, min_numel, compression

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._compression.check_config(group)
        # Weights of several dtypes come as their bytes: these cannot be rounded.
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
        """Wait for the sum, whatever `async_op` says: torch then finds it done."""
        self._compression.check_config(group)
        self._compression.begin_reduction(self._name, group, output_tensor.device)
        rows = input_tensor.view(group.size(), -1)
        small = rows.shape[1] < max(self._min_numel, 1)
        hop = self._uncompressed if small else self.scatter
        output_tensor.copy_(_apply_reduce_op_(hop(rows, group, f"{rows.shape[1]}"), op, group.size()))
        self._compression.end_reduction(self._name, output_tensor, group)


def _apply_reduce_op_(total: Tensor, op: Any, world_size: int) -> Tensor:
    """A sum made what the reduction asks for.

    Raises:
        PolicyError: that is no kind of sum.
    """
    kinds: Any = dist.ReduceOp.RedOpType
    kind = getattr(op, "op", op)
    if kind == kinds.AVG:
        return total.div_(world_size)
    if kind == kinds.PREMUL_SUM:
        return total.mul_(op.factor)
    if kind != kinds.SUM:
        raise PolicyError("reduce-scatter", found=str(kind), expected="SUM, AVG or PREMUL_SUM")
    return total


def _as_stateless(compressor: CompressorLike) -> ErrorFeedback:
    """What weights are sent with.

    Raises:
        PolicyError: it is a feedback: the weights would be sent again in backward, where nothing is new.
    """
    plain = as_feedback(compressor)
    if not isinstance(plain, NoFeedback):
        raise PolicyError("all-gather", found=plain.spec, expected="an operator", do="leave out the feedback")
    return plain


def _param_groups(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """What communicates, and its name: of every module that `fully_shard` was applied to, where it shards.

    Raises:
        PolicyError: there is none, or this torch has no communication of one's own.
    """
    modules = [(name, one) for name, one in root.named_modules() if isinstance(one, FSDPModule)]
    parts = [
        (f"{name}.{index}" if index else name, part)
        for name, module in modules
        for index, part in enumerate(getattr(module._get_fsdp_state(), "_fsdp_param_groups", []))
        if getattr(part.mesh_info, "shard_process_group", None) is not None
    ]
    if not modules:
        do = "call fully_shard first"
        raise PolicyError("compress_fsdp", found=f"a {type(root).__name__}", expected="a sharded model", do=do)
    if not parts or not hasattr(parts[0][1], "_reduce_scatter_comm"):
        found = f"torch {torch.__version__} does not let modules communicate otherwise, or nothing is sharded"
        raise PolicyError("compress_fsdp", found=found, do="use the newest torch, and shard over a mesh")
    yield from parts
