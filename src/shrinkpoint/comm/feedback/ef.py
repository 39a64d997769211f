"""Error feedback: what a message lost is added to the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.comm.feedback.base import End, Feedback, Packed, Turn, decoded, finite_, inner
from shrinkpoint.comm.feedback.buffers import Buffers
from shrinkpoint.comm.operators.base import Operator, check_operator


@dataclass(frozen=True)
class EF(Feedback):
    """Error feedback (arXiv 1809.07599; arXiv 2401.07788, section on error feedback).

    Sent is `c = C(x + e)`, and then `e <- x + e - c`, c being what the other end holds after rounding to x's dtype.
    The sender alone remembers: e, one of each micro-batch slot, so what a sample lost goes to the next sample there.
    """

    operator: Operator

    def __post_init__(self) -> None:
        check_operator("EF", self.operator)

    @property
    def spec(self) -> str:
        return f"ef({self.operator.spec})"

    def end(self) -> End:
        return _End(self.operator)


class ResidualEnd(End):
    """A sender keeps residuals, a receiver keeps nothing."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._residuals = Buffers()

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return self._residuals.restarts

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self._residuals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals.load_state_dict(state["residual"])


class _End(ResidualEnd):
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> int:
        return self._operator.wire_bytes(shape, inner(dtype), turn.context)

    def pack(self, x: Tensor, turn: Turn) -> Packed:
        residual = self._residuals.at(turn, x)
        residual += x
        wire = self._operator.encode(residual.to(inner(x.dtype)), turn.context)
        seen = decoded(self._operator, wire, x, turn.context).to(x.dtype)
        finite_(residual.sub_(seen))
        return Packed(wire, seen)

    def unpack(self, wire: Tensor, out: Tensor, turn: Turn) -> Tensor:
        return out.copy_(decoded(self._operator, wire, out, turn.context))

    def places(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> Tensor | None:
        return self._operator.places(wire, shape, turn.context)
