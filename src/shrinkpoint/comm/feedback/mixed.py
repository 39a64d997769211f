"""Error feedback that may spend only a part of a message on what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.comm.feedback.base import End, Feedback, Packed, Turn, decoded, finite_, inner
from shrinkpoint.comm.feedback.ef import ResidualEnd
from shrinkpoint.comm.operators.base import Context, Operator, check_operator
from shrinkpoint.errors import PolicyError

_OTHER = 0x5BD1E995  # an odd number, so that the two halves of a message have different keys


@dataclass(frozen=True)
class EFMixed(Feedback):
    """Half of the entries from the tensor, half from what was lost (arXiv 2401.07788 names it and does not define it).

    Sent are `a = C1(x)` and `b = C2(e)`; the other end uses `a + b`, and then `e <- (x - a) + (e - b)`. C1 has `share`
    of the operator's entries and C2 the others, so that a message has about the size of a plain one, and old losses
    cannot crowd out what is large now. The sender alone remembers.

    Args:
        operator: one that keeps a share of the entries: TopK or RandomK. For others no half of a message is defined.
        share: of the entries that the tensor itself gets, between 0 and 1.

    Raises:
        PolicyError: another operator, or a share out of range.
    """

    operator: Operator
    share: float = 0.5

    def __post_init__(self) -> None:
        check_operator("EFMixed", self.operator)
        if not isinstance(getattr(self.operator, "share", None), float):
            expected, do = "an operator that keeps a share of the entries", 'use TopK or RandomK, or "ef(...)"'
            raise PolicyError("EFMixed", found=self.operator.spec, expected=expected, do=do)
        if not 0 < self.share < 1:
            raise PolicyError("EFMixed, share", found=f"{self.share}", expected="a number between 0 and 1")

    @property
    def spec(self) -> str:
        options = "" if self.share == 0.5 else f", share={self.share!r}"
        return f"efmixed({self.operator.spec}{options})"

    def end(self) -> End:
        operator: Any = self.operator
        whole, part = (
            Decimal(repr(one)) for one in (operator.share, self.share)
        )  # .2 x .75 is .15, and not a bit more
        fresh, old = float(whole * part), float(whole * (1 - part))
        return _End(replace(operator, share=fresh), replace(operator, share=old))


class _End(ResidualEnd):
    def __init__(self, fresh: Operator, old: Operator) -> None:
        super().__init__(fresh)
        self._old = old

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> int:
        old = self._old.wire_bytes(shape, inner(dtype), _other(turn.context))
        return self._operator.wire_bytes(shape, inner(dtype), turn.context) + old

    def pack(self, x: Tensor, turn: Turn) -> Packed:
        residual, kind = self._residuals.at(turn, x), inner(x.dtype)
        fresh = self._operator.encode(x.to(kind), turn.context)
        wire = torch.cat((fresh, self._old.encode(residual.to(kind), _other(turn.context))))
        seen = self._sum(wire, x, turn).to(x.dtype)
        finite_(residual.add_(x).sub_(seen))
        return Packed(wire, seen)

    def unpack(self, wire: Tensor, out: Tensor, turn: Turn) -> Tensor:
        return out.copy_(self._sum(wire, out, turn))

    def places(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> Tensor | None:
        fresh, old = self._halves(wire, shape, dtype, turn)
        ours = self._operator.places(fresh, shape, turn.context)
        theirs = self._old.places(old, shape, _other(turn.context))
        return None if ours is None or theirs is None else torch.unique(torch.cat((ours, theirs)))

    def _sum(self, wire: Tensor, like: Tensor, turn: Turn) -> Tensor:
        fresh, old = self._halves(wire, like.shape, like.dtype, turn)
        made = decoded(self._operator, fresh, like, turn.context)
        return made.add_(decoded(self._old, old, like, _other(turn.context)))

    def _halves(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> tuple[Tensor, Tensor]:
        size = self._operator.wire_bytes(shape, inner(dtype), turn.context)
        return wire[:size], wire[size:].clone()  # a message begins where its memory does: operators may view it


def _other(context: Context) -> Context:
    return replace(context, key=(context.key + _OTHER) & 0xFFFFFFFF)
