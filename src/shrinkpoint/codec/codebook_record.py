"""One record of codebook tensors <-> recipe and bytes. Everything here is exact on integers.

Centers and exact values are short arrays inside the record: entropy-coded where that gains, else stored unchanged."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.code_streams import CODERS, BytesLike, decode_codes, encode_forms
from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, NumberFormat, default_threads
from shrinkpoint.codec.recipe import CodebookRecipe, CyclicDelta
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import tensor_bytes, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

_SIDE_SIZE = struct.Struct("<I")  # bytes of the side; the codes are the rest
_LEVEL_MARGIN = 8


def encode_small_array(
    number_format: NumberFormat, values: Bytes, base: Bytes | None
) -> tuple[CoderConfig | None, bytes]:
    """(run, bytes) of an array of floats; the run is None where the bytes are the values themselves.

    Args:
        base: as many numbers that the decoder holds and that the values are close to; None: there are none.
    """
    best: tuple[CoderConfig | None, bytes] = (None, values.tobytes())
    if values.nbytes:
        for run in _small_array_configs(number_format, values, base):
            side, codes = run.encode(number_format, values, CodingContext(base=base), 1)
            stored = _SIDE_SIZE.pack(side.nbytes) + side.tobytes() + codes.tobytes()
            best = min(best, (run, stored), key=lambda pair: len(pair[1]))
    return best


def decode_small_array(
    number_format: NumberFormat, config: CoderConfig | None, data: Bytes, out: Bytes, base: Bytes | None
) -> None:
    """Fill `out`.

    Raises:
        ValueError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    if config is None:
        if data.nbytes != out.nbytes:
            raise ValueError(f"{data.nbytes} bytes of an inner array that has {out.nbytes}")
        out[:] = data
        return
    (side,) = _SIDE_SIZE.unpack(data[: _SIDE_SIZE.size].tobytes())
    if config.needs_base and base is None:
        raise ValueError("an inner array needs a base and has none")
    if side > data.nbytes - _SIDE_SIZE.size:
        raise _native.Truncated("an inner array ends too early")
    start = _SIDE_SIZE.size
    config.decode(number_format, data[start : start + side], data[start + side :], out, CodingContext(base=base), 1)


def _small_array_configs(number_format: NumberFormat, values: Bytes, base: Bytes | None) -> Iterator[CoderConfig]:
    fine = min(2, number_format.mantissa)
    words = values.view(f"u{number_format.itemsize}") & ((1 << (number_format.width - 1)) - 1)
    yield CoderConfig(
        "level", fine=fine, bias=(int(words.max()) >> (number_format.mantissa - fine)) + _LEVEL_MARGIN - 126
    )
    if base is not None:
        top = (
            int((base.view(f"u{number_format.itemsize}") & ((1 << (number_format.width - 1)) - 1)).max())
            >> number_format.mantissa
        )
        yield CoderConfig("delta", predictor="base", top=top)


