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

from shrinkpoint.comm.feedback.base import End, Feedback, Packed, Turn
from shrinkpoint.comm.feedback.plain import Plain
from shrinkpoint.comm.gloo import Exchange, is_gloo
from shrinkpoint.comm.ledger import Ledger
from shrinkpoint.comm.link import How
from shrinkpoint.comm.operators.base import Context, Operator
from shrinkpoint.comm.operators.exact import Exact
from shrinkpoint.comm.spec import made
from shrinkpoint.errors import MismatchError, PolicyError

"""An operator, feedback around one, or the spec of either; None: nothing is compressed."""

SHARE = 64
"""A rank's share of a tensor is a multiple of so many values: groups of a power of two begin where a share does."""
SAMPLE_EVERY = 16
"""Messages of which one is looked at for what it lost."""
SLOT = 16
"""Messages lie at multiples of so many bytes, where operators may view them as wider words."""
_KEPT_STEPS = 2
_LARGE = 1 << 17
"""Bytes of a message. From this size on, more than two ranks of gloo are done sooner without its own all-to-all."""
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def chosen(how: How) -> Feedback:
    """What to send with, as feedback.

    Raises:
        PolicyError: it is one that gradients and weights cannot be sent with, which have neither sample ids nor the
            places of a forward message.
    """
    found = Exact() if how is None else made(how)
    feedback = Plain(found) if isinstance(found, Operator) else found
    if feedback.needs_ids:
        do = "use an operator, or EF, EFMixed or EF21"
        raise PolicyError(feedback.spec, found="feedback by sample id", expected="one for sums over samples", do=do)
    feedback.end().wire_bytes((SHARE,), torch.float32, Turn())
    return feedback


@dataclass
class _Memory:
    """Both ends of one tensor's messages at this rank, and how many sums there were."""

    how: Feedback
    out: End
    into: End
    count: int = 0
    idle: int = 0

    def switch(self, how: Feedback) -> None:
        """Go on with another operator; what is remembered stays if the feedback is of the same kind."""
        if how == self.how:
            return
        out, into = how.end(), how.end()
        if type(how) is type(self.how):
            out.load_state_dict(self.out.state_dict())
            into.load_state_dict(self.into.state_dict())
        self.how, self.out, self.into = how, out, into


