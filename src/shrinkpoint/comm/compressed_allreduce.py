"""Sums over the ranks of a group, in encoded messages: all to all, sum in float32, and to all again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, Identity
from shrinkpoint.comm.feedback.base import ErrorFeedback, FeedbackState, MessageInfo, NoFeedback, PackedMessage
from shrinkpoint.comm.gloo import P2PExchange, is_gloo
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError

"""An operator, feedback around one, or the spec of either; None: nothing is compressed."""

SHARE_MULTIPLE = 64
"""A rank's share of a tensor is a multiple of so many values: groups of a power of two begin where a share does."""
SAMPLE_INTERVAL = 16
"""Messages of which one is looked at for what it lost."""
MESSAGE_ALIGN = 16
"""Messages lie at multiples of so many bytes, where operators may view them as wider words."""
_MAX_IDLE_STEPS = 2
_MIN_DIRECT_BYTES = 1 << 17
"""Bytes of a message. From this size on, more than two ranks of gloo are done sooner without its own all-to-all."""
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def as_feedback(compressor: CompressorLike) -> ErrorFeedback:
    """What to send with, as feedback.

    Raises:
        PolicyError: it is one that gradients and weights cannot be sent with, which have neither sample ids nor the
            places of a forward message.
    """
    found = Identity() if compressor is None else as_compressor(compressor)
    feedback = NoFeedback(found) if isinstance(found, Compressor) else found
    if feedback.needs_ids:
        do = "use an operator, or EF, EFMixed or EF21"
        raise PolicyError(feedback.spec, found="feedback by sample id", expected="one for sums over samples", do=do)
    feedback.new_state().wire_bytes((SHARE_MULTIPLE,), torch.float32, MessageInfo())
    return feedback


@dataclass
class _LayoutState:
    """Both ends of one tensor's messages at this rank, and how many sums there were."""

    feedback: ErrorFeedback
    sender: FeedbackState
    receiver: FeedbackState
    count: int = 0
    idle: int = 0

    def switch(self, feedback: ErrorFeedback) -> None:
        """Go on with another operator; what is remembered stays if the feedback is of the same kind."""
        if feedback == self.feedback:
            return
        out, into = feedback.new_state(), feedback.new_state()
        if type(feedback) is type(self.feedback):
            out.load_state_dict(self.sender.state_dict())
            into.load_state_dict(self.receiver.state_dict())
        self.feedback, self.sender, self.receiver = feedback, out, into


