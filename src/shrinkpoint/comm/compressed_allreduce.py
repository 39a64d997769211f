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

from shrinkpoint import device, validate
from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, Identity
from shrinkpoint.comm.error_feedback import ErrorFeedback, MessageInfo, NoFeedback, PackedMessage
from shrinkpoint.comm.link import CompressorLike, LinkStats
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.comm.state_check import check_entries, check_mapping, part_error
from shrinkpoint.device import kernels_for, run_kernels
from shrinkpoint.device.rows import ALIGN, flat_rows
from shrinkpoint.errors import PolicyError, warn_user

SHARE_MULTIPLE = 64
"""The size of a rank's share of a tensor is a multiple of this, so that groups of a power of two start with a share."""
SAMPLE_INTERVAL = 16  # The relative error is measured on one of this number of messages
MESSAGE_ALIGN = ALIGN
"""Messages start at multiples of this number of bytes, so that compressors may view them as wider values."""
_MIN_DIRECT_BYTES = 1 << 17
"""Bytes of a message from which point-to-point messages beat gloo's own all-to-all of more than two ranks."""
_TAG = 0x7370  # The tag of point-to-point messages, which tells them from others in the same group
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def share_numel(numel: int, world_size: int) -> int:
    """The number of values of a tensor that each rank sums up, with zeros appended to the tensor if need be."""
    share = -(-numel // world_size)
    return share + -share % SHARE_MULTIPLE


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the group sends tensors of this device by gloo, without a copy to another device."""
    return device.type == "cpu" and bool(group._get_backend(device).name() == "gloo")


def other_ranks(group: dist.ProcessGroup) -> list[int]:
    """All ranks of a group but this one."""
    return [rank for rank in range(group.size()) if rank != group.rank()]


class _P2PExchange:
    """Starts sends to and receives from all other ranks of a group on gloo, with all messages in flight together.

    On gloo the notice that a rank is ready to receive shares a connection with what that rank sends: a receive that is
    posted after a send waits for it, and two ranks that do so send one after the other, as in gloo's own collectives.
    So receives are posted first. All ranks must make their exchanges in the same order. Tensors are contiguous, one for
    each rank; this rank's own are not used.
    """

    def __init__(
        self, send_tensors: Sequence[Tensor], recv_tensors: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        self._tensors = send_tensors, recv_tensors
        # torch.distributed's own functions refuse a group that it has not made, as those of torchft are
        self._works = [group.recv([recv_tensors[rank]], rank, _TAG) for rank in other_ranks(group)]
        self._works += [group.send([send_tensors[rank]], rank, _TAG) for rank in other_ranks(group)]

    def wait(self, *timeout: Any) -> None:
        """Wait until all messages are sent and received, each as long as a `timedelta`, or as the group waits."""
        for work in self._works:
            work.wait(*timeout)
        self._works.clear()


def as_feedback(compressor: CompressorLike) -> ErrorFeedback:
    """Return a compressor, feedback or spec as a feedback.

    Raises:
        PolicyError: it needs sample ids or the indices of a forward message, which gradients and weights do not have.
    """
    parsed = Identity() if compressor is None else as_compressor(compressor)
    feedback = NoFeedback(parsed) if isinstance(parsed, Compressor) else parsed
    if feedback.needs_ids:
        advice = "use a compressor, or EF, EFMixed or EF21"
        raise PolicyError(feedback.spec, found="feedback by sample id", expected="feedback of sums", do=advice)
    feedback.new_state().wire_bytes((SHARE_MULTIPLE,), torch.float32, MessageInfo())
    return feedback


def as_stateless(where: str, compressor: CompressorLike) -> NoFeedback:
    """Return a compressor or spec as a feedback without memory; a PolicyError if it has one."""
    feedback = as_feedback(compressor)
    if not isinstance(feedback, NoFeedback):
        raise PolicyError(where, found=feedback.spec, expected="a compressor", do="leave out the feedback")
    return feedback


def check_layouts(where: str, state: object) -> None:
    """Raise MismatchError for what `CompressedCollective.state_dict` does not return."""
    for layout, saved in check_mapping(where, state).items():
        entries = check_entries(f"{where}, layout {layout}", saved, ("count", "out", "into"))
        if type(entries["count"]) is not int or entries["count"] < 0:
            found = validate.describe_value(entries["count"])
            raise part_error(f"{where}, layout {layout}, count", found, "a whole number from 0")
        for end in ("out", "into"):
            check_mapping(f"{where}, layout {layout}, {end}", entries[end])


def check_hops(where: str, state: object) -> None:
    """Raise MismatchError for what `CompressedAllReduce.state_dict` does not return."""
    for hop, layouts in check_entries(where, state, ("first", "second")).items():
        check_layouts(f"{where}, {hop} hop", layouts)


class _LayoutState:
    """The feedback states of one layout at this rank, and the number of collectives."""

    def __init__(self, feedback: ErrorFeedback, count: int = 0) -> None:
        self.feedback, self.count = feedback, count
        self.sender, self.receiver = feedback.new_state(), feedback.new_state()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "out": self.sender.state_dict(), "into": self.receiver.state_dict()}


class CompressedCollective:
    """Messages of one kind among the ranks of a group, with a feedback state for each layout.

    A layout names the assignment of values to positions of a tensor. All ranks use the same layouts in the same order.
    The name is part of the keys of messages.
    """

    def __init__(self, feedback: ErrorFeedback, stats: LinkStats, *, name: str) -> None:
        self.feedback, self.stats, self.name = feedback, stats, name
        self._layouts: dict[str, _LayoutState] = {}

    def state_dict(self) -> dict[str, Any]:
        """The feedback state of this rank, by layout."""
        return {layout: state.state_dict() for layout, state in self._layouts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, with the same type of feedback.

        Raises:
            MismatchError: it is something else; then nothing has changed.
        """
        check_layouts(self.name, state)
        layouts = {layout: _LayoutState(self.feedback, saved_state["count"]) for layout, saved_state in state.items()}
        for layout, saved_state in state.items():
            layouts[layout].sender.load_state_dict(saved_state["out"])
            layouts[layout].receiver.load_state_dict(saved_state["into"])
        self._layouts = layouts

    def counts(self) -> dict[str, int]:
        """The number of collectives so far, by layout."""
        return {layout: state.count for layout, state in self._layouts.items()}

    def restart(self, counts: Mapping[str, int]) -> None:
        """Begin without memories, as if so many collectives of each layout had been made."""
        self._layouts = {layout: _LayoutState(self.feedback, count) for layout, count in counts.items()}

    def residuals(self) -> dict[str, dict[int, Tensor]]:
        """The losses of messages that the next ones would make up for, by layout and slot.

        Nothing of feedback without residuals. With a decay they are what would be left of them.
        """
        decay = getattr(self.feedback, "decay", 1.0)
        residuals: dict[str, dict[int, Tensor]] = {}
        for layout, state in self._layouts.items():
            buffers = state.sender.state_dict().get("residual", {})
            residuals[layout] = {int(key.partition(".")[0]): buffer * decay for key, buffer in buffers.items()}
        return residuals

    def _layout_state(self, layout: str) -> _LayoutState:
        if layout not in self._layouts:
            self._layouts[layout] = _LayoutState(self.feedback)
        state = self._layouts[layout]
        state.count += 1
        return state

    def _message_info(self, layout: str, count: int, source: int, target: int, slot: int) -> MessageInfo:
        """Identify a message to its feedback, the same at both ends."""
        key = zlib.crc32(f"{self.name}/{layout}/{count}/{source}/{target}".encode())
        return MessageInfo(slot=slot, index=count - 1, context=CompressorContext(key=key))

    def _pack(self, tensor: Tensor, state: _LayoutState, info: MessageInfo, *, copies: int = 1) -> Tensor:
        """Pack the tensor as a message for a number of ranks, padded to a multiple of `MESSAGE_ALIGN`."""
        with self.stats.timing("encode", tensor.device):
            packed = state.sender.pack(tensor, info)
            short = -packed.wire.numel() % MESSAGE_ALIGN
            wire = F.pad(packed.wire, (0, short)) if short else packed.wire
        size, sender = wire.numel(), state.sender
        self.stats.add_packed(tensor, packed, size, sender, info, sample_every=SAMPLE_INTERVAL, copies=copies)
        return wire

    def _pack_rows(
        self, rows: Sequence[Tensor], state: _LayoutState, infos: Sequence[MessageInfo], *, copies: int = 1
    ) -> list[Tensor]:
        """Pack tensors of one shape and dtype: in a few launches on a device that has kernels, else one by one."""
        sender, messages = state.sender, None
        if rows and rows[0].device.type in device.DEVICE_TYPES and self._has_kernels(rows[0], state):
            count = self.stats.nonfinite_counter(rows[0].device)
            with self.stats.timing("encode", rows[0].device):
                messages = sender.pack_rows(rows, infos, count)
        if messages is None:
            return [self._pack(row, state, info, copies=copies) for row, info in zip(rows, infos, strict=True)]
        size, padded = sender.wire_bytes(rows[0].shape, rows[0].dtype, infos[0]), messages[0].wire.numel()
        for row, message, info in zip(rows, messages, infos, strict=True):
            sent = PackedMessage(message.wire[:size], message.decoded)
            self.stats.add_packed(
                row, sent, padded, sender, info, sample_every=SAMPLE_INTERVAL, copies=copies, nonfinite=0
            )
        return [message.wire for message in messages]

    @staticmethod
    def _has_kernels(row: Tensor, state: _LayoutState) -> bool:
        """True if messages of rows like this one may be encoded and decoded at once."""
        return state.feedback.compressor.has_kernels and kernels_for(row.device) is not None

    def _unpack_rows(
        self, wires: Sequence[Tensor], outs: Sequence[Tensor], state: _LayoutState, infos: Sequence[MessageInfo]
    ) -> None:
        """Unpack messages into tensors of one shape and dtype, as `_pack_rows` packs them."""
        if outs and outs[0].device.type in device.DEVICE_TYPES and self._has_kernels(outs[0], state):
            size = state.receiver.wire_bytes(outs[0].shape, outs[0].dtype, infos[0])
            with self.stats.timing("decode", outs[0].device):
                if state.receiver.unpack_rows([wire[:size] for wire in wires], outs, infos):
                    return
        for wire, out, info in zip(wires, outs, infos, strict=True):
            self._unpack(wire, out, state, info)

    def message_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The size in bytes of the padded message of a 1-d tensor, which a receiver needs beforehand."""
        size = self.feedback.new_state().wire_bytes((numel,), dtype, MessageInfo())
        return size + -size % MESSAGE_ALIGN

    def _unpack(self, wire: Tensor, out: Tensor, state: _LayoutState, info: MessageInfo) -> Tensor:
        with self.stats.timing("decode", out.device):
            size = state.receiver.wire_bytes(out.shape, out.dtype, info)
            state.receiver.unpack(wire[:size], out, info)
        return out


@dataclass(frozen=True)
class EncodedRows:
    """The messages of one rank to all others in a reduce-scatter; None for itself."""

    messages: list[Tensor | None]
    own_row: Tensor
    layout: str
    state: _LayoutState
    count: int


class CompressedReduceScatter(CompressedCollective):
    """The first hop: every rank receives the sum over ranks of its own row."""

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Send each other rank its compressed row, and sum the rows that are received, in the order of ranks.

        Args:
            rows: of shape (ranks, values); they are not changed. This rank's own row is added uncompressed.

        Returns:
            The sum, of shape (values,): float32, or float64 if the rows are.
        """
        encoded = self.encode(rows, group.rank(), layout)
        return self.decode(encoded, self._exchange(encoded.messages, group), group.rank())

    def encode(self, rows: Tensor | Sequence[Tensor], rank: int, layout: str = "") -> EncodedRows:
        """Encode the rows of all ranks but this one; `own_row` is that row itself, or a view."""
        state = self._layout_state(layout)
        targets = [target for target in range(len(rows)) if target != rank]
        infos = [self._message_info(layout, state.count, rank, target, target) for target in targets]
        packed = dict(zip(targets, self._pack_rows([rows[target] for target in targets], state, infos), strict=True))
        return EncodedRows([packed.get(target) for target in range(len(rows))], rows[rank], layout, state, state.count)

    def decode(self, encoded: EncodedRows, received: Sequence[Tensor], rank: int) -> Tensor:
        """Sum this rank's own row, which is not changed, and those that the messages of the others decode to."""
        own_row, total = encoded.own_row, None
        sum_dtype = torch.promote_types(own_row.dtype, torch.float32)
        infos = [
            self._message_info(encoded.layout, encoded.count, source, rank, source) for source in range(len(received))
        ]
        is_on_device = own_row.device.type in device.DEVICE_TYPES
        if is_on_device and len(received) > 1 and self._has_kernels(own_row, encoded.state):
            return self._decode_at_once(encoded, received, infos, rank, sum_dtype)
        for source, (message, info) in enumerate(zip(received, infos, strict=True)):
            is_own = source == rank
            row = own_row if is_own else self._unpack(message, torch.empty_like(own_row), encoded.state, info)
            if total is None:
                total = row.to(sum_dtype)
            elif total is own_row:
                total = torch.add(total, row, out=row)
            else:
                total.add_(row)
        assert total is not None
        return total.clone() if total is own_row else total

    def _decode_at_once(
        self,
        encoded: EncodedRows,
        received: Sequence[Tensor],
        infos: Sequence[MessageInfo],
        rank: int,
        sum_dtype: torch.dtype,
    ) -> Tensor:
        """Decode all messages in a few launches, then add the rows in one."""
        own_row, others = encoded.own_row, [source for source in range(len(received)) if source != rank]
        rows = own_row.new_empty(len(others), own_row.numel()).unbind()
        wires, others_infos = [received[source] for source in others], [infos[source] for source in others]
        self._unpack_rows(wires, rows, encoded.state, others_infos)
        with self.stats.timing("decode", own_row.device):
            row = own_row.contiguous()
            total = run_kernels(row.device, lambda kernels: kernels.sum_rows(row, flat_rows(rows), rank, sum_dtype))
            if total is None:
                ordered = [*rows[:rank], row, *rows[rank:]]
                total = ordered[0].to(sum_dtype, copy=True)
                for other in ordered[1:]:
                    total.add_(other)
        return total

    @staticmethod
    def _exchange(messages: Sequence[Tensor | None], group: dist.ProcessGroup) -> Sequence[Tensor]:
        size = next(message.numel() for message in messages if message is not None)
        sizes = [0 if message is None else size for message in messages]
        wires = torch.cat([message for message in messages if message is not None])
        received = torch.empty_like(wires)
        if is_gloo(group, wires.device) and (len(sizes) == 2 or size >= _MIN_DIRECT_BYTES):
            _P2PExchange(torch.split(wires, sizes), torch.split(received, sizes), group).wait()
        else:
            dist.all_to_all_single(received, wires, sizes, sizes, group=group)
        return torch.split(received, sizes)


@dataclass(frozen=True)
class EncodedRow:
    """The message of one rank to all others in an all-gather."""

    message: Tensor
    layout: str
    state: _LayoutState
    count: int


class CompressedAllGather(CompressedCollective):
    """The second hop: every rank receives the rows of all ranks, decoded from the same bytes on each."""

    # Called with the layout, the number of the collective and the messages of all ranks once these are decoded; it may
    # keep them. None: nothing is called.
    on_decode: Callable[[str, int, Sequence[Tensor]], None] | None = None

    def __call__(
        self, row: Tensor, rows: Tensor, group: dist.ProcessGroup, layout: str = "", *, async_op: bool = False
    ) -> DecodeWork | None:
        """Send this rank's compressed row to all, and decode the rows of all ranks, its own included, into `rows`.

        Args:
            row: of shape (values,) and the dtype of `rows`; it may be a view of them.
            rows: of shape (ranks, values); contiguous.
            async_op: return work that fills the rows when it is waited for.
        """
        encoded = self.encode(row, group.rank(), group.size(), layout)
        gathered = encoded.message.new_empty(group.size(), encoded.message.numel())
        work = self._all_gather(gathered, encoded.message, group, async_op)
        if async_op:
            return DecodeWork(work, lambda: self.decode(encoded, gathered.unbind(), rows))
        self.decode(encoded, gathered.unbind(), rows)
        return None

    def encode(self, row: Tensor, rank: int, world_size: int, layout: str = "") -> EncodedRow:
        """Encode the row of this rank."""
        state = self._layout_state(layout)
        info = self._message_info(layout, state.count, rank, world_size, rank)
        (message,) = self._pack_rows([row], state, [info], copies=world_size - 1)
        return EncodedRow(message, layout, state, state.count)

    def decode(self, encoded: EncodedRow, messages: Sequence[Tensor], rows: Tensor | Sequence[Tensor]) -> None:
        """Decode the messages of all ranks, in their order, into the rows."""
        self._decode_all(encoded.layout, encoded.count, messages, rows, encoded.state)
        if self.on_decode is not None:
            self.on_decode(encoded.layout, encoded.count, messages)

    def decode_again(self, layout: str, count: int, messages: Sequence[Tensor], rows: Tensor) -> None:
        """Decode messages of an earlier collective into the rows; no state changes.

        The feedback is one whose receiver remembers nothing.
        """
        self._decode_all(layout, count, messages, rows, _LayoutState(self.feedback))

    def _decode_all(
        self, layout: str, count: int, messages: Sequence[Tensor], rows: Tensor | Sequence[Tensor], state: _LayoutState
    ) -> None:
        width = len(messages)
        infos = [self._message_info(layout, count, source, width, source) for source in range(width)]
        self._unpack_rows(messages, [rows[source] for source in range(width)], state, infos)

    @staticmethod
    def _all_gather(gathered: Tensor, wire: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        if group.size() != 2 or not is_gloo(group, wire.device):  # gloo's ring of more ranks goes one way round
            return all_gather_tensor(gathered.view(-1), wire, group=group, async_op=async_op)
        gathered[group.rank()] = wire
        work = _P2PExchange([wire, wire], list(gathered), group)
        if not async_op:
            work.wait()
        return work


class DecodeWork(dist.Work):
    """Work that decodes its result when it is waited for."""

    def __init__(self, work: dist.Work | _P2PExchange, decode: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._decode = work, decode
        self._done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            self._work.wait(*(() if timeout is None else (timeout,)))
            self._decode()
            self._done = True
        return True


class CompressedAllReduce:
    """Averages tensors over the ranks of a group, to the same bits on every rank: all decode the same bytes.

    Args:
        compressor: for the tensors.
        average_compressor: for their average; None for `compressor`, with feedback of its own if that has one.
        name: of the tensors; part of the seed of noise.
        link_stats: where to add statistics; None for new ones.

    Attributes:
        link_stats: statistics of "first hop" and "second hop".
    """

    def __init__(
        self,
        compressor: CompressorLike,
        average_compressor: CompressorLike = None,
        *,
        name: str,
        link_stats: dict[str, LinkStats] | None = None,
    ) -> None:
        self.link_stats = link_stats or {"first hop": LinkStats(), "second hop": LinkStats()}
        first = as_feedback(compressor)
        last = first if average_compressor is None else as_feedback(average_compressor)
        self.reduce_scatter = CompressedReduceScatter(first, self.link_stats["first hop"], name=f"{name} first")
        self.all_gather = CompressedAllGather(last, self.link_stats["second hop"], name=f"{name} second")

    @property
    def hops(self) -> tuple[CompressedReduceScatter, CompressedAllGather]:
        """Both hops, in their order."""
        return self.reduce_scatter, self.all_gather

    def average_(self, tensor: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Average a tensor over ranks in place, and return it.

        Args:
            tensor: floating point, 1-d, contiguous; of the same length on every rank.
            layout: the name of its layout.
        """
        world_size, size = group.size(), tensor.numel()
        if world_size == 1 or not size:
            return tensor
        share = share_numel(size, world_size)
        rows = F.pad(tensor, (0, share * world_size - size)) if share * world_size > size else tensor
        rows = rows.view(world_size, share)
        mean = self.reduce_scatter(rows, group, layout).div_(world_size).to(tensor.dtype)
        self.all_gather(mean, rows, group, layout)
        return tensor if rows.data_ptr() == tensor.data_ptr() else tensor.copy_(rows.view(-1)[:size])

    def state_dict(self) -> dict[str, Any]:
        """The feedback state of this rank; each rank has its own."""
        return {"first": self.reduce_scatter.state_dict(), "second": self.all_gather.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same rank returned; a MismatchError if it is another kind of state.

        In a state of an earlier version the second hop may have no feedback: there it starts with empty memories.
        """
        check_hops("two hops", state)
        feedback, second = self.all_gather.feedback, dict(state["second"])
        old = [] if feedback.is_stateless else [x for x, saved in second.items() if not (saved["out"] or saved["into"])]
        second |= {layout: _LayoutState(feedback, second[layout]["count"]).state_dict() for layout in old}
        self.reduce_scatter.load_state_dict(state["first"])
        self.all_gather.load_state_dict(second)
        if old:
            text = f"the state has no feedback of averages: {feedback} starts empty"
            warn_user(f"{self.all_gather.name} hop: {text}", UserWarning)

    def residuals(self) -> dict[str, Tensor]:
        """The losses of this rank's messages that the next ones would make up for, as flat tensors by layout.

        They may be shorter or longer than the tensors that were averaged. In the first hop a rank's own share is not
        sent, and loses nothing. In the second hop it loses some of the average, which is the sum of so many tensors.
        """
        residuals = {}
        averages = self.all_gather.residuals()
        for layout, rows in self.reduce_scatter.residuals().items():
            if rows:
                world_size = len(rows) + 1
                rows |= {rank: row * world_size for rank, row in averages.get(layout, {}).items()}
                share = next(iter(rows.values())).numel()
                flat = residuals[layout] = next(iter(rows.values())).new_zeros(share * (max(rows) + 1))
                for slot, row in rows.items():
                    flat[slot * share : (slot + 1) * share] = row
        return residuals

    def restart(self, counts: Mapping[str, int]) -> None:
        """Begin without memories, as if so many averages of each layout had been made."""
        for hop in self.hops:
            hop.restart(counts)


def reduce_numbers(
    numbers: Sequence[float],
    group: dist.ProcessGroup,
    device: torch.device,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[float]:
    """Reduce numbers over the ranks of a group, with the same result on all."""
    reduced = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op, group=group)
    result: list[float] = reduced.tolist()
    return result