class Hop:
    """Messages of one kind among the ranks of a group, and what is remembered of them by layout.

    A layout is the name of what the values of a tensor belong to. All ranks use the same ones in the same order.
    """

    def __init__(self, how: Feedback, ledger: Ledger, *, name: str) -> None:
        self._how, self.ledger, self.name = how, ledger, name
        self._memories: dict[str, _Memory] = {}

    @property
    def how(self) -> Feedback:
        """What messages are sent with; to be changed on all ranks between the same two of them."""
        return self._how

    @how.setter
    def how(self, how: Feedback) -> None:
        self._how = how
        for memory in self._memories.values():
            memory.switch(how)

    def step(self) -> None:
        """All tensors of a step went by: forget layouts that are no longer used."""
        for memory in self._memories.values():
            memory.idle += 1
        self._memories = {layout: kept for layout, kept in self._memories.items() if kept.idle <= _KEPT_STEPS}

    def state_dict(self) -> dict[str, Any]:
        """What feedback remembers at this rank, by layout."""
        return {
            layout: {"count": one.count, "out": one.out.state_dict(), "into": one.into.state_dict()}
            for layout, one in self._memories.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, with the same kind of feedback."""
        self._memories = {}
        for layout, kept in state.items():
            memory = self._memories[layout] = _Memory(self.how, self.how.end(), self.how.end(), kept["count"])
            memory.out.load_state_dict(kept["out"])
            memory.into.load_state_dict(kept["into"])

    def counts(self) -> dict[str, int]:
        """How many sums there were, by layout."""
        return {layout: memory.count for layout, memory in self._memories.items()}

    def _memory(self, layout: str) -> _Memory:
        if layout not in self._memories:
            self._memories[layout] = _Memory(self.how, self.how.end(), self.how.end())
        memory = self._memories[layout]
        memory.count, memory.idle = memory.count + 1, 0
        return memory

    def _turn(self, layout: str, memory: _Memory, of: int, to: int, slot: int) -> Turn:
        """What both ends of a message know: whose it is and which."""
        key = zlib.crc32(f"{self.name}/{layout}/{memory.count}/{of}/{to}".encode())
        return Turn(slot=slot, index=memory.count - 1, context=Context(key=key))

    def _pack(self, x: Tensor, memory: _Memory, turn: Turn, *, copies: int = 1) -> Tensor:
        """The message, filled up to whole slots.

        Args:
            copies: how many ranks it is sent to.
        """
        with self.ledger.timing("encode", x.device):
            packed = memory.out.pack(x, turn)
            wire = F.pad(packed.wire, (0, -packed.wire.numel() % SLOT))
        sampled = self.ledger.messages % SAMPLE_EVERY == 0
        self.ledger.count(copies * x.numel() * x.element_size(), copies * wire.numel())
        if sampled:
            self._sample(x, packed, memory.how, turn)
        return wire

    def _sample(self, x: Tensor, packed: Packed, how: Feedback, turn: Turn) -> None:
        seen = packed.seen
        if seen is None:
            seen = how.operator.decode(packed.wire, torch.empty_like(x), turn.context)
        self.ledger.sample(x, seen)
        self.ledger.found(x.isfinite().logical_not_().sum())

    def _unpack(self, wire: Tensor, out: Tensor, memory: _Memory, turn: Turn) -> Tensor:
        with self.ledger.timing("decode", out.device):
            size = memory.into.wire_bytes(out.shape, out.dtype, turn)
            memory.into.unpack(wire[:size], out, turn)
        return out


class Scatter(Hop):
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
        memory, others = self._memory(layout), [rank for rank in range(width) if rank != me]
        wires = [self._pack(rows[to], memory, self._turn(layout, memory, me, to, to)) for to in others]
        sizes = [0 if rank == me else wires[0].numel() for rank in range(width)]
        received = self._exchanged(torch.cat(wires), sizes, group)
        exact = torch.promote_types(rows.dtype, torch.float32)
        total, out = torch.zeros_like(rows[0], dtype=exact), torch.empty_like(rows[0])
        for of, message in enumerate(torch.split(received, sizes)):
            turn = self._turn(layout, memory, of, me, of)
            total += rows[me] if of == me else self._unpack(message, out, memory, turn)
        return total

    @staticmethod
    def _exchanged(wires: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        received = torch.empty_like(wires)
        if is_gloo(group, wires.device) and (len(sizes) == 2 or max(sizes) >= _LARGE):
            Exchange(torch.split(wires, sizes), torch.split(received, sizes), group).wait()
        else:
            dist.all_to_all_single(received, wires, sizes, sizes, group=group)
        return received


class Gather(Hop):
    """The second hop: every rank gets the rows of all, decoded from the same bytes on each."""

    def __call__(
        self, row: Tensor, rows: Tensor, group: dist.ProcessGroup, layout: str = "", *, async_op: bool = False
    ) -> Decoding | None:
        """Send this rank's row, encoded, to all, and fill `rows` with what all sent, this rank's own message included.

        Args:
            row: of the dtype of `rows`; it may be a part of them.
            rows: of shape (ranks, values); contiguous.
            async_op: return work that fills the rows when it is waited for.
        """
        me, width = group.rank(), group.size()
        memory = self._memory(layout)
        turns = [self._turn(layout, memory, of, width, of) for of in range(width)]
        wire = self._pack(row, memory, turns[me], copies=width - 1)
        every = wire.new_empty(width * wire.numel())
        work = self._gathered(every, wire, group, async_op)

        def decode() -> None:
            for of, message in enumerate(torch.split(every, wire.numel())):
                self._unpack(message, rows[of], memory, turns[of])

        if async_op:
            return Decoding(work, decode)
        decode()
        return None

    @staticmethod
    def _gathered(every: Tensor, wire: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        if group.size() != 2 or not is_gloo(group, wire.device):  # gloo's ring of more ranks goes one way round
            return all_gather(every, wire, group=group, async_op=async_op)
        rows = every.view(2, wire.numel())
        rows[group.rank()] = wire
        work = Exchange([wire, wire], list(rows), group)
        if not async_op:
            work.wait()
        return work


class Decoding(dist.Work):
    """Work whose result is decoded when it is waited for."""

    def __init__(self, work: dist.Work | Exchange, decode: Callable[[], None]) -> None:
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


class TwoHop:
    """Averages over the ranks of a group. All ranks decode them from the same bytes: they are equal to the last bit.

    Args:
        how: what gradients are sent with.
        second: what their average is sent with; None: `how` without its feedback.
        name: of what is averaged; noise follows from it.
    """

    def __init__(self, how: How, second: How = None, *, name: str) -> None:
        self.ledgers = {"first hop": Ledger(), "second hop": Ledger()}
        first, last = self._both(how, second)
        self.first = Scatter(first, self.ledgers["first hop"], name=f"{name} first")
        self.second = Gather(last, self.ledgers["second hop"], name=f"{name} second")

    @staticmethod
    def _both(how: How, second: How) -> tuple[Feedback, Feedback]:
        first = chosen(how)
        return first, Plain(first.operator) if second is None else chosen(second)

    def switch(self, how: How, second: How = None) -> None:
        """Go on with other operators; all ranks do so at the same step."""
        self.first.how, self.second.how = self._both(how, second)

    def average_(self, flat: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Make `flat` the average over ranks, and return it.

        Args:
            flat: floating point, 1-d, contiguous; as long on every rank.
        """
        width, size = group.size(), flat.numel()
        if width == 1 or not size:
            return flat
        share = -(-size // width)
        share += -share % SHARE
        rows = F.pad(flat, (0, share * width - size)) if share * width > size else flat
        rows = rows.view(width, share)
        mean = self.first(rows, group, layout).div_(width).to(flat.dtype)
        self.second(mean, rows, group, layout)
        return flat if rows.data_ptr() == flat.data_ptr() else flat.copy_(rows.view(-1)[:size])

    def step(self) -> None:
        """All tensors of a step went by."""
        self.first.step()
        self.second.step()

    def state_dict(self) -> dict[str, Any]:
        """What feedback remembers at this rank; each rank has its own."""
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            MismatchError: it is not such a state.
        """
        if set(state) != {"first", "second"}:
            found, do = f"a state of {sorted(state)}", "give what state_dict() of the same rank gave"
            raise MismatchError("two hops", found=found, expected="one of first and second", do=do)
        self.first.load_state_dict(state["first"])
        self.second.load_state_dict(state["second"])


def summed(group: dist.ProcessGroup, device: torch.device) -> Callable[[list[float]], list[float]]:
    """What adds up numbers over the ranks of a group; the result is the same on all."""

    def total(numbers: list[float]) -> list[float]:
        together = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(together, group=group)
        out: list[float] = together.tolist()
        return out

    return total
