"""One end of one direction of a boundary: tensors become messages, messages become tensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import _native, arguments
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.feedback.base import Feedback, Turn
from shrinkpoint.comm.feedback.plain import Plain
from shrinkpoint.comm.ledger import Ledger
from shrinkpoint.comm.operators.base import Context, Operator
from shrinkpoint.comm.spec import made
from shrinkpoint.errors import MismatchError, PolicyError

How = Operator | Feedback | str | None
"""How tensors cross: None: as they are."""
Nonfinite = Literal["pass", "raise"]
_MASK = (1 << 32) - 1
_ID_BYTES = 8
FINITE = "finite values"
"""What an error expects whose cause is a value that is not finite."""


@dataclass(frozen=True)
class At:
    """Where a message stands.

    Attributes:
        slot: the micro-batch.
        tensor: which of the tensors that cross there.
        training: False: nothing is remembered of it, at either end.
        ids: int64, on any device, one a row: the samples. A receiver finds them in the message, and must be told them
            where it is to know the size before.
        places: flat positions, for `SameIndices`.
    """

    slot: int = 0
    tensor: int = 0
    training: bool = True
    ids: Tensor | None = field(default=None, repr=False, compare=False)
    places: Tensor | None = field(default=None, repr=False, compare=False)


class Link:
    """One end. Two that are made alike, one of which packs what the other one unpacks, in that order, stay in step.

    Messages of one slot and tensor are counted, and noise and random places follow from the count. In evaluation
    (`At.training` false) nothing is counted and the operator is used without its feedback.

    Args:
        how: an operator, a feedback, or the spec of one.
        name: of the boundary and direction; part of what noise follows from.
        nonfinite: "raise": nan and infinite values are an error, at the receiving end at once, at the sending end in
            the call after, so that the other end is not left waiting.
        sample_every: the relative error is taken of each message that is a multiple of this; 0: of none.
        min_numel: smaller tensors cross as they are.
        with_ids: messages carry sample ids, even if the feedback needs none: a later boundary may.

    Raises:
        PolicyError: an argument out of range, or no spec.
    """

    def __init__(
        self, how: Operator | Feedback | str, *, name: str = "0 forward", nonfinite: Nonfinite = "pass",
        sample_every: int = 16, min_numel: int = 0, with_ids: bool = False,
    ) -> None:  # fmt: skip
        arguments.choice(f"link {name}, nonfinite", nonfinite, get_args(Nonfinite))
        for what, value in (("sample_every", sample_every), ("min_numel", min_numel)):
            arguments.whole(f"link {name}, {what}", value, least=0)
        given = made(how)
        self.how: Feedback = given if isinstance(given, Feedback) else Plain(given)
        self.name, self.ledger = name, Ledger()
        self._end, self._plain = self.how.end(), Plain(self.how.operator).end()
        self._with_ids = with_ids or self.how.needs_ids
        self._raises, self._sample_every, self._min_numel = nonfinite == "raise", sample_every, min_numel
        self._counts: dict[tuple[int, int], int] = {}
        self._last: dict[tuple[int, int], tuple[bool, Turn, Tensor, torch.Size, torch.dtype]] = {}
        self._ids: dict[tuple[int, int], Tensor] = {}
        self._packs: bool | None = None
        self._pending: list[tuple[At, Tensor]] = []

    def __repr__(self) -> str:
        return f"Link({str(self.how)!r}, name={self.name!r})"

    @property
    def operator(self) -> Operator:
        return self.how.operator

    @property
    def needs_ids(self) -> bool:
        """Whether messages of training carry sample ids, which the sender must be given."""
        return self._with_ids

    def wants(self, x: Tensor) -> bool:
        """Whether a tensor (or meta tensor) crosses compressed; others cross as they are."""
        return x.is_floating_point() and x.numel() >= max(self._min_numel, 1)

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, at: At | None = None) -> int:
        """The size of the next message of a slot and tensor."""
        at = at or At()
        end = self._end if at.training else self._plain
        return self._head_bytes(shape, at) + end.wire_bytes(shape, dtype, self._turn(at))

    def expect(self, shape: Sequence[int], dtype: torch.dtype, at: At | None = None) -> int:
        """The size of the next message of a slot and tensor, for a buffer that is posted before others are unpacked.

        Messages are unpacked in the order in which they were expected. Where samples are remembered the size follows
        from `At.ids`.
        """
        at = at or At()
        end = self._end if at.training else self._plain
        return self._head_bytes(shape, at) + end.expect(shape, dtype, self._turn(at))

    def forget_expected(self) -> None:
        """A step begins: what was expected and has not come will not."""
        self._end.forget_expected()

    def pack(self, x: Tensor, at: At | None = None) -> Tensor:
        """The next message of a slot and tensor: uint8, 1-d, contiguous, on x's device.

        Raises:
            PolicyError: an earlier tensor was not finite and this link raises for that; or ids or places are missing.
            MismatchError: the ids do not fit the tensor.
        """
        at = at or At()
        self.check()
        self._is(True, at)
        turn, end, head = self._turn(at), self._end if at.training else self._plain, self._head(x, at)
        with torch.no_grad(), self.ledger.timing("encode", x.device):
            packed = end.pack(x.detach(), turn)
            wire = packed.wire if head is None else torch.cat((head, packed.wire))
        self._note(at, turn, packed.wire, x)
        self._account(x, packed.wire, packed.seen, wire.numel(), at, turn)
        self._done(at, end.restarts)
        return wire

    def unpack(self, wire: Tensor, out: Tensor, at: At | None = None) -> Tensor:
        """Fill `out`, of the shape and dtype of what was packed, from the next message of a slot and tensor.

        Args:
            wire: may be kept for `places` until the next message: do not write into it.

        Raises:
            PolicyError: what came was not finite and this link raises for that; `out` is filled.
            MismatchError: the message does not fit.
        """
        at = at or At()
        self._is(False, at)
        head = self._head_bytes(out.shape, at)
        ids = self._read_ids(wire, head, at)
        self._fits(wire, out, replace(at, ids=ids))
        turn, end = self._turn(at, ids), self._end if at.training else self._plain
        with torch.no_grad(), self.ledger.timing("decode", out.device):
            end.unpack(wire[head:], out, turn)
        if ids is not None:
            self._ids[turn.key] = ids
        self._note(at, turn, wire[head:], out)
        self.ledger.count(_bytes(out), wire.numel())
        self._done(at, end.restarts)
        self._refuse(out, at)
        return out

    def passed(self, x: Tensor) -> None:
        """Count a tensor that crossed as it is, at either end."""
        self.ledger.count(_bytes(x), _bytes(x))

    def places(self, at: At | None = None) -> Tensor | None:
        """The flat positions that the last message of a slot and tensor carried; None: all, or there was none."""
        at = at or At()
        last = self._last.get((at.slot, at.tensor))
        if last is None:
            return None
        training, turn, wire, shape, dtype = last
        return (self._end if training else self._plain).places(wire, shape, dtype, turn)

    def ids(self, at: At | None = None) -> Tensor | None:
        """The sample ids of the last message of a slot and tensor: int64, on the CPU; None: it had none."""
        at = at or At()
        return self._ids.get((at.slot, at.tensor))

    def check(self) -> None:
        """Raise what is still to be raised about tensors that were packed.

        Raises:
            PolicyError: one was not finite.
        """
        pending, self._pending = self._pending, []
        for at, count in pending:
            if int(count):
                raise self._not_finite(int(count), at)

    def describe(self) -> dict[str, Any]:
        """What both ends must have in common, as JSON."""
        return {
            "name": self.name, "how": self.how.agreed, "min_numel": self._min_numel, "with_ids": self._with_ids,
        }  # fmt: skip

    def fingerprint(self) -> str:
        """A digest of what both ends must have in common of earlier messages: 32 hex digits.

        Of many samples (AQ-SGD) all ids and some rows are looked at; of all else everything.
        """
        parts = [repr(sorted(self._counts.items())).encode()]
        parts += [bytes.fromhex(_native.xxh3_128(bits_of(one))) for one in self._end.shared()]
        return _native.xxh3_128(b"".join(parts))

    def state_dict(self) -> dict[str, Any]:
        """Counts and what the feedback remembers of this end; tensors are not copied. The ledger is no part of it."""
        counts = {f"{slot}.{tensor}": count for (slot, tensor), count in self._counts.items()}
        return {"how": self.how.agreed, "counts": counts, "feedback": self._end.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same end of the same link. Load both ends, or make both anew.

        Raises:
            MismatchError: it is that of another operator or feedback.
        """
        if state.get("how") != self.how.agreed:
            found, do = f"the state of {state.get('how')!r}", "make the link as it was saved"
            raise MismatchError(f"link {self.name}", found=found, expected=repr(self.how.agreed), do=do)
        pairs = ((key.partition("."), int(count)) for key, count in state["counts"].items())
        self._end.load_state_dict(state["feedback"])
        self._counts = {(int(key[0]), int(key[2])): count for key, count in pairs}
        self._last.clear()
        self._ids.clear()
        self._pending.clear()

    def _is(self, packs: bool, at: At) -> None:
        if not at.training:
            return
        if self._packs is not None and self._packs != packs:
            words = {True: "packs", False: "unpacks"}
            do = "make two links alike, one for each end"
            raise PolicyError(
                f"link {self.name}", found=f"it {words[self._packs]}", expected=f"one that {words[packs]}", do=do
            )
        self._packs = packs

    def _turn(self, at: At, ids: Tensor | None = None) -> Turn:
        index = self._counts.get((at.slot, at.tensor), 0)
        key = _key(self.name, at.slot, at.tensor, index + 1 if at.training else 0)
        return Turn(at.slot, at.tensor, index, Context(key, at.places), at.ids if ids is None else ids)

    def _head_bytes(self, shape: Sequence[int], at: At) -> int:
        return _ID_BYTES * (shape[0] if len(shape) else 1) if self._with_ids and at.training else 0

    def _head(self, x: Tensor, at: At) -> Tensor | None:
        head = self._head_bytes(x.shape, at)
        if not head:
            return None
        if at.ids is None or at.ids.numel() * _ID_BYTES != head:
            found, do = "none" if at.ids is None else f"{at.ids.numel()}", "give them with set_sample_ids"
            error = PolicyError if at.ids is None else MismatchError
            raise error(f"link {self.name}, sample ids", found=found, expected=f"{head // _ID_BYTES}", do=do)
        self._ids[at.slot, at.tensor] = at.ids
        return at.ids.to(x.device, torch.int64).contiguous().view(torch.uint8)

    def _read_ids(self, wire: Tensor, head: int, at: At) -> Tensor | None:
        """The samples that a message names, which are those that this end was told, if it was."""
        if not head or wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() < head:  # the size says so
            return at.ids
        ids = wire[:head].clone().view(torch.int64).cpu()
        if at.ids is not None and not torch.equal(at.ids.cpu().to(torch.int64), ids):
            found, expected = f"the samples {ids.tolist()[:8]}", f"{at.ids.tolist()[:8]}, as this end was told"
            raise MismatchError(f"link {self.name}", found=found, expected=expected, do="tell both ends the same")
        return ids

    def _fits(self, wire: Tensor, out: Tensor, at: At) -> None:
        size = self.wire_bytes(out.shape, out.dtype, at)
        if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != size:
            found, expected = f"a message of {wire.numel()} x {wire.dtype}", f"{size} bytes for {tuple(out.shape)}"
            raise MismatchError(f"link {self.name}", found=found, expected=expected, do="make both ends alike")

    def _note(self, at: At, turn: Turn, wire: Tensor, x: Tensor) -> None:
        if type(self.operator).places is not Operator.places:  # else the message would be kept for nothing
            self._last[turn.key] = at.training, turn, wire, x.shape, x.dtype

    def _done(self, at: At, restarts: int) -> None:
        if at.training:
            self._counts[at.slot, at.tensor] = self._counts.get((at.slot, at.tensor), 0) + 1
            self.ledger.restarts = restarts

    def _account(self, x: Tensor, wire: Tensor, seen: Tensor | None, size: int, at: At, turn: Turn) -> None:
        sampled = bool(self._sample_every) and self.ledger.messages % self._sample_every == 0
        self.ledger.count(_bytes(x), size)
        if sampled and x.numel():
            with torch.no_grad():
                seen = self.operator.decode(wire, torch.empty_like(x), turn.context) if seen is None else seen
                self.ledger.sample(x, seen)
        if sampled or self._raises:
            count = _nonfinite(x)
            self.ledger.found(count)
            if self._raises:
                self._pending.append((at, count))

    def _refuse(self, out: Tensor, at: At) -> None:
        if self._raises:
            count = _nonfinite(out)
            self.ledger.found(count)
            if int(count):
                raise self._not_finite(int(count), at)

    def _not_finite(self, count: int, at: At) -> PolicyError:
        where = f"link {self.name}, micro-batch {at.slot}, tensor {at.tensor}"
        do = 'look for what overflowed, or let such values pass: nonfinite="pass"'
        return PolicyError(where, found=f"{count} values that are not finite", expected=FINITE, do=do)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _nonfinite(x: Tensor) -> Tensor:
    x = x.detach()
    if x.device.type == "cpu" and torch.isfinite(x.sum(dtype=torch.float32)):  # 20 times faster than looking at each
        return torch.zeros((), dtype=torch.int64)
    return torch.isfinite(x).logical_not_().sum()


def _key(name: str, slot: int, tensor: int, count: int) -> int:
    """Different for the first 2^24 messages of 64 slots of 4 tensors: each step is invertible modulo 2^32."""
    x = (zlib.crc32(name.encode()) + (count << 8 | (slot & 63) << 2 | tensor & 3)) & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * factor & _MASK
    return x ^ x >> 16
