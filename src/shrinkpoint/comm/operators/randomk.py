"""RandomK: values at random places that both ends know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint import _native, arguments
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.operators.base import PLAIN, Context, Operator
from shrinkpoint.comm.operators.chosen import (
    Values,
    check_choice,
    count_of,
    decode_values,
    encode_values,
    percent,
    pick,
    spread,
    values_bytes,
    values_spec,
)
from shrinkpoint.comm.operators.flat import flattened
from shrinkpoint.comm.operators.topk import MOST_COLUMNS, largest_places

_WORD = (1 << 32) - 1
_STEP = 0x9E3779B1
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))


@dataclass(frozen=True)
class RandomK(Operator):
    """Values at `n - floor(n (1 - share))` places of the whole tensor, each set of places equally likely.

    The places are those of the least hashes of (seed, the message's key, flat position), so both ends know them and a
    message is the values alone. A value that is not finite and was not picked makes the first value sent nan.

    Attributes:
        share: above 0, at most 1; at least one value is sent.
        values: what they are sent as.
        scaled: a receiver multiplies them by n / k, so that the mean of many messages is the tensor.
        seed: below 2^32.
    """

    share: float
    values: Values = "fp32"
    scaled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("RandomK", self.share, self.values)
        arguments.whole("RandomK, seed", self.seed, least=0, most=_WORD, do="take 0")
        arguments.flag("RandomK, scaled", self.scaled)

    @property
    def spec(self) -> str:
        scaled, seed = ":scaled" if self.scaled else "", f":seed{self.seed}" if self.seed else ""
        return f"rand{percent(self.share)}{scaled}{seed}{values_spec(self.values)}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        return values_bytes(self.values, count_of(math.prod(shape), self.share), dtype, context)

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        chosen = pick(flattened(x), self._places(x.shape, x.device, context))
        return encode_values(self.values, chosen, x.dtype, context)

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        wire = self.checked(wire, out, context)
        places = self._places(out.shape, out.device, context)
        chosen = decode_values(self.values, wire, places.numel(), out.dtype, context)
        if self.scaled and places.numel():
            chosen = chosen.to(torch.float32) * torch.tensor(out.numel() / places.numel(), dtype=torch.float32)
        return spread(chosen, places, out)

    def places(self, wire: Tensor, shape: Sequence[int], context: Context = PLAIN) -> Tensor:
        return self._places(shape, wire.device, context)

    def _places(self, shape: Sequence[int], device: torch.device, context: Context) -> Tensor:
        count = math.prod(shape)
        return random_places(count, count_of(count, self.share), mixed(context.key, self.seed), device)


def mixed(key: int, seed: int) -> int:
    """One number below 2^32 of two."""
    return _hash(_hash(key & _WORD) ^ seed)


def random_places(n: int, k: int, start: int, device: torch.device) -> Tensor:
    """The k of n positions whose hashes are least; int64, ascending."""
    if k == n:
        return torch.arange(n, device=device)
    if device.type != "cpu" or n > MOST_COLUMNS:
        return _random_places_torch(n, k, start, device)
    places = torch.empty(k, dtype=torch.int64)
    _native.sparse_random(n, start, bits_of(places))
    return places


def _random_places_torch(n: int, k: int, start: int, device: torch.device) -> Tensor:
    x = torch.arange(n, dtype=torch.int64, device=device).mul_(_STEP).add_(start).bitwise_and_(_WORD)
    for shift, factor in _ROUNDS:
        x = x.bitwise_xor(x >> shift).mul_(factor).bitwise_and_(_WORD)
    x = x.bitwise_xor(x >> 16) >> 1
    return largest_places(((_WORD >> 1) - x).to(torch.int32).view(1, -1), k)


def _hash(x: int) -> int:
    x = (x * _STEP + 1) & _WORD
    for shift, factor in _ROUNDS:
        x = ((x ^ x >> shift) * factor) & _WORD
    return x ^ x >> 16