_PART_SIZES = struct.Struct("<IQQ")  # bytes of the side, of the codes and of the centers; the exact values are the rest
_EXACT_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class CodebookInput:
    """The quantized tensors of one record, to be coded.

    Attributes:
        name: of the record.
        infos: its tensors.
        tensors: of each, the values as a reader gets them.
        quantized: of each, what those were made from; all alike in `bins`, `first`, `residual` and dtype of `exact`.
        context: the members' moments, where a decoder holds them; nothing else.
        moments: as in `recipe.CodebookRecipe`.
        reference: the parent, where it holds symbols of every member, or where these are residual; else None.
        context_codes: the codes of other tensors of the file that are context in place of the parent's, one for each
            member; ()
            for none.
        context_ordinals: of those tensors.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]
    quantized: tuple[CodebookTensor, ...]
    context: CodingContext = field(default_factory=CodingContext)
    moments: tuple[tuple[int, int], ...] = ()
    reference: Reference | None = None
    context_codes: tuple[Tensor, ...] = ()
    context_ordinals: tuple[int, ...] = ()


def encode_codebook_record(
    record: CodebookInput, *, coders: Sequence[str] = CODERS, threads: int | None = None
) -> EncodedRecord:
    """The record, in the smallest form that `coders` allow.

    Raises:
        ValueError: the symbols are not what `codec.CodebookTensor` says, or not those of the tensors.
    """
    digest = _digest([tensor_bytes(tensor) for tensor in record.tensors])
    infos, first = record.infos, record.quantized[0]
    codes = _concat_codes([one.codes for one in record.quantized])
    parent = ParentCodes.from_reference(infos, record.reference, residual=first.residual)
    if record.context_codes and not first.residual:
        parent = None
    _check_readable(record, parent, digest)
    context = _concat_codes(record.context_codes) if record.context_codes else None if parent is None else parent.codes
    found = encode_forms(codes, first.num_codes, context, record.context, coders, default_threads(threads))
    how, side, stored = min(found, key=lambda form: len(form[1]) + len(form[2]))
    centers, middle = _encode_centers(record.quantized, parent)
    exacts, end = _encode_exact(record.quantized, parent)
    parts = {"symbols": b"".join([_PART_SIZES.pack(len(side), len(stored), len(middle)), side, stored, middle, end])}
    uses_moments = isinstance(how, CoderConfig) and how.moments
    uses_others = isinstance(how, CyclicDelta) or (isinstance(how, CoderConfig) and how.needs_base)
    recipe = CodebookRecipe(
        bins=first.bins,
        first=first.first_code,
        codes=how,
        centers=centers,
        exact=_EXACT_DTYPES[first.exact.dtype],
        exacts=exacts,
        base=parent is not None and not first.residual,
        moments=record.moments if uses_moments else (),
        residual=first.residual,
        contexts=record.context_ordinals if record.context_codes and uses_others else (),
    )
    base = None if parent is None else parent.digest
    return EncodedRecord(record.name, infos, recipes.to_json(recipe), parts, digest, base)


def decode_codebook_record(
    encoded: EncodedRecord,
    recipe: CodebookRecipe,
    moments: CodingContext,
    reference: Reference | None,
    context_codes: Sequence[Tensor],
    threads: int,
) -> tuple[dict[str, Tensor], dict[str, CodebookTensor]]:
    """The tensors and symbols of a record.

    Args:
        moments: the members' moments, where the recipe asks for them.
        reference: the parent, which has been checked, where the recipe asks for it.
        context_codes: the codes of other tensors of the file, where the recipe asks for them.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    infos = encoded.infos
    needed = recipe.base or recipe.residual
    parent = ParentCodes.from_reference(infos, reference, residual=recipe.residual) if needed else None
    if needed and parent is None:
        raise ValueError("a parent whose tensors are not quantized")
    context = _concat_codes(context_codes) if context_codes else None if parent is None else parent.codes
    side, stored, middle, end = _split_parts(encoded.parts["symbols"])
    codes = decode_codes(sum(info.numel for info in infos), recipe, side, stored, context, moments, threads)
    if codes.nbytes and int(codes.max()) >= recipe.first + recipe.bins:
        raise ValueError("a code beyond the last center")
    centers = decode_centers(len(infos), recipe, middle, parent)
    members = np.split(codes, np.cumsum([info.numel for info in infos])[:-1])
    shaped = [torch.from_numpy(one).reshape(info.shape) for one, info in zip(members, infos, strict=True)]
    exact = _decode_exact(recipe, end, parent, shaped)
    symbols = [
        CodebookTensor(one, table, values, recipe.first, recipe.residual)
        for one, table, values in zip(shaped, centers, exact, strict=True)
    ]
    made = _dequantize_all(infos, symbols, parent)
    tensors = {info.name: one for info, one in zip(infos, made, strict=True)}
    digest = _digest([tensor_bytes(tensors[info.name]) for info in infos])
    if digest != encoded.digest:
        raise ValueError(f"decoded values with digest {digest}, expected {encoded.digest}")
    return tensors, {info.name: one for info, one in zip(infos, symbols, strict=True)}


