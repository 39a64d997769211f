"""AQ-SGD: messages are changes of a sample's activation since it was here before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.comm.feedback.base import End, Feedback, Packed, Turn, decoded, inner
from shrinkpoint.comm.feedback.shelf import Order, Shelf
from shrinkpoint.comm.operators.base import Context, Operator, check_operator
from shrinkpoint.comm.operators.exact import Exact
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.storage import local_path

Stored = Literal["fp16", "bf16", "fp32"]
_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_EXACT = Exact()
_MOST = 1 << 30


@dataclass(frozen=True)
class AQSGD(Feedback):
    """AQ-SGD (arXiv 2206.01299): for each sample `m <- m + C(x - m)`; the other end uses m.

    Both ends remember m by the sample's id, on the host, rounded to `dtype`: the rounded value is what the next change
    is measured from, at both ends. Ids travel in the message, 8 bytes a sample. As in the paper a sample that was not
    seen before is sent exactly, whenever it comes first; so is one that was forgotten. So a message's size follows from
    the ids, which both ends must know before it: `compress_pipeline` tells them to all ranks at the start of a step.

    It pays where samples come back with nearly the same activation: several epochs over the same data without
    augmentation. Both ends must handle messages in the same order, as every pipeline schedule does.

    Args:
        operator: what the change is sent with.
        warmup: so many first visits of each sample are sent exactly; 0: none, and a first message is a change from 0.
        dtype: of what is remembered: "fp16", "bf16" or "fp32".
        most_bytes: what each end remembers at most of one tensor of a boundary; the samples that were used longest ago
            are forgotten, the same at both ends.
        folder: where to keep it in a file instead of memory, removed when the process ends; either end's own choice.

    Raises:
        PolicyError: an argument out of range.
    """

    operator: Operator
    warmup: int = 1
    dtype: Stored = "fp16"
    most_bytes: int = _MOST
    folder: str | None = None

    needs_ids: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_operator("AQSGD", self.operator)
        arguments.whole("AQSGD, warmup", self.warmup, least=0, do="give a number of visits")
        arguments.choice("AQSGD, dtype", self.dtype, get_args(Stored))
        arguments.whole("AQSGD, most_bytes", self.most_bytes, do="give the bytes of a row at least")
        if self.folder is not None:
            object.__setattr__(self, "folder", str(local_path(self.folder, "folder")))

    @property
    def spec(self) -> str:
        options = [f"warmup={self.warmup}"] if self.warmup != 1 else []
        options += [f"dtype={self.dtype}"] if self.dtype != "fp16" else []
        options += [f"most_bytes={self.most_bytes}"] if self.most_bytes != _MOST else []
        options += [f"folder={self.folder}"] if self.folder is not None else []
        return f"aq({', '.join([self.operator.spec, *options])})"

    @property
    def agreed(self) -> str:
        return replace(self, folder=None).spec

    def end(self) -> End:
        return _End(self)


class _End(End):
    def __init__(self, how: AQSGD) -> None:
        self._how, self._operator = how, how.operator
        self._shelves: dict[int, Shelf] = {}
        self._rows: dict[tuple[int, int], list[bool]] = {}  # of the last message: which were exact
        self._expected: dict[tuple[int, int], list[bool]] = {}  # of those that are not there yet
        self._waiting: dict[int, list[tuple[list[int], Sequence[int]]]] = {}  # their samples and shapes, by tensor
        self._ahead: dict[int, Order] = {}  # what there will be when they are here

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return sum(shelf.restarts for shelf in self._shelves.values())

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> int:
        """Without ids: of samples that are known."""
        exact = [] if turn.ids is None else self._exact(_ids(shape, turn), shape, turn)
        return sum(self._sizes(shape, dtype, exact, turn))

    def expect(self, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> int:
        ids = _ids(shape, turn)
        self._expected[turn.key] = exact = self._exact(ids, shape, turn)
        self._waiting.setdefault(turn.tensor, []).append((ids, shape))
        if turn.tensor in self._ahead:
            _go_on(self._ahead[turn.tensor], ids, shape)
        return sum(self._sizes(shape, dtype, exact, turn))

    def forget_expected(self) -> None:
        for one in (self._expected, self._waiting, self._ahead):
            one.clear()

    def pack(self, x: Tensor, turn: Turn) -> Packed:
        ids, shelf = _ids(x.shape, turn), self._shelf(turn.tensor)
        exact = self._begin(ids, x.shape, turn)
        if all(exact):
            shelf.put(ids, x)
            return Packed(_EXACT.encode(x, turn.context), x)
        known, at = shelf.get(ids, x), _Rows(exact, x.shape, x.device)
        context = at.context(turn.context)
        change = at.old(x.to(torch.float32) - known).to(inner(x.dtype))
        wire = self._operator.encode(change, context)
        moved = at.old(known) + decoded(self._operator, wire, change, context)
        seen = at.joined(x.to(torch.float32), moved)
        shelf.put(ids, seen)
        whole = torch.cat((_EXACT.encode(at.new(x)), wire)) if any(exact) else wire
        return Packed(whole, at.joined(x, moved.to(x.dtype)))

    def unpack(self, wire: Tensor, out: Tensor, turn: Turn) -> Tensor:
        ids, shelf = _ids(out.shape, turn), self._shelf(turn.tensor)
        exact = self._begin(ids, out.shape, turn)
        if all(exact):
            _EXACT.decode(wire, out, turn.context)
            shelf.put(ids, out)
            return out
        known, at = shelf.get(ids, out), _Rows(exact, out.shape, out.device)
        new, old = self._parts(wire, out.shape, out.dtype, exact, turn)
        change = decoded(self._operator, old, at.old(out), at.context(turn.context))
        moved = at.old(known) + change
        came = out
        if any(exact):
            came = torch.zeros_like(out)
            came[at.is_exact] = _EXACT.decode(new, at.new(out).contiguous())
        shelf.put(ids, at.joined(came.to(torch.float32), moved))
        return out.copy_(at.joined(came, moved.to(out.dtype)))

    def places(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> Tensor | None:
        exact = self._rows.get(turn.key, [])
        if exact and all(exact):  # everywhere, as positions for a way back that wants some
            return torch.arange(math.prod(shape), device=wire.device)
        at = _Rows(exact or [False] * shape[0], shape, wire.device)
        old = self._parts(wire, shape, dtype, exact, turn)[1]
        found = self._operator.places(old, at.old_shape, at.context(turn.context))
        return None if found is None else at.places(found)

    def _begin(self, ids: Sequence[int], shape: Sequence[int], turn: Turn) -> list[bool]:
        """Which rows of the message of this turn are exact; it is expected no more."""
        self._rows[turn.key] = exact = self._exact(ids, shape, turn)
        if self._expected.pop(turn.key, None) is not None:
            self._waiting[turn.tensor].pop(0)
            if not self._waiting[turn.tensor]:
                self._ahead.pop(turn.tensor, None)
        return exact

    def _exact(self, ids: Sequence[int], shape: Sequence[int], turn: Turn) -> list[bool]:
        if turn.key in self._expected:
            return self._expected[turn.key]
        order = self._shelf(turn.tensor).order
        waiting = self._waiting.get(turn.tensor)
        if waiting and turn.tensor not in self._ahead:  # only a schedule that posts several buffers at once pays for it
            self._ahead[turn.tensor] = order.copy()
            for other, others in waiting:
                _go_on(self._ahead[turn.tensor], other, others)
        return self._ahead.get(turn.tensor, order).exact(ids, shape[1:])

    def _sizes(self, shape: Sequence[int], dtype: torch.dtype, exact: list[bool], turn: Turn) -> tuple[int, int]:
        """Bytes of the rows that are exact, and of all others."""
        if not any(exact):
            return 0, self._operator.wire_bytes(shape, inner(dtype), turn.context)
        new = _EXACT.wire_bytes((sum(exact), *shape[1:]), dtype)
        if all(exact):
            return new, 0
        at = _Rows(exact, shape, torch.device("cpu"))
        return new, self._operator.wire_bytes(at.old_shape, inner(dtype), at.context(turn.context))

    def _parts(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, exact: list[bool], turn: Turn
    ) -> tuple[Tensor, Tensor]:
        new, _ = self._sizes(shape, dtype, exact, turn)
        return wire[:new], wire[new:].clone() if new else wire  # a message begins where its memory does

    def state_dict(self) -> dict[str, Any]:
        return {"samples": {str(tensor): shelf.state_dict() for tensor, shelf in self._shelves.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._shelves = {}
        self._rows.clear()
        self.forget_expected()
        for tensor, kept in state["samples"].items():
            self._shelf(int(tensor)).load_state_dict(kept)

    def shared(self) -> list[Tensor]:
        return [one for tensor in sorted(self._shelves) for one in self._shelves[tensor].shared()]

    def _shelf(self, tensor: int) -> Shelf:
        if tensor not in self._shelves:
            how, dtype = self._how, _DTYPES[self._how.dtype]
            shelf = Shelf(dtype, most_bytes=how.most_bytes, folder=how.folder, warmup=how.warmup)
            self._shelves[tensor] = shelf
        return self._shelves[tensor]


def _go_on(order: Order, ids: Sequence[int], shape: Sequence[int]) -> None:
    """What an order is after a message."""
    order.accept(shape[1:])
    order.visit(ids)


class _Rows:
    """The rows of a message: those sent as they are (new) and those sent as changes (old)."""

    def __init__(self, exact: Sequence[bool], shape: Sequence[int], device: torch.device) -> None:
        self._none, self._shape = not any(exact), tuple(shape)
        self.is_exact = torch.tensor(exact, dtype=torch.bool, device=device)

    @property
    def old_shape(self) -> tuple[int, ...]:
        return (self._shape[0] - int(self.is_exact.sum()), *self._shape[1:])

    def new(self, x: Tensor) -> Tensor:
        return x[self.is_exact]

    def old(self, x: Tensor) -> Tensor:
        return x if self._none else x[~self.is_exact]

    def joined(self, x: Tensor, moved: Tensor) -> Tensor:
        """x with its old rows as they moved."""
        if self._none:
            return moved
        out = x.clone()
        out[~self.is_exact] = moved
        return out

    def context(self, context: Context) -> Context:
        """The context of the old rows alone: places are counted among them."""
        if self._none or context.places is None:
            return context
        rows = context.places.to(self.is_exact.device) // self._width
        number = (~self.is_exact).cumsum(0) - 1
        left = ~self.is_exact[rows]
        places = number[rows[left]] * self._width + context.places.to(rows.device)[left] % self._width
        return replace(context, places=places.to(context.places.device))

    def places(self, found: Tensor) -> Tensor:
        """Flat positions of the whole tensor, ascending: those found among the old rows, and all of the new ones."""
        if self._none:
            return found
        old = torch.nonzero(~self.is_exact).view(-1).to(found.device)
        mapped = old[found // self._width] * self._width + found % self._width
        inside = torch.arange(self._width, device=found.device)
        new = torch.nonzero(self.is_exact).to(found.device) * self._width + inside
        return torch.cat((mapped, new.view(-1))).sort().values

    @property
    def _width(self) -> int:
        return math.prod(self._shape[1:])


def _ids(shape: Sequence[int], turn: Turn) -> list[int]:
    if turn.ids is None:
        do = "give them with set_sample_ids before the step"
        raise PolicyError("AQSGD", found="no sample ids", expected=f"{shape[0] if shape else 1} of them", do=do)
    if not shape or turn.ids.numel() != shape[0]:
        found, expected = f"{turn.ids.numel()} sample ids for {tuple(shape)}", "one a row"
        raise MismatchError("AQSGD", found=found, expected=expected)
    ids: list[int] = turn.ids.tolist()
    return ids
