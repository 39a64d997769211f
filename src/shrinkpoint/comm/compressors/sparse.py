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
"""What chosen values are sent as. "fp32": as they are, in 16 bits where the tensor has no more; fp16 makes inf of what
is beyond it. An operator is given all of them as one 1-d tensor."""

_VALUE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_HUNDRED = 100


def check_sparse_args(where: str, share: float | None, values: ValueFormat) -> None:
    """Refuse settings that mean nothing.

    Raises:
        PolicyError: the share is not above 0 and at most 1, or the values are no kind of values.
    """
    if share is not None:
        validate.check_float(f"{where}, share", share, maximum=1.0, do="give .1 for a tenth")
    if not isinstance(values, Compressor) and (not isinstance(values, str) or values not in _VALUE_DTYPES):
        expected = "fp32, fp16, bf16 or an operator"
        raise validate.argument_error(f"{where}, values", values, expected, "choose one of them")


def format_percent(share: float) -> str:
    """A share as it stands in a spec: exactly."""
    return f"{(Decimal(repr(float(share))) * _HUNDRED).normalize():f}"


@lru_cache(maxsize=4096)
def num_kept(n: int, share: float) -> int:
    """`n - floor(n (1 - share))`, the share being the decimal number it is written as."""
    return math.ceil(n * Fraction(repr(float(share))))


def values_spec(values: ValueFormat) -> str:
    """What a spec says of values: nothing of those that are sent as they are."""
    return "" if values == "fp32" else f":{values}"


def wire_dtype(values: ValueFormat, dtype: torch.dtype) -> torch.dtype:
    """The type of chosen values of a tensor of this dtype, before an operator sees them."""
    if isinstance(values, Compressor):
        return torch.float32
    return dtype if values == "fp32" and dtype in _HALF_DTYPES else _VALUE_DTYPES[values]


def values_bytes(values: ValueFormat, k: int, dtype: torch.dtype, context: CompressorContext) -> int:
    """The size of k chosen values of a tensor of this dtype."""
    kind = wire_dtype(values, dtype)
    return values.wire_bytes((k,), kind, context) if isinstance(values, Compressor) else k * kind.itemsize


def encode_values(values: ValueFormat, entries: Tensor, dtype: torch.dtype, context: CompressorContext) -> Tensor:
    """The bytes of chosen values, float32 and contiguous, of a tensor of this dtype."""
    if isinstance(values, Compressor):
        return values.encode(entries, context)
    return entries.to(wire_dtype(values, dtype)).view(torch.uint8)


def decode_values(values: ValueFormat, data: Tensor, k: int, dtype: torch.dtype, context: CompressorContext) -> Tensor:
    """What `encode_values` was given, as far as it was sent: 1-d, of the type `wire_dtype` says."""
    made = torch.empty(k, dtype=wire_dtype(values, dtype), device=data.device)
    if isinstance(values, Compressor):
        return values.decode(data, made, context)
    made.view(torch.uint8).copy_(data)
    return made


def gather_values(flat: Tensor, indices: Tensor) -> Tensor:
    """The values at the places; the first is nan where one that is not finite is at none of them.

    Args:
        flat: float32, 1-d, contiguous.
        indices: int64, valid, each once.
    """
    if flat.device.type != "cpu":
        return _gather_values_torch(flat, indices)
    chosen = torch.empty(indices.numel(), dtype=torch.float32)
    if _native.sparse_gather(tensor_bytes(flat), tensor_bytes(indices), tensor_bytes(chosen)) and chosen.numel():
        chosen[0] = torch.nan
    return chosen


def _gather_values_torch(flat: Tensor, indices: Tensor) -> Tensor:
    chosen = flat.index_select(0, indices)
    if chosen.numel():
        lost = (~flat.isfinite()).sum() > (~chosen.isfinite()).sum()
        chosen[0] = torch.where(lost, torch.nan, chosen[0])
    return chosen