class CompressedCollective:
    """Messages of one kind among the ranks of a group, and what is remembered of them by layout.

    A layout is the name of what the values of a tensor belong to. All ranks use the same ones in the same order.
    """

    def __init__(self, feedback: ErrorFeedback, stats: LinkStats, *, name: str) -> None:
        self._feedback, self.stats, self.name = feedback, stats, name
        self._layouts: dict[str, _LayoutState] = {}

    @property
    def feedback(self) -> ErrorFeedback:
        """What messages are sent with; to be changed on all ranks between the same two of them."""
        return self._feedback

    @feedback.setter
    def feedback(self, feedback: ErrorFeedback) -> None:
        self._feedback = feedback
        for memory in self._layouts.values():
            memory.switch(feedback)

    def step(self) -> None:
        """All tensors of a step went by: forget layouts that are no longer used."""
        for memory in self._layouts.values():
            memory.idle += 1
        self._layouts = {layout: kept for layout, kept in self._layouts.items() if kept.idle <= _MAX_IDLE_STEPS}

    def state_dict(self) -> dict[str, Any]:
        """What feedback remembers at this rank, by layout."""
        return {
            layout: {"count": one.count, "out": one.sender.state_dict(), "into": one.receiver.state_dict()}
            for layout, one in self._layouts.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, with the same kind of feedback."""
        self._layouts = {}
        for layout, kept in state.items():
            memory = self._layouts[layout] = _LayoutState(
                self.feedback, self.feedback.new_state(), self.feedback.new_state(), kept["count"]
            )
            memory.sender.load_state_dict(kept["out"])
            memory.receiver.load_state_dict(kept["into"])

    def counts(self) -> dict[str, int]:
        """How many sums there were, by layout."""
        return {layout: memory.count for layout, memory in self._layouts.items()}

    def _layout_state(self, layout: str) -> _LayoutState:
        if layout not in self._layouts:
            self._layouts[layout] = _LayoutState(self.feedback, self.feedback.new_state(), self.feedback.new_state())
        memory = self._layouts[layout]
        memory.count, memory.idle = memory.count + 1, 0
        return memory

    def _message_info(
        self, layout: str, layout_state: _LayoutState, source: int, target: int, slot: int
    ) -> MessageInfo:
        """What both ends of a message know: whose it is and which."""
        key = zlib.crc32(f"{self.name}/{layout}/{layout_state.count}/{source}/{target}".encode())
        return MessageInfo(slot=slot, index=layout_state.count - 1, context=CompressorContext(key=key))

    def _pack(self, x: Tensor, layout_state: _LayoutState, info: MessageInfo, *, copies: int = 1) -> Tensor:
        """The message, filled up to whole slots.

        Args:
            copies: how many ranks it is sent to.
        """
        with self.stats.timing("encode", x.device):
            packed = layout_state.sender.pack(x, info)
            wire = F.pad(packed.wire, (0, -packed.wire.numel() % MESSAGE_ALIGN))
        sampled = self.stats.messages % SAMPLE_INTERVAL == 0
        self.stats.add_message(copies * x.numel() * x.element_size(), copies * wire.numel())
        if sampled:
            self._sample(x, packed, layout_state.feedback, info)
        return wire

    def _sample(self, x: Tensor, packed: PackedMessage, feedback: ErrorFeedback, info: MessageInfo) -> None:
        seen = packed.decoded
        if seen is None:
            seen = feedback.compressor.decode(packed.wire, torch.empty_like(x), info.context)
        self.stats.add_error(x, seen)
        self.stats.add_nonfinite(x.isfinite().logical_not_().sum())

    def _unpack(self, wire: Tensor, out: Tensor, layout_state: _LayoutState, info: MessageInfo) -> Tensor:
        with self.stats.timing("decode", out.device):
            size = layout_state.receiver.wire_bytes(out.shape, out.dtype, info)
            layout_state.receiver.unpack(wire[:size], out, info)
        return out


class CompressedReduceScatter(CompressedCollective):
    """The first hop: every rank gets the sum over ranks of its own row."""

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Send each other rank its row, encoded, and add up what they send, in the order of ranks.

        Args:
            rows: of shape (ranks, values); they are not changed. This rank's own row never crosses a wire: it is
                added as it is.

        Returns:
            The sum, float32, or float64 where the rows are.
        """
        me, width = group.rank(), group.size()
        memory, others = self._layout_state(layout), [rank for rank in range(width) if rank != me]
        wires = [self._pack(rows[to], memory, self._message_info(layout, memory, me, to, to)) for to in others]
        sizes = [0 if rank == me else wires[0].numel() for rank in range(width)]
        received = self._exchange(torch.cat(wires), sizes, group)
        exact = torch.promote_types(rows.dtype, torch.float32)
        total, out = torch.zeros_like(rows[0], dtype=exact), torch.empty_like(rows[0])
        for of, message in enumerate(torch.split(received, sizes)):
            turn = self._message_info(layout, memory, of, me, of)
            total += rows[me] if of == me else self._unpack(message, out, memory, turn)
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
    """The second hop: every rank gets the rows of all, decoded from the same bytes on each."""

    def __call__(
        self, row: Tensor, rows: Tensor, group: dist.ProcessGroup, layout: str = "", *, async_op: bool = False
    ) -> DecodeWork | None:
        """Send this rank's row, encoded, to all, and fill `rows` with what all sent, this rank's own message included.

        Args:
            row: of the dtype of `rows`; it may be a part of them.
            rows: of shape (ranks, values); contiguous.
            async_op: return work that fills the rows when it is waited for.
        """
        me, width = group.rank(), group.size()
        memory = self._layout_state(layout)
        turns = [self._message_info(layout, memory, of, width, of) for of in range(width)]
        wire = self._pack(row, memory, turns[me], copies=width - 1)
        every = wire.new_empty(width * wire.numel())
        work = self._all_gather(every, wire, group, async_op)

        def decode() -> None:
            for of, message in enumerate(torch.split(every, wire.numel())):
                self._unpack(message, rows[of], memory, turns[of])

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
    """Work whose result is decoded when it is waited for."""

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
    """Averages over the ranks of a group. All ranks decode them from the same bytes: they are equal to the last bit.

    Args:
        compressor: what gradients are sent with.
        all_gather: what their average is sent with; None: `compressor` without its feedback.
        name: of what is averaged; noise follows from it.
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
        first = as_feedback(compressor)
        return first, NoFeedback(first.compressor) if average_compressor is None else as_feedback(average_compressor)

    def switch(self, compressor: CompressorLike, average_compressor: CompressorLike = None) -> None:
        """Go on with other operators; all ranks do so at the same step."""
        self.reduce_scatter.feedback, self.all_gather.feedback = self._feedback_pair(compressor, average_compressor)

    def average_(self, flat: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Make `flat` the average over ranks, and return it.

        Args:
            flat: floating point, 1-d, contiguous; as long on every rank.
        """
        width, size = group.size(), flat.numel()
        if width == 1 or not size:
            return flat
        share = -(-size // width)
        share += -share % SHARE_MULTIPLE
        rows = F.pad(flat, (0, share * width - size)) if share * width > size else flat
        rows = rows.view(width, share)
        mean = self.reduce_scatter(rows, group, layout).div_(width).to(flat.dtype)
        self.all_gather(mean, rows, group, layout)
        return flat if rows.data_ptr() == flat.data_ptr() else flat.copy_(rows.view(-1)[:size])

    def step(self) -> None:
        """All tensors of a step went by."""
        self.reduce_scatter.step()
        self.all_gather.step()

    def state_dict(self) -> dict[str, Any]:
        """What feedback remembers at this rank; each rank has its own."""
        return {"first": self.reduce_scatter.state_dict(), "second": self.all_gather.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            MismatchError: it is not such a state.
        """
        if set(state) != {"first", "second"}:
            found, do = f"a state of {sorted(state)}", "give what state_dict() of the same rank gave"
            raise MismatchError("two hops", found=found, expected="one of first and second", do=do)
        self.reduce_scatter.load_state_dict(state["first"])
        self.all_gather.load_state_dict(state["second"])


def make_all_reduce_sum(group: dist.ProcessGroup, device: torch.device) -> Callable[[list[float]], list[float]]:
    """What adds up numbers over the ranks of a group; the result is the same on all."""

    def total(numbers: list[float]) -> list[float]:
        together = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(together, group=group)
        out: list[float] = together.tolist()
        return out

    return total
