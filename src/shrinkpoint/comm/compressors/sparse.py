"""Sparse compressors (TopK, RandomK, SameIndices): a few values are sent, the rest decode to zero."""

from __future__ import annotations

import math
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
from shrinkpoint.comm.compressors.layout import fill_tensor, flat_float32, native_threads
from shrinkpoint.errors import MismatchError, PolicyError, StateError
from shrinkpoint.tensors.dtypes import tensor_bytes

ValueFormat: TypeAlias = Literal["fp32", "fp16", "bf16"] | Compressor
"""How selected values are sent. "fp32" is lossless, in 16 bits for tensors of 16 bits; "fp16" makes values beyond its
range infinite. A compressor is given all of them as one 1-d tensor."""

_VALUE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_HUNDRED = 100
MAX_COLUMNS = (1 << 32) - 1
"""The number of values that native code can select from at once."""
_MAGNITUDE_MASK = 0x7FFFFFFF
_UINT32_MAX = (1 << 32) - 1
_HASH_STEP = 0x9E3779B1
_HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))


def check_sparse_args(where: str, share: float | None, values: ValueFormat) -> None:
    """Check the settings of a sparse compressor.

    Raises:
        PolicyError: the share is not above 0 and at most 1, or the values are no `ValueFormat`.
    """
    if share is not None:
        validate.check_float(f"{where}, share", share, maximum=1.0, do="give .1 for a tenth")
    if not isinstance(values, Compressor) and (not isinstance(values, str) or values not in _VALUE_DTYPES):
        expected = "fp32, fp16, bf16 or a compressor"
        raise validate.argument_error(f"{where}, values", values, expected, "choose one of them")


def format_percent(share: float) -> str:
    """The share in percent, as a spec has it: exactly."""
    return f"{(Decimal(repr(float(share))) * _HUNDRED).normalize():f}"


@lru_cache(maxsize=4096)
def num_kept(n: int, share: float) -> int:
    """The number of values sent, `n - floor(n (1 - share))`, with the share as the decimal number it is written as."""
    return math.ceil(n * Fraction(repr(float(share))))


def values_spec(values: ValueFormat) -> str:
    """The suffix of a spec for a value format; empty for "fp32"."""
    return "" if values == "fp32" else f":{values}"


def wire_dtype(values: ValueFormat, dtype: torch.dtype) -> torch.dtype:
    """The dtype of selected values of a tensor of this dtype, before a compressor encodes them."""
    if isinstance(values, Compressor):
        return torch.float32
    return dtype if values == "fp32" and dtype in _HALF_DTYPES else _VALUE_DTYPES[values]


def values_bytes(values: ValueFormat, k: int, dtype: torch.dtype, context: CompressorContext) -> int:
    """The size in bytes of k selected values of a tensor of this dtype."""
    kind = wire_dtype(values, dtype)
    return values.wire_bytes((k,), kind, context) if isinstance(values, Compressor) else k * kind.itemsize


def encode_values(values: ValueFormat, entries: Tensor, dtype: torch.dtype, context: CompressorContext) -> Tensor:
    """Encode selected values, float32 and contiguous, of a tensor of this dtype."""
    if isinstance(values, Compressor):
        return values.encode(entries, context)
    return entries.to(wire_dtype(values, dtype)).view(torch.uint8)


def decode_values(values: ValueFormat, data: Tensor, k: int, dtype: torch.dtype, context: CompressorContext) -> Tensor:
    """Decode what `encode_values` returned: 1-d, of the dtype `wire_dtype(values, dtype)`."""
    entries = torch.empty(k, dtype=wire_dtype(values, dtype), device=data.device)
    if isinstance(values, Compressor):
        return values.decode(data, entries, context)
    entries.view(torch.uint8).copy_(data)
    return entries


def gather_values(flat: Tensor, indices: Tensor) -> Tensor:
    """Select the values at the indices; the first becomes nan if a value that is not finite is not selected.

    Args:
        flat: float32, 1-d, contiguous.
        indices: int64, 1-d, valid and distinct.
    """
    if flat.device.type != "cpu":
        return _gather_values_torch(flat, indices)
    entries = torch.empty(indices.numel(), dtype=torch.float32)
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