def cast_finite(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Chosen values as another dtype; those that are finite stay so."""
    if entries.dtype == dtype:
        return entries
    return fill_tensor(torch.empty(entries.shape, dtype=dtype, device=entries.device), entries.to(torch.float32))


def scatter_values(entries: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Fill `out`: zeros, and the values at their flat places, which must be valid."""
    into = out.detach()
    flat = (into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)).view(-1)
    flat.zero_().index_copy_(0, indices, cast_finite(entries, out.dtype))
    if not into.is_contiguous():
        into.copy_(flat.view(into.shape))
    return out


def check_indices(where: str, indices: Tensor, shape: Sequence[int]) -> None:
    """Refuse places that a tensor of this shape has not.

    Raises:
        MismatchError: the first or the last is outside.
    """
    count = math.prod(shape)
    if indices.numel() and not 0 <= int(indices[0]) <= int(indices[-1]) < count:
        expected = f"positions below {count}, for {tuple(shape)}"
        do = "give both directions of a boundary tensors of one shape"
        raise MismatchError(where, found=f"positions up to {int(indices[-1])}", expected=expected, do=do)


MAX_COLUMNS = (1 << 32) - 1
"""As many values native code chooses from at once."""
_MAGNITUDE_MASK = 0x7FFFFFFF


