"""The codes of one record <-> bytes, in one of several forms. Exact."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from shrinkpoint import _native
from shrinkpoint.codec.coder import MAX_CHUNK, Bytes, CoderConfig, CodingContext, NumberFormat
from shrinkpoint.codec.recipe import BitPacked, CodebookRecipe, CodesRecipe, CyclicDelta, LzmaCodes
from shrinkpoint.errors import PolicyError

CODERS = ("context", "alone", "packed", "rearranged", "runs", "huffman")
"""How codes may be coded: under the parent's codes, by themselves, in fixed width; and as arXiv 2306.11800 does it,
in whole or without its later stages (its table of the delta encoder). Only on request, for it is slow: "lzma", fixed
width and then LZMA, as arXiv 2406.11257 does it."""
DELTA_CODERS = ("context", "rearranged", "runs", "huffman")
"""Those of them that look at the parent."""

BytesLike: TypeAlias = bytes | bytearray | memoryview

_BYTE = NumberFormat(8)
_LENGTH = struct.Struct("<Q")
_MIN_DICTIONARY, _MAX_DICTIONARY = 1 << 12, 1 << 26
_MAX_LZMA_MEMORY = 1 << 27
"""Bytes that a decoder of LZMA may take; the largest dictionary asks for 65 MiB."""
_MIN_CHUNK_BYTES = 28
"""Bytes that stand for a chunk of codes at least: what bounds the memory a reader takes for a record. A chunk of a run
has as many anyway (its header, four states, the slack); a run of equal differences is filled up to it."""


def encode_forms(
    codes: Bytes, num_codes: int, context: Bytes | None, moments: CodingContext, coders: Sequence[str], threads: int
) -> Iterator[tuple[CodesRecipe, BytesLike, BytesLike]]:
    """(how, side, codes) in every form that `coders` allow; at least one, since fixed width always serves.

    Args:
        num_codes: how many codes there may be.
        context: the codes that are context, those of the parent or of other tensors.
    """
    largest = int(context.max()) if context is not None and context.nbytes else 0
    bits = max(1, (num_codes - 1).bit_length())
    run = _choose_config(codes, context, largest, moments, coders, threads)
    if run is not None:
        arrays = CodingContext(base=context, moment1=moments.moment1, moment2=moments.moment2)
        side, coded = run.encode(_BYTE, codes, arrays, threads)
        yield run, side.data, coded.data
    others = [coder for coder in ("rearranged", "runs", "huffman", "lzma") if coder in coders and codes.nbytes]
    for coder in others:
        if coder == "lzma":
            yield LzmaCodes(bits), b"", _encode_lzma(codes, bits)
        else:
            rearranged = coder == "rearranged" and context is not None
            how = CyclicDelta(max(num_codes, largest + 1), rearranged, runs=coder != "huffman")
            yield how, b"", _encode_cyclic(codes, context, how)
    if "packed" in coders or (run is None and not others):
        yield BitPacked(bits), b"", _native.pack_bits(codes.astype(np.uint32), bits).data


def _choose_config(
    codes: Bytes, context: Bytes | None, max_context: int, moments: CodingContext, coders: Sequence[str], threads: int
) -> CoderConfig | None:
    """The smallest run that `coders` allow, measured on a part of the codes."""
    predictor = "none" if context is None else "base"
    runs = []
    if "alone" in coders or ("context" in coders and context is None):
        runs.append(CoderConfig("codes"))
    if "context" in coders and context is not None:
        runs.append(CoderConfig("codes", predictor=predictor, top=max_context))
    if "context" in coders and moments.moment1 is not None and moments.moment2 is not None:
        runs.append(CoderConfig("codes", predictor=predictor, moments=True, top=max_context))
    if len(runs) < 2 or codes.nbytes == 0:
        return runs[0] if runs and codes.nbytes else None
    arrays = CodingContext(base=context, moment1=moments.moment1, moment2=moments.moment2)
    stride = max(1, codes.nbytes >> 17)
    return min(runs, key=lambda run: run.estimate_bytes(_BYTE, codes, arrays, stride, threads))


def _encode_cyclic(codes: Bytes, context: Bytes | None, recipe: CyclicDelta) -> bytes:
    coded = _native.cyclic_encode(
        codes, context, modulus=recipe.modulus, rearranged=recipe.rearranged, runs=recipe.runs
    )
    return _pad(coded.tobytes(), codes.nbytes)


def _encode_lzma(codes: Bytes, bits: int) -> bytes:
    lzma = _lzma_module()
    packed = _native.pack_bits(codes.astype(np.uint32), bits).tobytes()
    # Of the strongest preset, but for a dictionary beyond the data: a reader and a writer take memory by its size.
    size = min(max(len(packed), _MIN_DICTIONARY), _MAX_DICTIONARY)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
    coded = lzma.compress(packed, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=filters)
    return _pad(coded, codes.nbytes)


def _pad(coded: bytes, count: int) -> bytes:
    return (_LENGTH.pack(len(coded)) + coded).ljust(-(-count // MAX_CHUNK) * _MIN_CHUNK_BYTES, b"\0")


def _decode_lzma(stored: Bytes, count: int, bits: int) -> Bytes:
    """Never more than the codes need, whatever the bytes say."""
    lzma = _lzma_module()
    size = (count * bits + 7) // 8
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_LZMA_MEMORY)
    try:
        packed = decompressor.decompress(_unpad(stored).tobytes(), max_length=size + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"codes that are no LZMA: {error}") from error
    if len(packed) != size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"{len(packed)} bytes out of LZMA for {count} codes of {bits} bits")
    return _native.unpack_bits(np.frombuffer(packed, np.uint8), count, bits).astype(np.uint8)


def _lzma_module() -> Any:
    """Of the standard library, where Python was built with it."""
    try:
        return importlib.import_module("lzma")
    except ImportError as error:
        found, expected = "a Python that was built without it", "the module lzma"
        raise PolicyError("codes in LZMA", found=found, expected=expected, do="use a Python with lzma") from error


def _unpad(stored: Bytes) -> Bytes:
    (size,) = _LENGTH.unpack(stored[: _LENGTH.size].tobytes())
    end = _LENGTH.size + size
    if end > stored.nbytes:
        raise _native.Truncated("the codes end too early")
    if stored[end:].any():
        raise ValueError("codes that are filled up with something")
    return stored[_LENGTH.size : end]


def decode_codes(
    count: int,
    recipe: CodebookRecipe,
    side: Bytes,
    stored: Bytes,
    context: Bytes | None,
    moments: CodingContext,
    threads: int,
) -> Bytes:
    """`count` codes; raises as `codec.decode_codebook_record`."""
    if side.nbytes and not isinstance(recipe.codes, CoderConfig):
        raise ValueError("a side of codes that have none")
    match recipe.codes:
        case BitPacked(bits):
            if stored.nbytes != (count * bits + 7) // 8:
                raise _native.Truncated(f"{stored.nbytes} bytes for {count} codes of {bits} bits")
            return _native.unpack_bits(stored, count, bits).astype(np.uint8)
        case LzmaCodes(bits):
            _check_length(stored, count, MAX_CHUNK)
            return _decode_lzma(stored, count, bits)
        case CoderConfig() as run:
            _check_length(stored, count, run.chunk)
            out = np.empty(count, np.uint8)
            arrays = CodingContext(base=context, moment1=moments.moment1, moment2=moments.moment2)
            run.decode(_BYTE, side, stored, out, arrays, threads)
            return out
        case CyclicDelta() as how:
            _check_length(stored, count, MAX_CHUNK)
            out = np.empty(count, np.uint8)
            data = _unpad(stored)
            _native.cyclic_decode(data, context, modulus=how.modulus, rearranged=how.rearranged, runs=how.runs, out=out)
            return out


def _check_length(stored: Bytes, count: int, chunk: int) -> None:
    """Before the memory is taken: what decodes to a lot is not arbitrarily short."""
    if stored.nbytes < -(-count // chunk) * _MIN_CHUNK_BYTES:
        raise _native.Truncated("the codes are too short for the tensors' shapes")
