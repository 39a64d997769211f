"""Sparse compressors (TopK, RandomK, SameIndices): a few values are sent, the rest decode to zero."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext
from shrinkpoint.comm.compressors.index_coding import IndexCode, index_code
from shrinkpoint.comm.compressors.layout import (
    DTYPE_BY_NAME,
    fill_tensor,
    flat_float32,
    is_known_finite,
    native_threads,
    view_dtype,
)
from shrinkpoint.errors import MismatchError, PolicyError, StateError
from shrinkpoint.tensors.dtypes import tensor_bytes

ValueFormat: TypeAlias = Literal["fp32", "fp16", "bf16"] | Compressor
"""Format of selected values. "fp32" is lossless, in 16 bits for tensors of 16 bits; "fp16" makes values beyond its
range infinite. A compressor is given all of them as one 1-d tensor."""

MAX_COLUMNS = (1 << 32) - 1  # The number of values that native code can select from at once
_MAGNITUDE_MASK = 0x7FFFFFFF
_UINT32_MAX = (1 << 32) - 1
SAME_INDICES_ADVICE = "put TopK or RandomK on the forward direction of the same boundary, or choose another compressor"
_HASH_STEP = 0x9E3779B1
_HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))


@lru_cache(maxsize=4096)
def num_kept(n: int, share: float) -> int:
    """The number of values sent, `n - floor(n (1 - share))`, with the share as the decimal number it is written as."""
    return math.ceil(n * Fraction(repr(float(share))))


class _SparseCompressor(Compressor):
    """A few values of a tensor, in the order of their flat indices."""

    values: ValueFormat

    def _check_values(self) -> None:
        if not isinstance(self.values, Compressor) and self.values not in ("fp32", "fp16", "bf16"):
            where, expected = f"{type(self).__name__}, values", "fp32, fp16, bf16 or a compressor"
            raise validate.argument_error(where, self.values, expected, "pass one of them")

    @property
    def _values_spec(self) -> str:
        return "" if self.values == "fp32" else f":{self.values}"

    def _values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the values of a tensor of this dtype, before a compressor encodes them."""
        if isinstance(self.values, Compressor):
            return torch.float32
        return dtype if self.values == "fp32" and dtype.itemsize == 2 else DTYPE_BY_NAME[self.values]

    def _values_bytes(self, k: int, dtype: torch.dtype, context: CompressorContext) -> int:
        kind = self._values_dtype(dtype)
        return k * kind.itemsize if isinstance(self.values, str) else self.values.wire_bytes((k,), kind, context)

    def _encode_values(self, entries: Tensor, dtype: torch.dtype, context: CompressorContext) -> Tensor:
        """Encode values, float32 and contiguous, of a tensor of this dtype."""
        if isinstance(self.values, Compressor):
            return self.values.encode(entries, context)
        return entries.to(self._values_dtype(dtype)).view(torch.uint8)

    def _decode_values(self, data: Tensor, k: int, dtype: torch.dtype, context: CompressorContext) -> Tensor:
        """Decode k values of a tensor of this dtype: 1-d, of the dtype `_values_dtype(dtype)`."""
        entries = torch.empty(k, dtype=self._values_dtype(dtype), device=data.device)
        if isinstance(self.values, Compressor):
            return self.values.decode(data, entries, context)
        entries.view(torch.uint8).copy_(data)
        return entries

    def proves_finite(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT
    ) -> bool:
        size = self.wire_bytes(shape, dtype, context)
        k = self._num_values(shape, context)
        kind = self._values_dtype(dtype)
        if isinstance(self.values, Compressor):
            part = wire[size - self.values.wire_bytes((k,), kind, context) :]
            return self.values.proves_finite(part, (k,), kind, context)
        return k > 0 and is_known_finite(view_dtype(wire[size - k * kind.itemsize :], kind))

    @abstractmethod
    def _num_values(self, shape: Sequence[int], context: CompressorContext) -> int:
        """The number of values that are sent of a tensor of this shape."""


