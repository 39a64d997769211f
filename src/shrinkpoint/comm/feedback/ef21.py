"""EF21: messages are changes of a tensor that both ends hold."""

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
class EF21(Feedback):
    """EF21 (arXiv 2106.05203): `g <- g + C(x - g)`; the other end uses g.

    Both ends remember g, one of each micro-batch slot, and compute it from decoded messages alone.
    """

    operator: Operator

    def __post_init__(self) -> None:
        check_operator("EF21", self.operator)

    @property
    def spec(self) -> str:
        return f"ef21({self.operator.spec})"

    def end(self) -> End:
        return _End(self.operator)


class _End(End):
    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._reference = Buffers()

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return self._reference.restarts

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> int:
        return self._operator.wire_bytes(shape, inner(dtype), turn.context)

    def pack(self, x: Tensor, turn: Turn) -> Packed:
        reference = self._reference.at(turn, x)
        wire = self._operator.encode((x.to(torch.float32) - reference).to(inner(x.dtype)), turn.context)
        return Packed(wire, self._moved(reference, wire, x, turn).to(x.dtype))

    def unpack(self, wire: Tensor, out: Tensor, turn: Turn) -> Tensor:
        return out.copy_(self._moved(self._reference.at(turn, out), wire, out, turn))

    def places(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> Tensor | None:
        return self._operator.places(wire, shape, turn.context)

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self._reference.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference.load_state_dict(state["reference"])

    def shared(self) -> list[Tensor]:
        return self._reference.shared()

    def _moved(self, reference: Tensor, wire: Tensor, like: Tensor, turn: Turn) -> Tensor:
        made = decoded(self._operator, wire, like, turn.context).add_(reference)
        finite_(reference.copy_(made))
        return made