def _dequantize_all(
    infos: Sequence[TensorInfo], quantized: Sequence[CodebookTensor], parent: ParentCodes | None
) -> list[Tensor]:
    """The values that symbols stand for."""
    bases = parent.tensors if parent is not None and parent.codes is None else [None] * len(infos)
    return [
        one.dequantize(torch_dtype(info.dtype), base) for info, one, base in zip(infos, quantized, bases, strict=True)
    ]


def _check_readable(record: CodebookInput, parent: ParentCodes | None, digest: str) -> None:
    """The last line of defence: a scheme's mistake must not become a checkpoint that no reader takes."""
    shapes = [info.shape for info in record.infos]
    if [tuple(one.codes.shape) for one in record.quantized] != shapes or len(
        {*map(_codebook_kind, record.quantized)}
    ) != 1:
        raise ValueError("symbols of other shapes than their tensors, or of several kinds")
    if record.context_codes and (
        [tuple(one.shape) for one in record.context_codes] != shapes or len(record.context_ordinals) != len(shapes)
    ):
        raise ValueError("symbols under codes of other shapes")
    for one in record.quantized:
        _check_codebook(one)
    if record.quantized[0].residual and parent is None:
        raise ValueError("symbols of differences to a parent that is not there")
    if _digest([tensor_bytes(one) for one in _dequantize_all(record.infos, record.quantized, parent)]) != digest:
        raise ValueError("symbols that stand for other values than the tensors have")


def _codebook_kind(tensor: CodebookTensor) -> tuple[object, ...]:
    """What the symbols of one record have in common."""
    return tensor.bins, tensor.first_code, tensor.residual, tensor.exact.dtype


def _check_codebook(tensor: CodebookTensor) -> None:
    if not 0 <= tensor.first_code <= RESERVED_CODES or not 0 < tensor.bins <= MAX_CODES - tensor.first_code:
        raise ValueError("symbols with more codes than there are")
    if tensor.codes.numel() and int(tensor.codes.max()) >= tensor.num_codes:
        raise ValueError("symbols with a code beyond the last center")
    if int(tensor.protected.sum()) != tensor.exact.numel():
        raise ValueError("symbols with more or fewer exact values than codes that say so")
    if not bool(tensor.centers.isfinite().all()) or bool((tensor.centers.diff() < 0).any()):
        raise ValueError("symbols whose centers do not rise, or are not finite")


def codebook_base_digest(infos: Sequence[TensorInfo], recipe: CodebookRecipe, reference: Reference) -> str | None:
    """What a record calls its base; None where it needs the parent's codes, which the parent does not have."""
    parent = ParentCodes.from_reference(infos, reference, residual=recipe.residual)
    return None if parent is None else parent.digest


@dataclass(frozen=True)
class ParentCodes:
    """What the parent holds of a record's tensors.

    Attributes:
        symbols, codes: () and None where the record is residual, which needs values alone. So it can be made against a
            parent that is not quantized, and a parent can be written again without its symbols.
    """

    quantized: tuple[CodebookTensor, ...]
    tensors: tuple[Tensor, ...]
    codes: Bytes | None

    @classmethod
    def from_reference(
        cls, infos: Sequence[TensorInfo], reference: Reference | None, *, residual: bool
    ) -> ParentCodes | None:
        if reference is None:
            return None
        if not residual and not all(reference.has_codes(info.name) for info in infos):
            return None
        held = () if residual else tuple(reference.quantized[info.name] for info in infos)
        symbols = tuple(one for one in held if isinstance(one, CodebookTensor))
        found = [reference.get_like(info.name, info.shape, torch_dtype(info.dtype)) for info in infos]
        tensors = tuple(tensor for tensor in found if tensor is not None)
        if len(tensors) < len(infos):
            return None
        return cls(symbols, tensors, None if residual else _concat_codes([one.codes for one in symbols]))

    @property
    def digest(self) -> str:
        """Of the codes, then the values."""
        values = [tensor_bytes(tensor) for tensor in self.tensors]
        return _digest(values if self.codes is None else [self.codes, *values])

    def centers(self, bins: int) -> Bytes | None:
        if not self.quantized or any(one.bins != bins for one in self.quantized):
            return None
        return np.concatenate([tensor_bytes(one.centers) for one in self.quantized])

    def values_at(self, masks: Sequence[Tensor], dtype: torch.dtype) -> Bytes:
        """The values at these places (bool, one mask a member), as numbers of `dtype`."""
        picked = [tensor[place].to(dtype) for tensor, place in zip(self.tensors, masks, strict=True)]
        return np.concatenate([tensor_bytes(one) for one in picked])


