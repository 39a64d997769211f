"""Averages over the ranks of a group, in compressed messages: reduce-scatter in float32, then all-gather."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, Identity
from shrinkpoint.comm.error_feedback import ErrorFeedback, FeedbackState, MessageInfo, NoFeedback, PackedMessage
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError

SHARE_MULTIPLE = 64
"""The size of a rank's share of a tensor is a multiple of this, so that groups of a power of two start with a share."""
SAMPLE_INTERVAL = 16
"""The relative error is measured on one of this number of messages."""
MESSAGE_ALIGN = 16
"""Messages start at multiples of this number of bytes, so that compressors may view them as wider values."""
_MAX_IDLE_STEPS = 2
"""Steps without a message after which the memory of a layout is dropped."""
_MIN_DIRECT_BYTES = 1 << 17
"""Bytes of a message from which point-to-point messages beat gloo's own all-to-all of more than two ranks."""
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def as_feedback(compressor: CompressorLike) -> ErrorFeedback:
    """Return a compressor, feedback or spec as a feedback.

    Raises:
        PolicyError: it needs sample ids or the indices of a forward message, which gradients and weights do not have.
    """
    parsed = Identity() if compressor is None else as_compressor(compressor)
    feedback = NoFeedback(parsed) if isinstance(parsed, Compressor) else parsed
    if feedback.needs_ids:
        advice = "use a compressor, or EF, EFMixed or EF21"
        raise PolicyError(feedback.spec, found="feedback by sample id", expected="one for sums over samples", do=advice)
    feedback.new_state().wire_bytes((SHARE_MULTIPLE,), torch.float32, MessageInfo())
    return feedback


@dataclass
class _LayoutState:
    """The feedback state of one layout at this rank.

    Attributes:
        feedback: that the states belong to.
        sender, receiver: the states of sent and of received messages.
        count: the number of collectives so far.
        idle: the number of steps since the last one.
    """

    feedback: ErrorFeedback
    sender: FeedbackState
    receiver: FeedbackState
    count: int = 0
    idle: int = 0

    def switch(self, feedback: ErrorFeedback) -> None:
        """Change the feedback; states are kept if it is of the same type."""
        if feedback == self.feedback:
            return
        sender, receiver = feedback.new_state(), feedback.new_state()
        if type(feedback) is type(self.feedback):
            sender.load_state_dict(self.sender.state_dict())
            receiver.load_state_dict(self.receiver.state_dict())
        self.feedback, self.sender, self.receiver = feedback, sender, receiver


