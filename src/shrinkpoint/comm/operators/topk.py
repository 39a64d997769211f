"""TopK: the largest magnitudes with their places, and zeros for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.operators.base import PLAIN, Context, Operator
from shrinkpoint.comm.operators.chosen import (
    Values,
    check_choice,
    count_of,
    decode_values,
    encode_values,
    fitted,
    percent,
    sent_as,
    spread,
    values_bytes,
    values_spec,
)
from shrinkpoint.comm.operators.flat import flattened, threads
from shrinkpoint.comm.operators.places import PlaceCode, place_code
from shrinkpoint.errors import PolicyError, StateError

MOST_COLUMNS = (1 << 32) - 1
"""As many values native code chooses from at once."""
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class TopK(Operator):
    """The `n - floor(n (1 - share))` values of largest magnitude, as arXiv 2401.07788's code counts them.

    That code takes them from each sample (the first axis) apart and drops values equal to the smallest magnitude kept;
    here exactly as many are sent, of equals those that come first. nan and infinities count as largest. A message is
    the flat positions (see `PlaceCode`), then the values in their order.

    Attributes:
        share: above 0, at most 1; at least one value is sent.
        values: what they are sent as; "fp16" makes infinite what is 65520 or more.
        per: "sample": the largest of each; a tensor of fewer than two axes is one sample. "tensor": of all.
    """

    share: float
    values: Values = "fp32"
    per: Literal["sample", "tensor"] = "sample"

    def __post_init__(self) -> None:
        check_choice("TopK", self.share, self.values)
        if self.per not in ("sample", "tensor"):
            raise PolicyError("TopK", found=f"per {self.per!r}", expected="sample or tensor", do="choose one of them")

    @property
    def spec(self) -> str:
        per = ":tensor" if self.per == "tensor" else ""
        return f"top{percent(self.share)}{per}{values_spec(self.values)}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        code = self._code(shape)
        return code.size + values_bytes(self.values, code.k, dtype, context)

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        code, flat, rows = self._code(x.shape), flattened(x), self._rows(x.shape)
        if not code.k or flat.device.type != "cpu" or code.n // rows > MOST_COLUMNS:
            return self._encode_torch(x, context)
        wire = torch.empty(self.wire_bytes(x.shape, x.dtype, context), dtype=torch.uint8)
        head, tail = wire[: code.size], wire[code.size :]
        raw = sent_as(self.values, x.dtype) == torch.float32 and not isinstance(self.values, Operator)
        chosen = tail if raw else torch.empty(code.k, dtype=torch.float32)
        many = threads(code.n)
        places, taken = bits_of(head), bits_of(chosen)
        if not _native.sparse_encode(code.form, code.width, bits_of(flat), rows, places, taken, threads=many):
            raise StateError(f"operator {self.spec}", found="a tensor that changed while it was encoded")
        if not raw:
            tail.copy_(encode_values(self.values, chosen, x.dtype, context))
        return wire

    def _encode_torch(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        code, flat, rows = self._code(x.shape), flattened(x), self._rows(x.shape)
        if not code.k:
            return flat.new_empty(0, dtype=torch.uint8)
        places = largest_places((flat.view(torch.int32) & _MAGNITUDE).view(rows, -1), code.k // rows)
        chosen = encode_values(self.values, flat[places], x.dtype, context)
        return torch.cat([code.encode_torch(places), chosen])

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        wire, code = self.checked(wire, out, context), self._code(out.shape)
        if not code.k or out.device.type != "cpu":
            return self._decode_torch(wire, out, context)
        chosen = fitted(self._chosen(wire, out, context), out.dtype)
        target = out.detach()
        into = target if target.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        places, values, item = bits_of(wire[: code.size]), bits_of(chosen), out.dtype.itemsize
        if not _native.sparse_decode(code.form, code.width, places, values, bits_of(into), item):
            raise code.refused()
        if into is not target:
            target.copy_(into)
        return out

    def _decode_torch(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        code = self._code(out.shape)
        return spread(self._chosen(wire, out, context), code.decode_torch(wire[: code.size]), out)

    def _chosen(self, wire: Tensor, out: Tensor, context: Context) -> Tensor:
        code = self._code(out.shape)
        return decode_values(self.values, wire[code.size :], code.k, out.dtype, context)

    def places(self, wire: Tensor, shape: Sequence[int], context: Context = PLAIN) -> Tensor:
        code = self._code(shape)
        return code.decode(wire[: code.size])

    def _rows(self, shape: Sequence[int]) -> int:
        return shape[0] if self.per == "sample" and len(shape) >= 2 else 1

    def _code(self, shape: Sequence[int]) -> PlaceCode:
        count, rows = math.prod(shape), self._rows(shape)
        return place_code(count, rows * count_of(count // rows, self.share) if count else 0)


def largest_places(numbers: Tensor, k: int) -> Tensor:
    """Flat places of the k largest in each row of a matrix of integers, of equals the first; int64, ascending."""
    least = numbers.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = numbers > least, numbers == least
    wanted = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= wanted))).flatten().nonzero().flatten()
