"""Compression of the gradients of DistributedDataParallel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint import validate
from shrinkpoint.comm.accordion import Accordion
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, all_reduce_sum, check_replica_options
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ReplicaConfigCheck
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError


def compress_ddp(
    model: DistributedDataParallel,
    compressor: CompressorLike = "q4:64",
    *,
    average_compressor: CompressorLike = None,
    accordion: Accordion[CompressorLike] | None = None,
    min_numel: int = 0,
    nonfinite: str = "pass",
    timeout: float = CONFIG_TIMEOUT,
) -> DDPCompression:
    """Average the gradients of a model in compressed messages, instead of torch's all-reduce.

    Each bucket takes two hops: every rank sends a compressed share of it to each other rank, adds up the shares it
    receives in float32, and sends the compressed average to all. All ranks decode the same bytes, so replicas stay
    equal to the last bit. Works on gloo, where collectives run inside the hook, one after another, and on nccl.

    Feedback state belongs to a bucket and the order of the gradients in it, which DDP changes after its first backward
    pass unless `find_unused_parameters` is set: the first step of all, and the first one after a restart, start without
    a memory. With a `GradScaler` it is in units of the scaled loss.

    Args:
        model: before its first backward pass, without another hook; on every rank of its group.
        compressor: for gradients. Groups and shares are those of a bucket, in which the gradients of many parameters
            are concatenated: "row" and "channel" are not meaningful.
        average_compressor: for their average; None for `compressor` without its feedback.
        accordion: switches between two compressors; then `compressor` is not used.
        min_numel: smaller buckets are sent uncompressed.
        nonfinite: "pass": a value that is not finite reaches every rank as such, with the values encoded together with
            it, so that a `GradScaler` skips the step. "raise": it is an error on every rank.
        timeout: seconds that the first backward pass waits for the configuration of each other rank.

    Returns:
        The handle: statistics and state.

    Raises:
        PolicyError: another kind of model, or an unusable compressor or invalid spec.
        MismatchError: in the first backward pass, on every rank: the ranks are configured differently.
    """
    replicas = DDPCompression(model, compressor, average_compressor, accordion, min_numel, nonfinite, timeout)
    try:
        model.register_comm_hook(replicas, _comm_hook)
    except RuntimeError as error:
        raise PolicyError("compress_ddp", found=str(error).split("\n")[0], do="give a model without a hook") from error
    return replicas


def _comm_hook(state: DDPCompression, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.reduce(bucket)


_comm_hook.__annotations__ = {}  # torch compares them with types, and these are strings


class DDPCompression:
    """Handle of the compressed gradients of one model, which `compress_ddp` returns.

    Attributes:
        link_stats: statistics of "first hop" and "second hop" since the start.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        compressor: CompressorLike,
        average_compressor: CompressorLike,
        accordion: Accordion[CompressorLike] | None,
        min_numel: int,
        nonfinite: str,
        timeout: float,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            problem, expected = validate.type_name(model), "a DistributedDataParallel model"
            raise PolicyError("compress_ddp", found=problem, expected=expected, do="wrap it first")
        check_replica_options("compress_ddp", accordion, min_numel, nonfinite, timeout)
        self._group: dist.ProcessGroup = model.process_group
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._accordion, self._average_compressor = accordion, average_compressor
        self._min_numel, self._nonfinite, self._timeout = min_numel, nonfinite, timeout
        compressor = compressor if accordion is None else accordion.compressor
        self._all_reduce = CompressedAllReduce(compressor, average_compressor, name="ddp")
        self.link_stats: dict[str, LinkStats] = self._all_reduce.link_stats
        self._config_check = self._make_config_check()

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average the gradients of one bucket in its own buffer: the communication hook."""
        self._config_check.check()
        buffer = bucket.buffer()
        self._average(torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer, bucket)
        if self._accordion is not None:
            self._observe(buffer, last=bucket.is_last())
        if bucket.is_last():
            self._all_reduce.step()
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def state_dict(self) -> dict[str, Any]:
        """The feedback and Accordion state of this rank; each rank has its own. Tensors are not copied."""
        state: dict[str, Any] = {"words": self._config(), "hops": self._all_reduce.state_dict()}
        return state if self._accordion is None else {**state, "accordion": self._accordion.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this rank returned; on all ranks, or on none.

        Raises:
            MismatchError: it has another configuration; or, in the next backward pass, ranks loaded different steps.
        """
        config, saved_config = self._config(), state.get("words")
        if saved_config != config:
            advice = "compress with the saved configuration"
            raise MismatchError("compress_ddp", found=f"a state of {saved_config}", expected=f"{config}", do=advice)
        if self._accordion is not None:
            self._accordion.load_state_dict(state["accordion"])
            self._all_reduce.switch(self._accordion.compressor, self._average_compressor)
        self._all_reduce.load_state_dict(state["hops"])
        self._config_check = self._make_config_check()

    def _average(self, flat: Tensor, bucket: Any) -> None:
        if flat.numel() < self._min_numel:
            dist.all_reduce(flat.div_(self._group.size()), group=self._group)
        else:
            names = "\n".join(self._names[id(parameter)] for parameter in bucket.parameters())
            self._all_reduce.average_(flat, self._group, hashlib.sha256(names.encode()).hexdigest()[:16])
        if self._nonfinite == "raise" and not bool(flat.isfinite().all()):
            advice = 'look for what overflowed, or let such values pass: nonfinite="pass"'
            raise PolicyError(f"gradients, bucket {bucket.index()}", found="values that are not finite", do=advice)

    def _observe(self, buffer: Tensor, *, last: bool) -> None:
        """Record the norm of the averaged gradients, and switch the compressor if the regime changes."""
        accordion = self._accordion
        assert accordion is not None
        accordion.add_gradient(buffer)
        if last and accordion.end_step(lambda numbers: all_reduce_sum(numbers, self._group, buffer.device)):
            self._all_reduce.switch(accordion.compressor, self._average_compressor)

    def _config(self) -> dict[str, Any]:
        """The configuration that all ranks, and a state to load, must have in common."""
        accordion, feedback = self._accordion, self._all_reduce.reduce_scatter.feedback
        spec = feedback.shared_spec if accordion is None else accordion.describe()
        average_spec = None if self._average_compressor is None else str(self._average_compressor)
        return {"how": spec, "second": average_spec, "min_numel": self._min_numel, "nonfinite": self._nonfinite}

    def _make_config_check(self) -> ReplicaConfigCheck:
        config = {**self._config(), "counts": self._all_reduce.reduce_scatter.counts()}
        if self._accordion is not None:
            config |= self._accordion.progress()
        return ReplicaConfigCheck(self._group, "compress_ddp", config, self._timeout)
