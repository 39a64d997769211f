"""DistributedDataParallel whose gradients cross the wire encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint import validate
from shrinkpoint.comm.accordion import Accordion, check_accordion
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, make_all_reduce_sum
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck
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
    """Average the gradients of a model in encoded messages, in place of torch's all-reduce.

    Each bucket takes two hops: every rank sends every other its share, encoded; adds up in float32 what it gets; and
    sends the average to all, encoded again. All ranks decode the same bytes, so replicas stay equal to the last bit.
    Works on gloo, where collectives run inside the hook, one after another, and on nccl.

    What feedback remembers belongs to a bucket and the order of the gradients in it, which DDP changes after its first
    backward pass unless `find_unused_parameters` is set: the first step of all, and the first one after a restart,
    begin from nothing. With a `GradScaler` it is in units of the scaled loss.

    Args:
        model: before its first backward pass, without another hook; on every rank of its group.
        compressor: what gradients are sent with. Runs and shares are those of a bucket, in which the gradients of many
            parameters lie one after another: "row" and "channel" make no sense of them.
        average_compressor: what the average is sent with; None: `compressor` without its feedback.
        accordion: switches between two of them; then `compressor` is not used.
        min_numel: smaller buckets are sent as they are.
        nonfinite: "pass": a value that is not finite reaches every rank as one, with those it was encoded together
            with, so that a `GradScaler` skips the step. "raise": then an error on every rank.
        timeout: seconds that the first backward pass waits to learn that all ranks were set up alike.

    Raises:
        PolicyError: no such model, or an operator or a word that cannot be used.
        MismatchError: from the first backward pass, on every rank: they were not set up alike.
    """
    replicas = DDPCompression(model, compressor, average_compressor, accordion, min_numel, nonfinite, timeout)
    try:
        model.register_comm_hook(replicas, _comm_hook)
    except RuntimeError as error:
        raise PolicyError("compress_ddp", found=str(error).split("\n")[0], do="give a model without a hook") from error
    return replicas


def _comm_hook(state: DDPCompression, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.reduce(bucket)


_comm_hook.__annotations__ = {}  # torch compares them with types, and these are words


class DDPCompression:
    """The gradients of one model on their way between ranks; `compress_ddp` makes it.

    Attributes:
        link_stats: of "first hop" and "second hop": bytes and seconds since the start.
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
        _check_ddp_arguments(model, nonfinite)
        validate.check_int("compress_ddp, min_numel", min_numel, minimum=0)
        validate.check_float("compress_ddp, timeout", timeout)
        check_accordion("compress_ddp", accordion)
        self._group: dist.ProcessGroup = model.process_group
        self._names = {id(one): name for name, one in model.module.named_parameters()}
        self._accordion, self._average_compressor = accordion, average_compressor
        self._min_numel, self._nonfinite, self._timeout = min_numel, nonfinite, timeout
        self._squared_norm: Tensor | float = 0.0
        if accordion is not None:
            for one in (accordion.strong, accordion.mild):
                CompressedAllReduce(
                    one, average_compressor, name="ddp"
                )  # what cannot be used is found now, not when it is switched to
        self._all_reduce = CompressedAllReduce(
            compressor if accordion is None else accordion.compressor, average_compressor, name="ddp"
        )
        self.link_stats: dict[str, LinkStats] = self._all_reduce.link_stats
        self._config_check = self._make_config_check()

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """What the hook is: the averages of one bucket's gradients, in its own buffer."""
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
        """What feedback remembers at this rank, and the regime; each rank has its own. Tensors are not copied."""
        state: dict[str, Any] = {"words": self._config(), "hops": self._all_reduce.state_dict()}
        return state if self._accordion is None else {**state, "accordion": self._accordion.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of this rank gave; on all ranks, or on none.

        Raises:
            MismatchError: it is that of another set-up; or, from the next backward pass, ranks loaded another step.
        """
        words, found = self._config(), state.get("words")
        if found != words:
            do = "compress as it was saved"
            raise MismatchError("compress_ddp", found=f"a state of {found}", expected=f"{words}", do=do)
        if self._accordion is not None:
            self._accordion.load_state_dict(state["accordion"])
            self._all_reduce.switch(self._accordion.compressor, self._average_compressor)
        self._all_reduce.load_state_dict(state["hops"])
        self._config_check = self._make_config_check()

    def _average(self, flat: Tensor, bucket: Any) -> None:
        if flat.numel() < self._min_numel:
            dist.all_reduce(flat.div_(self._group.size()), group=self._group)
        else:
            names = "\n".join(self._names[id(one)] for one in bucket.parameters())
            self._all_reduce.average_(flat, self._group, hashlib.sha256(names.encode()).hexdigest()[:16])
        if self._nonfinite == "raise" and not bool(flat.isfinite().all()):
            do = 'look for what overflowed, or let such values pass: nonfinite="pass"'
            raise PolicyError(f"gradients, bucket {bucket.index()}", found="values that are not finite", do=do)

    def _observe(self, buffer: Tensor, *, last: bool) -> None:
        """Tell the accordion the norm of what all ranks have decoded, and use what it says from the next step on."""
        accordion = self._accordion
        assert accordion is not None
        self._squared_norm = self._squared_norm + torch.linalg.vector_norm(buffer, dtype=torch.float64).square()
        if last:
            square, self._squared_norm = float(self._squared_norm), 0.0
            if accordion.observe(square, make_all_reduce_sum(self._group, buffer.device)):
                self._all_reduce.switch(accordion.compressor, self._average_compressor)

    def _config(self) -> dict[str, Any]:
        """What all ranks must say alike, and a state must fit."""
        how = (
            self._all_reduce.reduce_scatter.feedback.shared_spec
            if self._accordion is None
            else self._accordion.describe()
        )
        second = None if self._average_compressor is None else str(self._average_compressor)
        return {"how": how, "second": second, "min_numel": self._min_numel, "nonfinite": self._nonfinite}

    def _make_config_check(self) -> ConfigCheck:
        words = {**self._config(), "counts": self._all_reduce.reduce_scatter.counts()}
        if self._accordion is not None:
            words["critical"], words["steps"] = self._accordion.critical, self._accordion.steps
        return ConfigCheck(self._group, "compress_ddp", words, self._timeout)


def _check_ddp_arguments(model: object, nonfinite: str) -> None:
    if not isinstance(model, DistributedDataParallel):
        expected = "a DistributedDataParallel model"
        raise PolicyError("compress_ddp", found=f"a {type(model).__name__}", expected=expected, do="wrap it first")
    validate.check_choice("compress_ddp, nonfinite", nonfinite, ("pass", "raise"))
