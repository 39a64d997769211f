"""SameIndices: values at the places that the other direction's message carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint.comm.operators.base import PLAIN, Context, Operator
from shrinkpoint.comm.operators.chosen import (
    Values,
    check_choice,
    decode_values,
    encode_values,
    pick,
    spread,
    values_bytes,
    values_spec,
    within,
)
from shrinkpoint.comm.operators.flat import flattened
from shrinkpoint.errors import PolicyError


@dataclass(frozen=True)
class SameIndices(Operator):
    """The gradient at the places of the activations that were sent, and zeros for the rest; no positions are sent.

    What crosses is then the gradient of the masked function (arXiv 2401.07788, GPT-2: independent places may diverge).
    The places are `Context.places`. A value that is not finite at none of them makes the first value sent nan.

    Attributes:
        values: what they are sent as.
    """

    values: Values = "fp32"

    def __post_init__(self) -> None:
        check_choice("SameIndices", None, self.values)

    @property
    def spec(self) -> str:
        return f"same{values_spec(self.values)}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        return values_bytes(self.values, _places(context).numel(), dtype, context)

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        places = self._checked_places(x.shape, x.device, context)
        return encode_values(self.values, pick(flattened(x), places), x.dtype, context)

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        wire = self.checked(wire, out, context)
        places = self._checked_places(out.shape, out.device, context)
        chosen = decode_values(self.values, wire, places.numel(), out.dtype, context)
        return spread(chosen, places, out)

    def places(self, wire: Tensor, shape: Sequence[int], context: Context = PLAIN) -> Tensor:
        return _places(context)

    def _checked_places(self, shape: Sequence[int], device: torch.device, context: Context) -> Tensor:
        places = _places(context)
        within(f"operator {self.spec}", places, shape)
        return places.to(device)


def _places(context: Context) -> Tensor:
    if context.places is None:
        expected = "the places of a forward message"
        do = "put TopK or RandomK on the forward direction of the same boundary, or choose another operator"
        raise PolicyError("operator same", found="no places", expected=expected, do=do)
    return context.places