class CompressedCollective:
    """Messages of one kind among the ranks of a group, with a feedback state for each layout.

    A layout names the assignment of values to positions of a tensor. All ranks use the same layouts in the same order.

    Args:
        feedback: for the messages.
        stats: the statistics to update.
        name: of the messages; part of their keys.
    """

    def __init__(self, feedback: ErrorFeedback, stats: LinkStats, *, name: str) -> None:
        self._feedback, self.stats, self.name = feedback, stats, name
        self._layouts: dict[str, _LayoutState] = {}

    @property
    def feedback(self) -> ErrorFeedback:
        """The feedback of messages; to be changed on all ranks between the same two messages."""
        return self._feedback

    @feedback.setter
    def feedback(self, feedback: ErrorFeedback) -> None:
        self._feedback = feedback
        for layout_state in self._layouts.values():
            layout_state.switch(feedback)

    def step(self) -> None:
        """End a step: drop layouts that are no longer used."""
        for layout_state in self._layouts.values():
            layout_state.idle += 1
        self._layouts = {
            layout: layout_state
            for layout, layout_state in self._layouts.items()
            if layout_state.idle <= _MAX_IDLE_STEPS
        }

    def state_dict(self) -> dict[str, Any]:
        """The feedback state of this rank, by layout."""
        return {
            layout: {
                "count": layout_state.count,
                "out": layout_state.sender.state_dict(),
                "into": layout_state.receiver.state_dict(),
            }
            for layout, layout_state in self._layouts.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, with the same type of feedback."""
        self._layouts = {}
        for layout, saved_state in state.items():
            layout_state = self._layouts[layout] = _LayoutState(
                self.feedback, self.feedback.new_state(), self.feedback.new_state(), saved_state["count"]
            )
            layout_state.sender.load_state_dict(saved_state["out"])
            layout_state.receiver.load_state_dict(saved_state["into"])

    def counts(self) -> dict[str, int]:
        """The number of collectives so far, by layout."""
        return {layout: layout_state.count for layout, layout_state in self._layouts.items()}

    def _layout_state(self, layout: str) -> _LayoutState:
        if layout not in self._layouts:
            self._layouts[layout] = _LayoutState(self.feedback, self.feedback.new_state(), self.feedback.new_state())
        layout_state = self._layouts[layout]
        layout_state.count, layout_state.idle = layout_state.count + 1, 0
        return layout_state

    def _message_info(
        self, layout: str, layout_state: _LayoutState, source: int, target: int, slot: int
    ) -> MessageInfo:
        """Identify a message to its feedback, the same at both ends."""
        key = zlib.crc32(f"{self.name}/{layout}/{layout_state.count}/{source}/{target}".encode())
        return MessageInfo(slot=slot, index=layout_state.count - 1, context=CompressorContext(key=key))

    def _pack(self, tensor: Tensor, layout_state: _LayoutState, info: MessageInfo, *, copies: int = 1) -> Tensor:
        """Pack the tensor as a message, padded to a multiple of `MESSAGE_ALIGN`.

        Args:
            copies: the number of ranks it is sent to.
        """
        with self.stats.timing("encode", tensor.device):
            packed = layout_state.sender.pack(tensor, info)
            wire = F.pad(packed.wire, (0, -packed.wire.numel() % MESSAGE_ALIGN))
        sampled = self.stats.messages % SAMPLE_INTERVAL == 0
        self.stats.add_message(copies * tensor.numel() * tensor.element_size(), copies * wire.numel())
        if sampled:
            self._sample(tensor, packed, layout_state.feedback, info)
        return wire

    def _sample(self, tensor: Tensor, packed: PackedMessage, feedback: ErrorFeedback, info: MessageInfo) -> None:
        decoded = packed.decoded
        if decoded is None:
            decoded = feedback.compressor.decode(packed.wire, torch.empty_like(tensor), info.context)
        self.stats.add_error(tensor, decoded)
        self.stats.add_nonfinite(tensor.isfinite().logical_not_().sum())

    def _unpack(self, wire: Tensor, out: Tensor, layout_state: _LayoutState, info: MessageInfo) -> Tensor:
        with self.stats.timing("decode", out.device):
            size = layout_state.receiver.wire_bytes(out.shape, out.dtype, info)
            layout_state.receiver.unpack(wire[:size], out, info)
        return out


class CompressedReduceScatter(CompressedCollective):
    """The first hop: every rank receives the sum over ranks of its own row."""

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Send each other rank its compressed row, and sum the rows that are received, in the order of ranks.

        Args:
            rows: of shape (ranks, values); they are not changed. This rank's own row is added uncompressed.

        Returns:
            The sum, of shape (values,): float32, or float64 if the rows are.
        """
        me, world_size = group.rank(), group.size()
        layout_state, other_ranks = self._layout_state(layout), [rank for rank in range(world_size) if rank != me]
        wires = [
            self._pack(rows[target], layout_state, self._message_info(layout, layout_state, me, target, target))
            for target in other_ranks
        ]
        sizes = [0 if rank == me else wires[0].numel() for rank in range(world_size)]
        received = self._exchange(torch.cat(wires), sizes, group)
        sum_dtype = torch.promote_types(rows.dtype, torch.float32)
        total, out = torch.zeros_like(rows[0], dtype=sum_dtype), torch.empty_like(rows[0])
        for source, message in enumerate(torch.split(received, sizes)):
            info = self._message_info(layout, layout_state, source, me, source)
            total += rows[me] if source == me else self._unpack(message, out, layout_state, info)
        return total

    @staticmethod
    def _exchange(wires: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        received = torch.empty_like(wires)
        if is_gloo(group, wires.device) and (len(sizes) == 2 or max(sizes) >= _MIN_DIRECT_BYTES):
            P2PExchange(torch.split(wires, sizes), torch.split(received, sizes), group).wait()
        else:
            dist.all_to_all_single(received, wires, sizes, sizes, group=group)
        return received


class CompressedAllGather(CompressedCollective):
    """The second hop: every rank receives the rows of all ranks, decoded from the same bytes on each."""

    def __call__(
        self, row: Tensor, rows: Tensor, group: dist.ProcessGroup, layout: str = "", *, async_op: bool = False
    ) -> DecodeWork | None:
        """Send this rank's compressed row to all, and decode the rows of all ranks, its own included, into `rows`.

        Args:
            row: of shape (values,) and the dtype of `rows`; it may be a view of them.
            rows: of shape (ranks, values); contiguous.
            async_op: whether to return work that fills the rows when it is waited for.
        """
        me, world_size = group.rank(), group.size()
        layout_state = self._layout_state(layout)
        infos = [self._message_info(layout, layout_state, source, world_size, source) for source in range(world_size)]
        wire = self._pack(row, layout_state, infos[me], copies=world_size - 1)
        gathered = wire.new_empty(world_size * wire.numel())
        work = self._all_gather(gathered, wire, group, async_op)

        def decode() -> None:
            for source, message in enumerate(torch.split(gathered, wire.numel())):
                self._unpack(message, rows[source], layout_state, infos[source])

        if async_op:
            return DecodeWork(work, decode)
        decode()
        return None

    @staticmethod
    def _all_gather(gathered: Tensor, wire: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        if group.size() != 2 or not is_gloo(group, wire.device):  # gloo's ring of more ranks goes one way round
            return all_gather_tensor(gathered, wire, group=group, async_op=async_op)
        rows = gathered.view(2, wire.numel())
        rows[group.rank()] = wire
        work = P2PExchange([wire, wire], list(rows), group)
        if not async_op:
            work.wait()
        return work


class DecodeWork(dist.Work):
    """Work that decodes its result when it is waited for."""

    def __init__(self, work: dist.Work | P2PExchange, decode: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._decode = work, decode
        self._done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
            self._decode()
            self._done = True
        return True


class CompressedAllReduce:
    """Averages tensors over the ranks of a group, to the same bits on every rank: all decode the same bytes.

    Args:
        compressor: for the tensors.
        average_compressor: for their average; None for `compressor` without its feedback.
        name: of the tensors; part of the seed of noise.

    Attributes:
        link_stats: statistics of "first hop" and "second hop".
    """

    def __init__(self, compressor: CompressorLike, average_compressor: CompressorLike = None, *, name: str) -> None:
        self.link_stats = {"first hop": LinkStats(), "second hop": LinkStats()}
        first, last = self._feedback_pair(compressor, average_compressor)
        self.reduce_scatter = CompressedReduceScatter(first, self.link_stats["first hop"], name=f"{name} first")
        self.all_gather = CompressedAllGather(last, self.link_stats["second hop"], name=f"{name} second")

    @staticmethod
    def _feedback_pair(
        compressor: CompressorLike, average_compressor: CompressorLike
    ) -> tuple[ErrorFeedback, ErrorFeedback]:
        feedback = as_feedback(compressor)
        return feedback, NoFeedback(feedback.compressor) if average_compressor is None else as_feedback(
            average_compressor
        )

    def switch(self, compressor: CompressorLike, average_compressor: CompressorLike = None) -> None:
        """Change the compressors, on all ranks at the same step."""
        self.reduce_scatter.feedback, self.all_gather.feedback = self._feedback_pair(compressor, average_compressor)

    def average_(self, tensor: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Average a tensor over ranks in place, and return it.

        Args:
            tensor: floating point, 1-d, contiguous; of the same length on every rank.
            layout: the name of its layout.
        """
        world_size, size = group.size(), tensor.numel()
        if world_size == 1 or not size:
            return tensor
        share = -(-size // world_size)
        share += -share % SHARE_MULTIPLE
        rows = F.pad(tensor, (0, share * world_size - size)) if share * world_size > size else tensor
        rows = rows.view(world_size, share)
        mean = self.reduce_scatter(rows, group, layout).div_(world_size).to(tensor.dtype)
        self.all_gather(mean, rows, group, layout)
        return tensor if rows.data_ptr() == tensor.data_ptr() else tensor.copy_(rows.view(-1)[:size])

    def step(self) -> None:
        """End a step, after all of its tensors."""
        self.reduce_scatter.step()
        self.all_gather.step()

    def state_dict(self) -> dict[str, Any]:
        """The feedback state of this rank; each rank has its own."""
        return {"first": self.reduce_scatter.state_dict(), "second": self.all_gather.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same rank returned.

        Raises:
            MismatchError: it is another kind of state.
        """
        if set(state) != {"first", "second"}:
            problem, advice = f"a state of {sorted(state)}", "give what state_dict() of the same rank gave"
            raise MismatchError("two hops", found=problem, expected="one of first and second", do=advice)
        self.reduce_scatter.load_state_dict(state["first"])
        self.all_gather.load_state_dict(state["second"])


def make_all_reduce_sum(group: dist.ProcessGroup, device: torch.device) -> Callable[[list[float]], list[float]]:
    """Create a function that sums numbers over the ranks of a group, with the same result on all."""

    def all_reduce_sum(numbers: list[float]) -> list[float]:
        summed = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(summed, group=group)
        result: list[float] = summed.tolist()
        return result

    return all_reduce_sum


TAG = 0x7370
"""The tag of these messages, which tells them from others in the same group."""


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group sends tensors of this device by gloo, without a copy to another device."""
    return device.type == "cpu" and bool(group._get_backend(device).name() == "gloo")


class P2PExchange:
    """Starts sends to and receives from all other ranks of a group; receives are posted first.

    All ranks must make their exchanges in the same order.

    Args:
        send_tensors, recv_tensors: a contiguous tensor for each rank of the group; this rank's own are not used.
    """

    def __init__(
        self, send_tensors: Sequence[Tensor], recv_tensors: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        other_ranks = [rank for rank in range(group.size()) if rank != group.rank()]
        peers = {rank: dist.get_global_rank(group, rank) for rank in other_ranks}
        self._tensors = send_tensors, recv_tensors
        works = [dist.irecv(recv_tensors[rank], peers[rank], group, TAG) for rank in other_ranks]
        works += [dist.isend(send_tensors[rank], peers[rank], group, TAG) for rank in other_ranks]
        self._works = [work for work in works if work is not None]

    def wait(self, *timeout: Any) -> None:
        """Wait until all messages are sent and received.

        Args:
            timeout: for each message, a `timedelta`; without it, the timeout of the group.
        """
        for work in self._works:
            work.wait(*timeout)
        self._works.clear()