@dataclass(frozen=True)
class TopK(Compressor):
    """The `n - floor(n (1 - share))` values of largest magnitude, as arXiv 2401.07788's code counts them.

    That code takes them from each sample (the first axis) apart and drops values equal to the smallest magnitude kept;
    here exactly as many are sent, of equals those that come first. nan and infinities count as largest. A message is
    the flat positions (see `IndexCode`), then the values in their order.

    Attributes:
        share: above 0, at most 1; at least one value is sent.
        values: what they are sent as; "fp16" makes infinite what is 65520 or more.
        per: "sample": the largest of each; a tensor of fewer than two axes is one sample. "tensor": of all.
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

    def encode(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code, flat, rows = self._index_code(x.shape), flat_float32(x), self._num_rows(x.shape)
        if not code.k or flat.device.type != "cpu" or code.n // rows > MAX_COLUMNS:
            return self._encode_torch(x, context)
        wire = torch.empty(self.wire_bytes(x.shape, x.dtype, context), dtype=torch.uint8)
        head, tail = wire[: code.size], wire[code.size :]
        raw = wire_dtype(self.values, x.dtype) == torch.float32 and not isinstance(self.values, Compressor)
        chosen = tail if raw else torch.empty(code.k, dtype=torch.float32)
        many = native_threads(code.n)
        places, taken = tensor_bytes(head), tensor_bytes(chosen)
        if not _native.sparse_encode(code.form, code.width, tensor_bytes(flat), rows, places, taken, threads=many):
            raise StateError(f"operator {self.spec}", found="a tensor that changed while it was encoded")
        if not raw:
            tail.copy_(encode_values(self.values, chosen, x.dtype, context))
        return wire

    def _encode_torch(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        code, flat, rows = self._index_code(x.shape), flat_float32(x), self._num_rows(x.shape)
        if not code.k:
            return flat.new_empty(0, dtype=torch.uint8)
        places = topk_indices((flat.view(torch.int32) & _MAGNITUDE_MASK).view(rows, -1), code.k // rows)
        chosen = encode_values(self.values, flat[places], x.dtype, context)
        return torch.cat([code.encode_torch(places), chosen])

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire, code = self.check_message(wire, out, context), self._index_code(out.shape)
        if not code.k or out.device.type != "cpu":
            return self._decode_torch(wire, out, context)
        chosen = cast_finite(self._decode_values(wire, out, context), out.dtype)
        target = out.detach()
        into = target if target.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        places, values, item = tensor_bytes(wire[: code.size]), tensor_bytes(chosen), out.dtype.itemsize
        if not _native.sparse_decode(code.form, code.width, places, values, tensor_bytes(into), item):
            raise code.mismatch_error()
        if into is not target:
            target.copy_(into)
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
    """Flat places of the k largest in each row of a matrix of integers, of equals the first; int64, ascending."""
    least = numbers.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = numbers > least, numbers == least
    wanted = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= wanted))).flatten().nonzero().flatten()


_UINT32_MAX = (1 << 32) - 1
_HASH_STEP = 0x9E3779B1
_HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))


@dataclass(frozen=True)
class RandomK(Compressor):
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

    def encode(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        chosen = gather_values(flat_float32(x), self._random_indices(x.shape, x.device, context))
        return encode_values(self.values, chosen, x.dtype, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        places = self._random_indices(out.shape, out.device, context)
        chosen = decode_values(self.values, wire, places.numel(), out.dtype, context)
        if self.scaled and places.numel():
            chosen = chosen.to(torch.float32) * torch.tensor(out.numel() / places.numel(), dtype=torch.float32)
        return scatter_values(chosen, places, out)

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        return self._random_indices(shape, wire.device, context)

    def _random_indices(self, shape: Sequence[int], device: torch.device, context: CompressorContext) -> Tensor:
        count = math.prod(shape)
        return random_indices(count, num_kept(count, self.share), mix_seed(context.key, self.seed), device)


def mix_seed(key: int, seed: int) -> int:
    """One number below 2^32 of two."""
    return _hash(_hash(key & _UINT32_MAX) ^ seed)


def random_indices(n: int, k: int, start: int, device: torch.device) -> Tensor:
    """The k of n positions whose hashes are least; int64, ascending."""
    if k == n:
        return torch.arange(n, device=device)
    if device.type != "cpu" or n > MAX_COLUMNS:
        return _random_indices_torch(n, k, start, device)
    places = torch.empty(k, dtype=torch.int64)
    _native.sparse_random(n, start, tensor_bytes(places))
    return places


def _random_indices_torch(n: int, k: int, start: int, device: torch.device) -> Tensor:
    x = torch.arange(n, dtype=torch.int64, device=device).mul_(_HASH_STEP).add_(start).bitwise_and_(_UINT32_MAX)
    for shift, factor in _HASH_ROUNDS:
        x = x.bitwise_xor(x >> shift).mul_(factor).bitwise_and_(_UINT32_MAX)
    x = x.bitwise_xor(x >> 16) >> 1
    return topk_indices(((_UINT32_MAX >> 1) - x).to(torch.int32).view(1, -1), k)


def _hash(x: int) -> int:
    x = (x * _HASH_STEP + 1) & _UINT32_MAX
    for shift, factor in _HASH_ROUNDS:
        x = ((x ^ x >> shift) * factor) & _UINT32_MAX
    return x ^ x >> 16


@dataclass(frozen=True)
class SameIndices(Compressor):
    """The gradient at the places of the activations that were sent, and zeros for the rest; no positions are sent.

    What crosses is then the gradient of the masked function (arXiv 2401.07788, GPT-2: independent places may diverge).
    The places are `Context.places`. A value that is not finite at none of them makes the first value sent nan.

    Attributes:
        values: what they are sent as.
    """

    values: ValueFormat = "fp32"

    def __post_init__(self) -> None:
        check_sparse_args("SameIndices", None, self.values)

    @property
    def spec(self) -> str:
        return f"same{values_spec(self.values)}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return values_bytes(self.values, _context_indices(context).numel(), dtype, context)

    def encode(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        places = self._valid_indices(x.shape, x.device, context)
        return encode_values(self.values, gather_values(flat_float32(x), places), x.dtype, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        places = self._valid_indices(out.shape, out.device, context)
        chosen = decode_values(self.values, wire, places.numel(), out.dtype, context)
        return scatter_values(chosen, places, out)

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor:
        return _context_indices(context)

    def _valid_indices(self, shape: Sequence[int], device: torch.device, context: CompressorContext) -> Tensor:
        places = _context_indices(context)
        check_indices(f"operator {self.spec}", places, shape)
        return places.to(device)


def _context_indices(context: CompressorContext) -> Tensor:
    if context.indices is None:
        expected = "the places of a forward message"
        do = "put TopK or RandomK on the forward direction of the same boundary, or choose another operator"
        raise PolicyError("operator same", found="no places", expected=expected, do=do)
    return context.indices
