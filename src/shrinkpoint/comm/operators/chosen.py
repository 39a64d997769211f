"""The chosen values of a tensor: picked from their places, as bytes, and put back with zeros around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shrinkpoint import _native, arguments
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.operators.base import Context, Operator
from shrinkpoint.comm.operators.flat import fill
from shrinkpoint.errors import MismatchError

Values: TypeAlias = Literal["fp32", "fp16", "bf16"] | Operator
"""What chosen values are sent as. "fp32": as they are, in 16 bits where the tensor has no more; fp16 makes inf of what
is beyond it. An operator is given all of them as one 1-d tensor."""

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SHORT = (torch.float16, torch.bfloat16)
_HUNDRED = 100


def check_choice(where: str, share: float | None, values: Values) -> None:
    """Refuse settings that mean nothing.

    Raises:
        PolicyError: the share is not above 0 and at most 1, or the values are no kind of values.
    """
    if share is not None:
        arguments.number(f"{where}, share", share, most=1.0, do="give .1 for a tenth")
    if not isinstance(values, Operator) and (not isinstance(values, str) or values not in _DTYPES):
        expected = "fp32, fp16, bf16 or an operator"
        raise arguments.wrong(f"{where}, values", values, expected, "choose one of them")


def percent(share: float) -> str:
    """A share as it stands in a spec: exactly."""
    return f"{(Decimal(repr(float(share))) * _HUNDRED).normalize():f}"


@lru_cache(maxsize=4096)
def count_of(n: int, share: float) -> int:
    """`n - floor(n (1 - share))`, the share being the decimal number it is written as."""
    return math.ceil(n * Fraction(repr(float(share))))


def values_spec(values: Values) -> str:
    """What a spec says of values: nothing of those that are sent as they are."""
    return "" if values == "fp32" else f":{values}"


def sent_as(values: Values, dtype: torch.dtype) -> torch.dtype:
    """The type of chosen values of a tensor of this dtype, before an operator sees them."""
    if isinstance(values, Operator):
        return torch.float32
    return dtype if values == "fp32" and dtype in _SHORT else _DTYPES[values]


def values_bytes(values: Values, k: int, dtype: torch.dtype, context: Context) -> int:
    """The size of k chosen values of a tensor of this dtype."""
    kind = sent_as(values, dtype)
    return values.wire_bytes((k,), kind, context) if isinstance(values, Operator) else k * kind.itemsize


def encode_values(values: Values, chosen: Tensor, dtype: torch.dtype, context: Context) -> Tensor:
    """The bytes of chosen values, float32 and contiguous, of a tensor of this dtype."""
    if isinstance(values, Operator):
        return values.encode(chosen, context)
    return chosen.to(sent_as(values, dtype)).view(torch.uint8)


def decode_values(values: Values, code: Tensor, k: int, dtype: torch.dtype, context: Context) -> Tensor:
    """What `encode_values` was given, as far as it was sent: 1-d, of the type `sent_as` says."""
    made = torch.empty(k, dtype=sent_as(values, dtype), device=code.device)
    if isinstance(values, Operator):
        return values.decode(code, made, context)
    made.view(torch.uint8).copy_(code)
    return made


def pick(flat: Tensor, places: Tensor) -> Tensor:
    """The values at the places; the first is nan where one that is not finite is at none of them.

    Args:
        flat: float32, 1-d, contiguous.
        places: int64, valid, each once.
    """
    if flat.device.type != "cpu":
        return _pick_torch(flat, places)
    chosen = torch.empty(places.numel(), dtype=torch.float32)
    if _native.sparse_gather(bits_of(flat), bits_of(places), bits_of(chosen)) and chosen.numel():
        chosen[0] = torch.nan
    return chosen


def _pick_torch(flat: Tensor, places: Tensor) -> Tensor:
    chosen = flat.index_select(0, places)
    if chosen.numel():
        lost = (~flat.isfinite()).sum() > (~chosen.isfinite()).sum()
        chosen[0] = torch.where(lost, torch.nan, chosen[0])
    return chosen


def fitted(chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Chosen values as another dtype; those that are finite stay so."""
    if chosen.dtype == dtype:
        return chosen
    return fill(torch.empty(chosen.shape, dtype=dtype, device=chosen.device), chosen.to(torch.float32))


def spread(chosen: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """Fill `out`: zeros, and the values at their flat places, which must be valid."""
    into = out.detach()
    flat = (into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)).view(-1)
    flat.zero_().index_copy_(0, places, fitted(chosen, out.dtype))
    if not into.is_contiguous():
        into.copy_(flat.view(into.shape))
    return out


def within(where: str, places: Tensor, shape: Sequence[int]) -> None:
    """Refuse places that a tensor of this shape has not.

    Raises:
        MismatchError: the first or the last is outside.
    """
    count = math.prod(shape)
    if places.numel() and not 0 <= int(places[0]) <= int(places[-1]) < count:
        expected = f"positions below {count}, for {tuple(shape)}"
        do = "give both directions of a boundary tensors of one shape"
        raise MismatchError(where, found=f"positions up to {int(places[-1])}", expected=expected, do=do)
