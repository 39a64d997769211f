"""No feedback: every message for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shrinkpoint.comm.feedback.base import End, Feedback, Packed, Turn
from shrinkpoint.comm.operators.base import Operator


@dataclass(frozen=True)
class Plain(Feedback):
    """An operator alone."""

    operator: Operator

    plain: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return self.operator.spec

    def end(self) -> End:
        return PlainEnd(self.operator)


class PlainEnd(End):
    """It remembers nothing."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> int:
        return self._operator.wire_bytes(shape, dtype, turn.context)

    def pack(self, x: Tensor, turn: Turn) -> Packed:
        return Packed(self._operator.encode(x, turn.context))

    def unpack(self, wire: Tensor, out: Tensor, turn: Turn) -> Tensor:
        return self._operator.decode(wire, out, turn.context)

    def places(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, turn: Turn) -> Tensor | None:
        return self._operator.places(wire, shape, turn.context)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
