"""Ascending flat positions as bytes: of a size that follows from how many there are among how many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.errors import MismatchError

Form = Literal["all", "bitmap", "packed", "split"]


@dataclass(frozen=True)
class PlaceCode:
    """How k of n places are written.

    * all: k is n; nothing is written.
    * bitmap: a bit for each of the n places.
    * packed: `width` bits for each position.
    * split (P. Elias 1974, R. M. Fano 1971): the lower `width` bits of each position, packed; then a bitmap of
      `k + ((n - 1) >> width)` bits, in which bit `(p >> width) + i` is set for the i-th position p.

    Fields of bits are written from the low bits up and without gaps; each of the two parts of "split" is filled up with
    zero bits to whole bytes.

    Bits for each of k positions, n = 65536, where an index of int32 takes 32:

    ====== ======= ====== =====
    share  form    width  bits
    ====== ======= ====== =====
    50 %   bitmap         2.00
    30 %   bitmap         3.33
    20 %   split   2      4.25
    10 %   split   3      5.25
    5 %    split   4      6.25
    2 %    split   5      7.57
    ====== ======= ====== =====

    Attributes:
        size: bytes.
    """

    form: Form
    n: int
    k: int
    width: int
    size: int

    @property
    def low_bytes(self) -> int:
        """Of the first part of "split"."""
        return _bytes(self.k * self.width)

    def encode(self, places: Tensor) -> Tensor:
        """The bytes of k positions below n: int64, 1-d, ascending, each once."""
        if places.device.type != "cpu":
            return self.encode_torch(places)
        out = torch.empty(self.size, dtype=torch.uint8)
        if not _native.indices_encode(self.form, self.n, self.width, bits_of(places), bits_of(out)):
            raise self.refused()
        return out

    def decode(self, code: Tensor) -> Tensor:
        """The positions: int64, 1-d, ascending, on the device of the bytes.

        Raises:
            MismatchError: the bytes are not those of k positions below n in ascending order.
        """
        if code.numel() != self.size:
            raise self.refused(f"{code.numel()} bytes")
        if code.device.type != "cpu":
            return self.decode_torch(code)
        out = torch.empty(self.k, dtype=torch.int64)
        if not _native.indices_decode(self.form, self.n, self.width, bits_of(code), bits_of(out)):
            raise self.refused()
        return out

    def refused(self, found: str = "bytes that say something else") -> MismatchError:
        """What to raise where they are not these positions."""
        expected = f"{self.k} ascending positions below {self.n}, in {self.size} bytes"
        do = "give both ends the same operator, shape and dtype, and look for damage on the way"
        return MismatchError("places of a message", found=found, expected=expected, do=do)

    def encode_torch(self, places: Tensor) -> Tensor:
        """`encode` on any device."""
        if self.form == "all":
            return places.new_empty(0, dtype=torch.uint8)
        if self.form == "packed":
            return _packed(places, self.width)
        if self.form == "bitmap":
            return _bitmap(places, self.n)
        high = (places >> self.width) + torch.arange(self.k, device=places.device)
        return torch.cat([_packed(places, self.width), _bitmap(high, self.k + ((self.n - 1) >> self.width))])

    def decode_torch(self, code: Tensor) -> Tensor:
        """`decode` on any device."""
        places = _READERS[self.form](self, code)
        ordered = places.numel() == self.k and bool((places[1:] > places[:-1]).all())
        if not ordered or (self.k and int(places[-1]) >= self.n):
            raise self.refused()
        return places


@lru_cache(maxsize=4096)
def place_code(n: int, k: int) -> PlaceCode:
    """The shortest code of k of n places; of equally short ones the first, in the order of `Form`, then of width."""
    if k == n:
        return PlaceCode("all", n, k, 0, 0)
    full = max(1, (n - 1).bit_length())
    found = [PlaceCode("bitmap", n, k, 1, _bytes(n)), PlaceCode("packed", n, k, full, _bytes(k * full))]
    for width in range(1, full):
        size = _bytes(k * width) + _bytes(k + ((n - 1) >> width))
        found.append(PlaceCode("split", n, k, width, size))
    return min(found, key=lambda code: code.size)


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _read_all(code: PlaceCode, data: Tensor) -> Tensor:
    return torch.arange(code.k, device=data.device)


def _read_bitmap(code: PlaceCode, data: Tensor) -> Tensor:
    return _bits(data).nonzero().flatten()


def _read_packed(code: PlaceCode, data: Tensor) -> Tensor:
    fields = _bits(data)[: code.k * code.width].view(code.k, code.width).to(torch.int64)
    return (fields << torch.arange(code.width, device=data.device)).sum(1)


def _read_split(code: PlaceCode, data: Tensor) -> Tensor:
    high = _read_bitmap(code, data[code.low_bytes :])
    if high.numel() != code.k:
        return high
    high = high - torch.arange(code.k, device=data.device)
    return (high << code.width) | _read_packed(code, data[: code.low_bytes])


_READERS: dict[Form, Callable[[PlaceCode, Tensor], Tensor]] = {
    "all": _read_all, "bitmap": _read_bitmap, "packed": _read_packed, "split": _read_split,
}  # fmt: skip


def _bits(data: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> shifts) & 1).flatten()


def _joined(bits: Tensor) -> Tensor:
    """Whole bytes of as many uint8 as bits; these are 0 or 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def _bitmap(places: Tensor, n: int) -> Tensor:
    bits = torch.zeros(8 * _bytes(n), dtype=torch.uint8, device=places.device)
    return _joined(bits.index_fill_(0, places, 1))


def _packed(fields: Tensor, width: int) -> Tensor:
    bits = torch.zeros(8 * _bytes(fields.numel() * width), dtype=torch.uint8, device=fields.device)
    shifts = torch.arange(width, device=fields.device)
    bits[: fields.numel() * width] = ((fields[:, None] >> shifts) & 1).flatten().to(torch.uint8)
    return _joined(bits)