def _check_share(where: str, share: float) -> None:
    validate.check_float(f"{where}, share", share, maximum=1.0, do="pass 0.1 for a tenth")


def _format_percent(share: float) -> str:
    """The share in percent, as a spec has it: exactly."""
    return f"{(Decimal(repr(float(share))) * 100).normalize():f}"


def gather_values(flat: Tensor, indices: Tensor) -> Tensor:
    """Select values (float32, 1-d) at distinct indices; the first becomes nan if one that is not finite is left out."""
    if flat.device.type != "cpu":
        return _gather_values_torch(flat, indices)
    entries = torch.empty(indices.numel(), dtype=torch.float32, device="cpu")
    if _native.sparse_gather(tensor_bytes(flat), tensor_bytes(indices), tensor_bytes(entries)) and entries.numel():
        entries[0] = torch.nan
    return entries


def _gather_values_torch(flat: Tensor, indices: Tensor) -> Tensor:
    entries = flat.index_select(0, indices)
    if entries.numel():
        lost = (~flat.isfinite()).sum() > (~entries.isfinite()).sum()
        entries[0] = torch.where(lost, torch.nan, entries[0])
    return entries


def cast_finite(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert selected values to another dtype; finite ones stay finite."""
    if entries.dtype == dtype:
        return entries
    return fill_tensor(torch.empty(entries.shape, dtype=dtype, device=entries.device), entries.to(torch.float32))


def scatter_values(entries: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with zeros, and with the values at their flat indices, which must be valid."""
    target = out.detach()
    contiguous = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    flat = contiguous.view(-1)
    flat.zero_().index_copy_(0, indices, cast_finite(entries, out.dtype))
    if contiguous is not target:
        target.copy_(contiguous)
    return out


@dataclass(frozen=True)
class TopK(_SparseCompressor):
    """Sends the `n - floor(n (1 - share))` values of largest magnitude, as the code of arXiv 2401.07788 counts them.

    That code selects them in each sample (the first axis) and drops values equal to the smallest selected magnitude;
    here exactly that number is sent, of equal values the first ones. nan and infinities count as largest. A sample with
    more of them than values are sent sends nan alone, and one that sent nan alone decodes to nan everywhere. A message
    is the flat indices (an `IndexCode`), then the values in the same order.

    In chunks (arXiv 2508.15706: 4096) no part of a tensor starves another: layers whose values are small are heard too.
    An index costs no more for it: 7.9 bits at 64 of 4096, where one of 12 bits within its chunk is usual.

    Attributes:
        share: above 0, at most 1; at least one value is sent.
        values: how they are sent; "fp16" makes values of 65520 or more infinite.
        per: "sample" to select in each sample; a tensor of fewer than two axes is one sample. "tensor": in all. An
            integer: in each chunk of that number of values, in row-major order; the last one may be shorter.
    """

    share: float
    values: ValueFormat = "fp32"
    per: Literal["sample", "tensor"] | int = "sample"

    def __post_init__(self) -> None:
        _check_share("TopK", self.share)
        self._check_values()
        if self.per not in ("sample", "tensor"):
            expected = f"sample, tensor or the size of a chunk, 1 to {MAX_COLUMNS}"
            if not isinstance(self.per, int) or isinstance(self.per, bool) or not 1 <= self.per <= MAX_COLUMNS:
                raise PolicyError("TopK", found=f"per={self.per!r}", expected=expected, do="pass one of them")

    @property
    def spec(self) -> str:
        per = "" if self.per == "sample" else f":{self.per}"
        return f"top{_format_percent(self.share)}{per}{self._values_spec}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        code = self._index_code(shape)
        return code.size + self._values_bytes(code.k, dtype, context)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code, flat, columns = self._index_code(tensor.shape), flat_float32(tensor), self._row_numel(tensor.shape)
        if not code.k or flat.device.type != "cpu" or columns > MAX_COLUMNS:
            return self._encode_torch(tensor, context)
        wire = torch.empty(self.wire_bytes(tensor.shape, tensor.dtype, context), dtype=torch.uint8, device="cpu")
        head, tail = wire[: code.size], wire[code.size :]
        is_raw = self._values_dtype(tensor.dtype) == torch.float32 and not isinstance(self.values, Compressor)
        entries = tail if is_raw else torch.empty(code.k, dtype=torch.float32, device="cpu")
        data, codes, chosen = tensor_bytes(flat), tensor_bytes(head), tensor_bytes(entries)
        rows, threads = (columns, num_kept(columns, self.share)), native_threads(code.n)
        if not _native.sparse_encode(code.form, code.width, data, *rows, codes, chosen, threads=threads):
            do = "wait until the tensor is complete, and do not write to it meanwhile"
            raise StateError(f"compressor {self.spec}", found="a tensor that changed while it was encoded", do=do)
        found = view_dtype(entries, torch.float32)
        marked = mark_lost_rows(found, flat, *rows)
        if not is_raw or marked is not found:
            tail.copy_(self._encode_values(marked, tensor.dtype, context))
        return wire

    def _encode_torch(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code, flat = self._index_code(tensor.shape), flat_float32(tensor)
        if not code.k:
            return flat.new_empty(0, dtype=torch.uint8)
        columns, magnitudes = self._row_numel(tensor.shape), flat.view(torch.int32) & _MAGNITUDE_MASK
        whole = magnitudes.numel() - magnitudes.numel() % columns
        parts = [(part, start) for part, start in ((magnitudes[:whole], 0), (magnitudes[whole:], whole)) if len(part)]
        rows = [(part.view(-1, min(columns, len(part))), start) for part, start in parts]
        indices = torch.cat([topk_indices(row, num_kept(row.shape[1], self.share)) + start for row, start in rows])
        entries = mark_lost_rows(flat[indices], flat, columns, num_kept(columns, self.share))
        return torch.cat([code.encode_torch(indices), self._encode_values(entries, tensor.dtype, context)])

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire, code = self.check_message(wire, out, context), self._index_code(out.shape)
        if not code.k or out.device.type != "cpu":
            return self._decode_torch(wire, out, context)
        entries = self._decode_values(wire[code.size :], code.k, out.dtype, context)
        data, values = tensor_bytes(wire[: code.size]), tensor_bytes(cast_finite(entries, out.dtype))
        target = out.detach()
        contiguous = target if target.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device="cpu")
        filled = tensor_bytes(contiguous)
        if not _native.sparse_decode(code.form, code.width, data, values, filled, out.dtype.itemsize):
            raise code.mismatch_error()
        self._fill_lost_rows_(contiguous, entries)
        if contiguous is not target:
            target.copy_(contiguous)
        return out

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code = self._index_code(out.shape)
        entries = self._decode_values(wire[code.size :], code.k, out.dtype, context)
        scatter_values(entries, code.decode_torch(wire[: code.size]), out)
        return self._fill_lost_rows_(out, entries) if code.k else out

    def _fill_lost_rows_(self, out: Tensor, entries: Tensor) -> Tensor:
        """Fill the rows of which only nan was sent with nan, in place, and return `out`."""
        if is_known_finite(entries):
            return out
        columns, lost = self._row_numel(out.shape), torch.empty(out.numel(), dtype=torch.bool, device=out.device)
        k, count = num_kept(columns, self.share), out.numel() // columns
        for values, row in zip(_split_rows(entries, k, count), _split_rows(lost, columns, count), strict=True):
            row.copy_(values.isnan().all(1, keepdim=True).expand_as(row))
        out.detach().masked_fill_(lost.view(out.shape), torch.nan)
        return out

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        code = self._index_code(shape)
        return code.decode(wire[: code.size])

    def _num_values(self, shape: Sequence[int], context: CompressorContext) -> int:
        return self._index_code(shape).k

    def _row_numel(self, shape: Sequence[int]) -> int:
        """The number of values that are looked at together; 0 in a tensor without values."""
        count = math.prod(shape)
        if isinstance(self.per, int):
            return min(self.per, count)
        return count // shape[0] if self.per == "sample" and len(shape) >= 2 and count else count

    def _index_code(self, shape: Sequence[int]) -> IndexCode:
        count = math.prod(shape)
        if not count:
            return index_code(0, 0)
        rows, rest = divmod(count, self._row_numel(shape))
        return index_code(count, rows * num_kept(self._row_numel(shape), self.share) + num_kept(rest, self.share))


def _split_rows(values: Tensor, columns: int, count: int) -> list[Tensor]:
    """Values as `count` rows of `columns` values, and what is left as one shorter row if there is any."""
    whole, rest = values[: count * columns], values[count * columns :]
    return [whole.view(count, columns), *([rest.view(1, -1)] if rest.numel() else [])]


def mark_lost_rows(entries: Tensor, flat: Tensor, columns: int, k: int) -> Tensor:
    """Make all selected values of a row nan if not all of its values that are not finite were selected.

    Args:
        entries: the largest values of each row: float32, 1-d; returned as they are if nothing is marked for sure.
        flat: the values of all rows: float32, 1-d.
        columns: the number of values of a row; the last one may be shorter.
        k: the number of values that are selected from a row of that size.
    """
    if is_known_finite(entries):
        return entries
    count = flat.numel() // columns
    marked = []
    for values, row in zip(_split_rows(entries, k, count), _split_rows(flat, columns, count), strict=True):
        num_nonfinite = row.isfinite().logical_not_().sum(1, keepdim=True)
        marked.append(torch.where(num_nonfinite > values.shape[1], torch.nan, values).view(-1))
    return torch.cat(marked)


def topk_indices(numbers: Tensor, k: int) -> Tensor:
    """Flat indices of the k largest integers in each row, of equal ones the first: int64, 1-d, ascending."""
    smallest = numbers.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = numbers > smallest, numbers == smallest
    num_equal = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= num_equal))).flatten().nonzero().flatten()