def _split_parts(stored: BytesLike) -> list[Bytes]:
    """Side, codes, centers and exact values."""
    data = np.frombuffer(stored, np.uint8)
    sizes = _PART_SIZES.unpack(data[: _PART_SIZES.size].tobytes())
    if sum(sizes) > data.nbytes - _PART_SIZES.size:
        raise _native.Truncated("the symbols end too early")
    return np.split(data, np.cumsum([_PART_SIZES.size, *sizes]))[1:]


def _encode_centers(
    quantized: Sequence[CodebookTensor], parent: ParentCodes | None
) -> tuple[CoderConfig | None, bytes]:
    centers = np.concatenate([tensor_bytes(one.centers) for one in quantized])
    return encode_small_array(
        NUMBER_FORMATS["F32"], centers, None if parent is None else parent.centers(quantized[0].bins)
    )


def decode_centers(members: int, recipe: CodebookRecipe, stored: Bytes, parent: ParentCodes | None) -> list[Tensor]:
    out = np.empty(4 * recipe.bins * members, np.uint8)
    base = None if parent is None else parent.centers(recipe.bins)
    decode_small_array(NUMBER_FORMATS["F32"], recipe.centers, stored, out, base)
    centers = torch.from_numpy(out).view(torch.float32).reshape(members, recipe.bins)
    if not bool(centers.isfinite().all()) or bool((centers.diff(dim=1) < 0).any()):
        raise ValueError("centers that do not rise, or are not finite")
    return [*centers]


def _encode_exact(quantized: Sequence[CodebookTensor], parent: ParentCodes | None) -> tuple[CoderConfig | None, bytes]:
    dtype = quantized[0].exact.dtype
    values = np.concatenate([tensor_bytes(one.exact) for one in quantized])
    base = None if parent is None else parent.values_at([one.protected.cpu() for one in quantized], dtype)
    return encode_small_array(NUMBER_FORMATS[_EXACT_DTYPES[dtype]], values, base)


def _decode_exact(
    recipe: CodebookRecipe, stored: Bytes, parent: ParentCodes | None, codes: Sequence[Tensor]
) -> list[Tensor]:
    dtype = torch_dtype(recipe.exact)
    places = [one == recipe.first - 1 if recipe.first else torch.zeros_like(one, dtype=torch.bool) for one in codes]
    counts = [int(place.sum()) for place in places]
    out = np.empty(sum(counts) * dtype.itemsize, np.uint8)
    base = None if parent is None else parent.values_at(places, dtype)
    decode_small_array(NUMBER_FORMATS[recipe.exact], recipe.exacts, stored, out, base)
    values = torch.from_numpy(out).view(dtype) if out.nbytes else torch.empty(0, dtype=dtype)
    return [*torch.split(values, counts)]


def _concat_codes(codes: Sequence[Tensor]) -> Bytes:
    arrays = [tensor_bytes(one) for one in codes]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _digest(arrays: Sequence[Bytes]) -> str:
    hasher = _native.Hasher()
    for array in arrays:
        hasher.update(array)
    return hasher.hexdigest()