def check_indices(where: str, indices: Tensor, shape: Sequence[int]) -> None:
    """Check that ascending flat indices are within a tensor of this shape.

    Raises:
        MismatchError: the first or the last is not.
    """
    count = math.prod(shape)
    if indices.numel() and not 0 <= int(indices[0]) <= int(indices[-1]) < count:
        expected = f"positions below {count}, for {tuple(shape)}"
        advice = "give both directions of a boundary tensors of one shape"
        raise MismatchError(where, found=f"positions up to {int(indices[-1])}", expected=expected, do=advice)


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the `n - floor(n (1 - share))` values of largest magnitude, as the code of arXiv 2401.07788 counts them.

    That code selects them in each sample (the first axis) and drops values equal to the smallest selected magnitude;
    here exactly that number is sent, of equal values the first ones. nan and infinities count as largest. A message is
    the flat indices (an `IndexCode`), then the values in the same order.

    Attributes:
        share: above 0, at most 1; at least one value is sent.
        values: how they are sent; "fp16" makes values of 65520 or more infinite.
        per: "sample" to select in each sample; a tensor of fewer than two axes is one sample. "tensor": in all.
    """

    share: float
    values: ValueFormat = "fp32"
    per: Literal["sample", "tensor"] = "sample"

    def __post_init__(self) -> None:
        check_sparse_args("TopK", self.share, self.values)
        if self.per not in ("sample", "tensor"):
            raise PolicyError("TopK", found=f"per {self.per!r}", expected="sample or tensor", do="choose one of them")

    @property
    def spec(self) -> str:
        per = ":tensor" if self.per == "tensor" else ""
        return f"top{format_percent(self.share)}{per}{values_spec(self.values)}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        code = self._index_code(shape)
        return code.size + values_bytes(self.values, code.k, dtype, context)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code, flat, rows = self._index_code(tensor.shape), flat_float32(tensor), self._num_rows(tensor.shape)
        if not code.k or flat.device.type != "cpu" or code.n // rows > MAX_COLUMNS:
            return self._encode_torch(tensor, context)
        wire = torch.empty(self.wire_bytes(tensor.shape, tensor.dtype, context), dtype=torch.uint8)
        head, tail = wire[: code.size], wire[code.size :]
        is_raw = wire_dtype(self.values, tensor.dtype) == torch.float32 and not isinstance(self.values, Compressor)
        entries = tail if is_raw else torch.empty(code.k, dtype=torch.float32)
        threads = native_threads(code.n)
        index_bytes, entry_bytes = tensor_bytes(head), tensor_bytes(entries)
        if not _native.sparse_encode(
            code.form, code.width, tensor_bytes(flat), rows, index_bytes, entry_bytes, threads=threads
        ):
            raise StateError(f"compressor {self.spec}", found="a tensor that changed while it was encoded")
        if not is_raw:
            tail.copy_(encode_values(self.values, entries, tensor.dtype, context))
        return wire

    def _encode_torch(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code, flat, rows = self._index_code(tensor.shape), flat_float32(tensor), self._num_rows(tensor.shape)
        if not code.k:
            return flat.new_empty(0, dtype=torch.uint8)
        indices = topk_indices((flat.view(torch.int32) & _MAGNITUDE_MASK).view(rows, -1), code.k // rows)
        values = encode_values(self.values, flat[indices], tensor.dtype, context)
        return torch.cat([code.encode_torch(indices), values])

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire, code = self.check_message(wire, out, context), self._index_code(out.shape)
        if not code.k or out.device.type != "cpu":
            return self._decode_torch(wire, out, context)
        entries = cast_finite(self._decode_values(wire, out, context), out.dtype)
        target = out.detach()
        contiguous = target if target.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        index_bytes, values, item = tensor_bytes(wire[: code.size]), tensor_bytes(entries), out.dtype.itemsize
        if not _native.sparse_decode(code.form, code.width, index_bytes, values, tensor_bytes(contiguous), item):
            raise code.mismatch_error()
        if contiguous is not target:
            target.copy_(contiguous)
        return out

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code = self._index_code(out.shape)
        return scatter_values(self._decode_values(wire, out, context), code.decode_torch(wire[: code.size]), out)

    def _decode_values(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        code = self._index_code(out.shape)
        return decode_values(self.values, wire[code.size :], code.k, out.dtype, context)

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        code = self._index_code(shape)
        return code.decode(wire[: code.size])

    def _num_rows(self, shape: Sequence[int]) -> int:
        return shape[0] if self.per == "sample" and len(shape) >= 2 else 1

    def _index_code(self, shape: Sequence[int]) -> IndexCode:
        count, rows = math.prod(shape), self._num_rows(shape)
        return index_code(count, rows * num_kept(count // rows, self.share) if count else 0)


def topk_indices(numbers: Tensor, k: int) -> Tensor:
    """Flat indices of the k largest integers in each row, of equal ones the first: int64, 1-d, ascending."""
    smallest = numbers.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = numbers > smallest, numbers == smallest
    num_equal = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= num_equal))).flatten().nonzero().flatten()


@dataclass(frozen=True)
class RandomK(Compressor):
    """Sends the values at `n - floor(n (1 - share))` random indices of the tensor, each set of them equally likely.

    The indices are those with the smallest hashes of (seed, key of the message, flat index), so both ends know them and
    a message is the values alone. A value that is not finite and was not selected makes the first value sent nan.

    Attributes:
        share: above 0, at most 1; at least one value is sent.
        values: how they are sent.
        scaled: whether the receiver multiplies them by n / k, so that the mean of many messages is the tensor.
        seed: below 2^32.
    """

    share: float
    values: ValueFormat = "fp32"
    scaled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_sparse_args("RandomK", self.share, self.values)
        validate.check_int("RandomK, seed", self.seed, minimum=0, maximum=_UINT32_MAX, do="take 0")
        validate.check_bool("RandomK, scaled", self.scaled)

    @property
    def spec(self) -> str:
        scaled, seed = ":scaled" if self.scaled else "", f":seed{self.seed}" if self.seed else ""
        return f"rand{format_percent(self.share)}{scaled}{seed}{values_spec(self.values)}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return values_bytes(self.values, num_kept(math.prod(shape), self.share), dtype, context)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        entries = gather_values(flat_float32(tensor), self._random_indices(tensor.shape, tensor.device, context))
        return encode_values(self.values, entries, tensor.dtype, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        indices = self._random_indices(out.shape, out.device, context)
        entries = decode_values(self.values, wire, indices.numel(), out.dtype, context)
        if self.scaled and indices.numel():
            entries = entries.to(torch.float32) * torch.tensor(out.numel() / indices.numel(), dtype=torch.float32)
        return scatter_values(entries, indices, out)

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        return self._random_indices(shape, wire.device, context)

    def _random_indices(self, shape: Sequence[int], device: torch.device, context: CompressorContext) -> Tensor:
        count = math.prod(shape)
        return random_indices(count, num_kept(count, self.share), mix_seed(context.key, self.seed), device)


def mix_seed(key: int, seed: int) -> int:
    """Hash a key and a seed into one number below 2^32."""
    return _hash(_hash(key & _UINT32_MAX) ^ seed)


def random_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    """The k of n indices with the smallest hashes: int64, 1-d, ascending."""
    if k == n:
        return torch.arange(n, device=device)
    if device.type != "cpu" or n > MAX_COLUMNS:
        return _random_indices_torch(n, k, seed, device)
    indices = torch.empty(k, dtype=torch.int64)
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
class SameIndices(Compressor):
    """Sends the gradient at the indices of the activations that were sent, and zeros elsewhere; no indices are sent.

    The result is the gradient of the masked function (arXiv 2401.07788, GPT-2: independent indices may diverge). The
    indices are `CompressorContext.indices`. A value that is not finite at another index makes the first value sent nan.

    Attributes:
        values: how they are sent.
    """

    values: ValueFormat = "fp32"

    def __post_init__(self) -> None:
        check_sparse_args("SameIndices", None, self.values)

    @property
    def spec(self) -> str:
        return f"same{values_spec(self.values)}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return values_bytes(self.values, _context_indices(context).numel(), dtype, context)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        indices = self._valid_indices(tensor.shape, tensor.device, context)
        return encode_values(self.values, gather_values(flat_float32(tensor), indices), tensor.dtype, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        indices = self._valid_indices(out.shape, out.device, context)
        entries = decode_values(self.values, wire, indices.numel(), out.dtype, context)
        return scatter_values(entries, indices, out)

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        return _context_indices(context)

    def _valid_indices(self, shape: Sequence[int], device: torch.device, context: CompressorContext) -> Tensor:
        indices = _context_indices(context)
        check_indices(f"compressor {self.spec}", indices, shape)
        return indices.to(device)


def _context_indices(context: CompressorContext) -> Tensor:
    if context.indices is None:
        expected = "the indices of a forward message"
        advice = "put TopK or RandomK on the forward direction of the same boundary, or choose another compressor"
        raise PolicyError("compressor same", found="no indices", expected=expected, do=advice)
    return context.indices