class _KnownIndices(_SparseCompressor):
    """Sends the values at indices that both ends know."""

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return self._values_bytes(self._num_values(shape, context), dtype, context)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        entries = gather_values(flat_float32(tensor), self._indices(tensor.shape, tensor.device, context))
        return self._encode_values(entries, tensor.dtype, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        indices = self._indices(out.shape, out.device, context)
        entries = self._decode_values(wire, indices.numel(), out.dtype, context)
        return scatter_values(self._scale(entries, out.numel()), indices, out)

    @abstractmethod
    def _indices(self, shape: Sequence[int], device: torch.device, context: CompressorContext) -> Tensor:
        """The flat indices in a tensor of this shape: int64, 1-d, ascending."""

    def _scale(self, entries: Tensor, numel: int) -> Tensor:
        return entries


@dataclass(frozen=True)
class RandomK(_KnownIndices):
    """Sends the values at `n - floor(n (1 - share))` random indices of the tensor, each set of them equally likely.

    The indices are those with the smallest hashes of (seed, key of the message, flat index), so both ends know them and
    a message is the values alone. A value that is not finite and was not selected makes the first value sent nan.

    Attributes:
        share: above 0, at most 1; at least one value is sent.
        values: how they are sent.
        scaled: True if the receiver multiplies them by n / k, so that the mean of many messages is the tensor.
        seed: below 2^32.
    """

    share: float
    values: ValueFormat = "fp32"
    scaled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share("RandomK", self.share)
        self._check_values()
        validate.check_int("RandomK, seed", self.seed, minimum=0, maximum=_UINT32_MAX, do="pass 0")
        validate.check_bool("RandomK, scaled", self.scaled)

    @property
    def spec(self) -> str:
        scaled, seed = ":scaled" if self.scaled else "", f":seed{self.seed}" if self.seed else ""
        return f"rand{_format_percent(self.share)}{scaled}{seed}{self._values_spec}"

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        return self._indices(shape, wire.device, context)

    def _num_values(self, shape: Sequence[int], context: CompressorContext) -> int:
        return num_kept(math.prod(shape), self.share)

    def _indices(self, shape: Sequence[int], device: torch.device, context: CompressorContext) -> Tensor:
        seed = _hash(_hash(context.key & _UINT32_MAX) ^ self.seed)
        return random_indices(math.prod(shape), self._num_values(shape, context), seed, device)

    def _scale(self, entries: Tensor, numel: int) -> Tensor:
        if not self.scaled or not entries.numel():
            return entries
        return entries.to(torch.float32) * torch.tensor(numel / entries.numel(), dtype=torch.float32, device="cpu")


def random_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    """The k of n indices with the smallest hashes: int64, 1-d, ascending."""
    if k == n:
        return torch.arange(n, device=device)
    if device.type != "cpu" or n > MAX_COLUMNS:
        return _random_indices_torch(n, k, seed, device)
    indices = torch.empty(k, dtype=torch.int64, device="cpu")
    _native.sparse_random(n, seed, tensor_bytes(indices))
    return indices


def _random_indices_torch(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    hashes = torch.arange(n, dtype=torch.int64, device=device).mul_(_HASH_STEP).add_(seed).bitwise_and_(_UINT32_MAX)
    for shift, factor in _HASH_ROUNDS:
        hashes = hashes.bitwise_xor(hashes >> shift).mul_(factor).bitwise_and_(_UINT32_MAX)
    hashes = hashes.bitwise_xor(hashes >> 16) >> 1
    return topk_indices(((_UINT32_MAX >> 1) - hashes).to(torch.int32).view(1, -1), k)


def _hash(value: int) -> int:
    value = (value * _HASH_STEP + 1) & _UINT32_MAX
    for shift, factor in _HASH_ROUNDS:
        value = ((value ^ value >> shift) * factor) & _UINT32_MAX
    return value ^ value >> 16


@dataclass(frozen=True)
class SameIndices(_KnownIndices):
    """Sends the gradient at the indices of the activations that were sent, and zeros elsewhere; no indices are sent.

    The result is the gradient of the masked function (arXiv 2401.07788, GPT-2: independent indices may diverge). The
    indices are `CompressorContext.indices`. A value that is not finite at another index makes the first value sent nan.

    Attributes:
        values: how they are sent.
    """

    values: ValueFormat = "fp32"

    def __post_init__(self) -> None:
        self._check_values()

    @property
    def spec(self) -> str:
        return f"same{self._values_spec}"

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        return _context_indices(context)

    def _num_values(self, shape: Sequence[int], context: CompressorContext) -> int:
        return _context_indices(context).numel()

    def _indices(self, shape: Sequence[int], device: torch.device, context: CompressorContext) -> Tensor:
        """The indices of the context; a MismatchError if they are not in a tensor of this shape."""
        indices, count = _context_indices(context), math.prod(shape)
        if indices.numel() and not 0 <= int(indices[0]) <= int(indices[-1]) < count:
            problem, expected = f"positions up to {int(indices[-1])}", f"positions below {count}, for {tuple(shape)}"
            advice = "send tensors of one shape in both directions of a boundary"
            raise MismatchError(f"compressor {self.spec}", found=problem, expected=expected, do=advice)
        return indices.to(device)


def _context_indices(context: CompressorContext) -> Tensor:
    if context.indices is None:
        expected = "the indices of a forward message"
        raise PolicyError("compressor same", found="no indices", expected=expected, do=SAME_INDICES_ADVICE)
    return context.indices
