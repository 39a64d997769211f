"""AQ-SGD: messages are changes of a sample's activation since it was here before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint.comm.feedback.base import End, Feedback, Packed, Turn, decoded, inner
from shrinkpoint.comm.feedback.shelf import Shelf
from shrinkpoint.comm.operators.base import Operator
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
    is measured from, at both ends. Ids travel in the message, 8 bytes a sample. A sample that was not seen before, or
    was forgotten, starts from 0. The paper's first visits are exact: those are the first `warmup` steps.

    It pays where samples come back with nearly the same activation: several epochs over the same data without
    augmentation. Both ends must handle messages in the same order, as every pipeline schedule does.

    Args:
        operator: what the change is sent with.
        warmup: so many first messages of each micro-batch slot are sent exactly: the steps of one epoch, say.
        dtype: of what is remembered: "fp16", "bf16" or "fp32".
        most_bytes: what each end remembers at most of one tensor of a boundary; the samples that were used longest ago
            are forgotten, the same at both ends.
        folder: where to keep it in a file instead of memory, removed when the process ends; either end's own choice.

    Raises:
        PolicyError: an argument out of range.
    """

    operator: Operator
    warmup: int = 0
    dtype: Stored = "fp16"
    most_bytes: int = _MOST
    folder: str | None = None

    needs_ids: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise PolicyError("AQSGD, warmup", found=f"{self.warmup}", expected="0 or more steps")
        if self.dtype not in _DTYPES:
            raise PolicyError("AQSGD, dtype", found=repr(self.dtype), expected=f"one of {', '.join(get_args(Stored))}")
        if self.most_bytes < 1:
            raise PolicyError("AQSGD, most_bytes", found=f"{self.most_bytes}", expected="at least the bytes of a row")
        if self.folder is not None:
            object.__setattr__(self, "folder", str(local_path(self.folder, "folder")))

    @property
    def spec(self) -> str:
        options = [f"warmup={self.warmup}"] if self.warmup else []
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

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return sum(shelf.restarts for shelf in self._shelves.values())

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> int:
        if turn.index < self._how.warmup:
            return _EXACT.wire_bytes(shape, dtype, turn.context)
        return self._operator.wire_bytes(shape, inner(dtype), turn.context)

    def pack(self, x: Tensor, turn: Turn) -> Packed:
        ids, shelf = _ids(x, turn), self._shelf(turn.tensor)
        if turn.index < self._how.warmup:
            shelf.put(ids, x)
            return Packed(_EXACT.encode(x, turn.context), x)
        known = shelf.get(ids, x)
        wire = self._operator.encode((x.to(torch.float32) - known).to(inner(x.dtype)), turn.context)
        moved = known.add_(decoded(self._operator, wire, x, turn.context))
        shelf.put(ids, moved)
        return Packed(wire, moved.to(x.dtype))

    def unpack(self, wire: Tensor, out: Tensor, turn: Turn) -> Tensor:
        ids, shelf = _ids(out, turn), self._shelf(turn.tensor)
        if turn.index < self._how.warmup:
            _EXACT.decode(wire, out, turn.context)
            shelf.put(ids, out)
            return out
        change = decoded(self._operator, wire, out, turn.context)
        moved = shelf.get(ids, out).add_(change)
        shelf.put(ids, moved)
        return out.copy_(moved)

    def places(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> Tensor | None:
        if turn.index < self._how.warmup:  # exact: everywhere, as positions for a way back that wants some
            return torch.arange(math.prod(shape), device=wire.device)
        return self._operator.places(wire, shape, turn.context)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": {str(tensor): shelf.state_dict() for tensor, shelf in self._shelves.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._shelves = {}
        for tensor, kept in state["samples"].items():
            self._shelf(int(tensor)).load_state_dict(kept)

    def shared(self) -> list[Tensor]:
        return [one for tensor in sorted(self._shelves) for one in self._shelves[tensor].shared()]

    def _shelf(self, tensor: int) -> Shelf:
        if tensor not in self._shelves:
            how = self._how
            self._shelves[tensor] = Shelf(_DTYPES[how.dtype], most_bytes=how.most_bytes, folder=how.folder)
        return self._shelves[tensor]


def _ids(x: Tensor, turn: Turn) -> list[int]:
    if turn.ids is None:
        do = "give them with set_sample_ids before the step"
        raise PolicyError("AQSGD", found="no sample ids", expected=f"{x.shape[0] if x.dim() else 1} of them", do=do)
    if x.dim() == 0 or turn.ids.numel() != x.shape[0]:
        found, expected = f"{turn.ids.numel()} sample ids for {tuple(x.shape)}", "one a row"
        raise MismatchError("AQSGD", found=found, expected=expected)
    ids: list[int] = turn.ids.tolist()
    return ids
