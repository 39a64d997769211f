"""Coding of ascending flat indices, in a size that follows from their number and from that of the positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.device import kernels_for, run_kernels
from shrinkpoint.errors import MismatchError
from shrinkpoint.tensors.dtypes import tensor_bytes

IndexForm = Literal["all", "bitmap", "packed", "split"]


_MAX_KERNEL_BITS = 1 << 31


@dataclass(frozen=True)
class IndexCode:
    """The code of k of n indices, in `size` bytes.

    * all: k is n; nothing is written.
    * bitmap: a bit for each of the n positions.
    * packed: `width` bits for each index.
    * split (P. Elias 1974, R. M. Fano 1971): the lower `width` bits of each index, packed; then a bitmap of
      `k + ((n - 1) >> width)` bits, in which bit `(p >> width) + i` is set for the i-th index p.

    Fields of bits are written from the low bits up and without gaps; each of the two parts of "split" is padded with
    zero bits to whole bytes.

    Bits for each of k indices, n = 65536, where an index of int32 takes 32:

    ====== ======= ====== =====
    share  form    width  bits
    ====== ======= ====== =====
    50%    bitmap         2.00
    30%    bitmap         3.33
    20%    split   2      4.25
    10%    split   3      5.25
    5%     split   4      6.25
    2%     split   5      7.57
    ====== ======= ====== =====
    """

    form: IndexForm
    n: int
    k: int
    width: int
    size: int

    def encode(self, indices: Tensor) -> Tensor:
        """Encode k indices below n (int64, 1-d, strictly ascending) as `size` bytes: uint8, 1-d."""
        if indices.device.type != "cpu":
            return self.encode_torch(indices)
        out = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        if not _native.indices_encode(self.form, self.n, self.width, tensor_bytes(indices), tensor_bytes(out)):
            raise self.mismatch_error()
        return out

    def decode(self, code: Tensor) -> Tensor:
        """Decode the indices: int64, 1-d, ascending, on the device of the code.

        Raises:
            MismatchError: the bytes are not those of k indices below n in ascending order.
        """
        if code.numel() != self.size:
            raise self.mismatch_error(f"{code.numel()} bytes")
        if code.device.type != "cpu":
            return self.decode_torch(code)
        out = torch.empty(self.k, dtype=torch.int64, device="cpu")
        if not _native.indices_decode(self.form, self.n, self.width, tensor_bytes(code), tensor_bytes(out)):
            raise self.mismatch_error()
        return out

    def mismatch_error(self, problem: str = "other bytes") -> MismatchError:
        """The error for bytes that are not such a code."""
        expected = f"{self.k} ascending positions below {self.n}, in {self.size} bytes"
        advice = "use the same compressor, shape and dtype at both ends, and check the network"
        return MismatchError("indices of a message", found=problem, expected=expected, do=advice)

    def encode_torch(self, indices: Tensor) -> Tensor:
        """Encode with kernels or torch operations, on any device; the same bytes as `encode`."""
        if self.form == "all":
            return indices.new_empty(0, dtype=torch.uint8)
        code = self._encode_kernel(indices) if self._has_kernels(indices) else None
        if code is not None:
            return code
        if self.form == "packed":
            return _pack_fields(indices, self.width)
        if self.form == "bitmap":
            return _make_bitmap(indices, self.n)
        high = (indices >> self.width) + torch.arange(self.k, device=indices.device)
        return torch.cat([_pack_fields(indices, self.width), _make_bitmap(high, self.k + ((self.n - 1) >> self.width))])

    def decode_torch(self, code: Tensor) -> Tensor:
        """Decode with kernels or torch operations, on any device; the same indices as `decode`."""
        read = self._read_kernel(code) if self._has_kernels(code) else None
        indices = self._read_torch(code) if read is None else read
        ordered = indices.numel() == self.k and bool((indices[1:] > indices[:-1]).all())
        if not ordered or (self.k and int(indices[-1]) >= self.n):
            raise self.mismatch_error()
        return indices

    def _has_kernels(self, tensor: Tensor) -> bool:
        fits = self.k > 0 and self.n + self.k < _MAX_KERNEL_BITS and tensor.is_contiguous()
        return fits and self.form != "all" and kernels_for(tensor.device) is not None

    @property
    def _bitmap_start(self) -> int:
        return _bytes_for(self.k * self.width) if self.form == "split" else 0

    def _encode_kernel(self, indices: Tensor) -> Tensor | None:
        fields, start = self.form != "bitmap", None if self.form == "packed" else 8 * self._bitmap_start
        return run_kernels(
            indices.device, lambda kernels: kernels.encode_indices(indices, self.size, self.width, fields, start)
        )

    def _read_kernel(self, code: Tensor) -> Tensor | None:
        def read(kernels: Any) -> Tensor:
            if self.form == "packed":
                indices: Tensor = kernels.decode_fields(code, self.k, self.width)
            else:
                start, has_fields = self._bitmap_start, self.form == "split"
                indices = kernels.decode_bitmap(code, self.k, self.width, has_fields, start)
            return indices

        return run_kernels(code.device, read)

    def _read_torch(self, code: Tensor) -> Tensor:
        """The indices that the bytes contain, which may not be k ascending ones below n."""
        if self.form == "all":
            return torch.arange(self.k, device=code.device)
        if self.form == "packed":
            return _unpack_fields(code, self.k, self.width)
        if self.form == "bitmap":
            return _unpack_bits(code).nonzero().flatten()
        low_bytes = _bytes_for(self.k * self.width)
        high = _unpack_bits(code[low_bytes:]).nonzero().flatten()
        if high.numel() != self.k:
            return high
        high = high - torch.arange(self.k, device=code.device)
        return (high << self.width) | _unpack_fields(code[:low_bytes], self.k, self.width)


@lru_cache(maxsize=4096)
def index_code(n: int, k: int) -> IndexCode:
    """The shortest code of k of n indices; of equal ones the first in the order of `IndexForm`, then of width."""
    if k == n:
        return IndexCode("all", n, k, 0, 0)
    full = max(1, (n - 1).bit_length())
    codes = [IndexCode("bitmap", n, k, 1, _bytes_for(n)), IndexCode("packed", n, k, full, _bytes_for(k * full))]
    for width in range(1, full):
        size = _bytes_for(k * width) + _bytes_for(k + ((n - 1) >> width))
        codes.append(IndexCode("split", n, k, width, size))
    return min(codes, key=lambda code: code.size)


def _bytes_for(bits: int) -> int:
    return (bits + 7) // 8


def _unpack_bits(data: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> shifts) & 1).flatten()


def _pack_bits(bits: Tensor) -> Tensor:
    """Pack bits, uint8 of 0 or 1 and a multiple of 8 of them, eight a byte from the low bit up."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def _make_bitmap(indices: Tensor, n: int) -> Tensor:
    bits = torch.zeros(8 * _bytes_for(n), dtype=torch.uint8, device=indices.device)
    return _pack_bits(bits.index_fill_(0, indices, 1))


def _pack_fields(fields: Tensor, width: int) -> Tensor:
    bits = torch.zeros(8 * _bytes_for(fields.numel() * width), dtype=torch.uint8, device=fields.device)
    shifts = torch.arange(width, device=fields.device)
    bits[: fields.numel() * width] = ((fields[:, None] >> shifts) & 1).flatten().to(torch.uint8)
    return _pack_bits(bits)


def _unpack_fields(data: Tensor, k: int, width: int) -> Tensor:
    fields = _unpack_bits(data)[: k * width].view(k, width).to(torch.int64)
    return (fields << torch.arange(width, device=data.device)).sum(1)
