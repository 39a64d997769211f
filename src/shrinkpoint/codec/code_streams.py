"""Lossless coding of the codes of one record, in one of several formats."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from shrinkpoint import _native
from shrinkpoint.codec.coder import (
    BYTE_FORMAT,
    MAX_CHUNK,
    MIN_CHUNK_BYTES,
    Bytes,
    CodedChunks,
    CoderConfig,
    CodingContext,
)
from shrinkpoint.codec.recipe import BitPacked, CodesRecipe, CyclicDelta, LzmaCodes
from shrinkpoint.errors import PolicyError

CODERS = ("context", "alone", "packed", "rearranged", "runs", "huffman")
"""Coders of codes.

"context" codes them under the parent's codes, "alone" without context, "packed" in fixed width. "rearranged", "runs"
and "huffman" are the delta encoder of arXiv 2306.11800, whole and without its earlier stages. "lzma", fixed width
followed by LZMA as in arXiv 2406.11257, is slow and therefore used only on request."""
DELTA_CODERS = ("context", "rearranged", "runs", "huffman")  # The coders that use the parent's codes

BytesLike: TypeAlias = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_MIN_DICTIONARY, _MAX_DICTIONARY = 1 << 12, 1 << 26
_MAX_LZMA_MEMORY = 1 << 27  # Memory limit of the LZMA decoder in bytes; the largest dictionary needs 65 MiB


def encode_forms(
    codes: Bytes, num_codes: int, context: Bytes | None, moments: CodingContext, coders: Sequence[str], threads: int
) -> Iterator[tuple[CodesRecipe, BytesLike, BytesLike]]:
    """Encode codes with each of `coders`: yields (recipe, side data, codes), at least once.

    Fixed width is used if no other coder applies.

    Args:
        codes: uint8, of all members.
        num_codes: number of codes that may occur.
        context: codes of the parent or of other tensors, one for each code; or None.
        moments: the members' moments; nothing else of it is used.
        coders: names from `CODERS`, or "lzma".
    """
    largest = int(context.max()) if context is not None and context.nbytes else 0
    bits = max(1, (num_codes - 1).bit_length())
    config = _choose_config(codes, context, largest, moments, coders, threads)
    if config is not None:
        arrays = CodingContext(base=context, moment1=moments.moment1, moment2=moments.moment2)
        side, coded = config.encode(BYTE_FORMAT, codes, arrays, threads)
        yield config, side.data, coded.data
    stream_coders = [coder for coder in ("rearranged", "runs", "huffman", "lzma") if coder in coders and codes.nbytes]
    for coder in stream_coders:
        if coder == "lzma":
            yield LzmaCodes(bits), b"", _encode_lzma(codes, bits)
        else:
            rearranged = coder == "rearranged" and context is not None
            recipe = CyclicDelta(max(num_codes, largest + 1), rearranged, runs=coder != "huffman")
            coded = _native.cyclic_encode(
                codes, context, modulus=recipe.modulus, rearranged=recipe.rearranged, runs=recipe.runs
            )
            yield recipe, b"", _pad(coded.tobytes(), codes.nbytes)
    if "packed" in coders or (config is None and not stream_coders):
        yield BitPacked(bits), b"", _native.pack_bits(codes.astype(np.uint32), bits).data


def _choose_config(
    codes: Bytes, context: Bytes | None, max_context: int, moments: CodingContext, coders: Sequence[str], threads: int
) -> CoderConfig | None:
    """Return the configuration that `coders` allow with the smallest estimated size; None if there is none."""
    predictor = "none" if context is None else "base"
    configs = []
    if "alone" in coders or ("context" in coders and context is None):
        configs.append(CoderConfig("codes"))
    if "context" in coders and context is not None:
        configs.append(CoderConfig("codes", predictor=predictor, top=max_context))
    if "context" in coders and moments.moment1 is not None and moments.moment2 is not None:
        configs.append(CoderConfig("codes", predictor=predictor, moments=True, top=max_context))
    if len(configs) < 2 or codes.nbytes == 0:
        return configs[0] if configs and codes.nbytes else None
    arrays = CodingContext(base=context, moment1=moments.moment1, moment2=moments.moment2)
    stride = max(1, codes.nbytes >> 17)
    return min(configs, key=lambda config: config.estimate_bytes(BYTE_FORMAT, codes, arrays, stride, threads))


def _encode_lzma(codes: Bytes, bits: int) -> bytes:
    lzma = _lzma_module()
    packed = _native.pack_bits(codes.astype(np.uint32), bits).tobytes()
    # The strongest preset, with a dictionary no larger than the data: its size determines the memory that is used.
    size = min(max(len(packed), _MIN_DICTIONARY), _MAX_DICTIONARY)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
    coded = lzma.compress(packed, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=filters)
    return _pad(coded, codes.nbytes)


def _pad(coded: bytes, count: int) -> bytes:
    """Prefix the length and pad with zeros to `MIN_CHUNK_BYTES` a chunk, which bounds a reader's memory."""
    return (_LENGTH.pack(len(coded)) + coded).ljust(-(-count // MAX_CHUNK) * MIN_CHUNK_BYTES, b"\0")


def _decode_lzma(stored: Bytes, count: int, bits: int) -> Bytes:
    """Decompress and unpack `count` codes; memory is bounded by `count`, whatever the bytes say."""
    lzma = _lzma_module()
    size = (count * bits + 7) // 8
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_LZMA_MEMORY)
    try:
        packed = decompressor.decompress(_unpad(stored).tobytes(), max_length=size + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"codes that are not LZMA: {error}") from error
    if len(packed) != size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"LZMA gives {len(packed)} bytes for {count} codes of {bits} bits")
    return _native.unpack_bits(np.frombuffer(packed, np.uint8), count, bits).astype(np.uint8)


def _lzma_module() -> Any:
    """Import the standard library's lzma; raises PolicyError if Python was built without it."""
    try:
        return importlib.import_module("lzma")
    except ImportError as error:
        raise PolicyError(
            "codes in LZMA",
            found="a Python that was built without it",
            expected="the module lzma",
            do="use a Python with lzma",
        ) from error


def _unpad(stored: Bytes) -> Bytes:
    (size,) = _LENGTH.unpack(stored[: _LENGTH.size].tobytes())
    end = _LENGTH.size + size
    if end > stored.nbytes:
        raise _native.Truncated("the codes end too early")
    if stored[end:].any():
        raise ValueError("codes whose padding is not zero")
    return stored[_LENGTH.size : end]


class StoredCodes:
    """The coded codes of a record, within a part of it.

    Args:
        recipe: how they were coded.
        side: side data of an entropy coder; empty for all other forms.
        begin, end: where they begin and end in the part.
        count: how many there are.

    Attributes:
        splittable: True if ranges of them can be decoded; cyclic differences and LZMA are one stream each.
        chunk: codes that are decoded together; ranges begin and end at multiples of it, or at `count`.

    Raises:
        ValueError, _native.Truncated: the bytes do not fit the recipe, or are too few for `count`.
    """

    def __init__(self, recipe: CodesRecipe, side: Bytes, begin: int, end: int, count: int) -> None:
        self._recipe, self._begin, self._end, self._count = recipe, begin, end, count
        self.splittable = isinstance(recipe, CoderConfig | BitPacked)
        self.chunk = recipe.chunk if isinstance(recipe, CoderConfig) else MAX_CHUNK
        if isinstance(recipe, CoderConfig):
            self._chunks = CodedChunks(recipe, side, begin, end, count)
            return
        if side.nbytes:
            raise ValueError("side data of codes that have none")
        size = end - begin
        if isinstance(recipe, BitPacked) and size != (count * recipe.bits + 7) // 8:
            raise _native.Truncated(f"{size} bytes for {count} codes of {recipe.bits} bits")
        if not self.splittable and size < -(-count // MAX_CHUNK) * MIN_CHUNK_BYTES:
            raise _native.Truncated("the codes are too short for the tensors' shapes")

    def byte_range(self, lo: int, hi: int) -> tuple[int, int]:
        """Return (begin, end) in the part of the bytes that hold the codes [lo, hi)."""
        match self._recipe:
            case CoderConfig():
                return self._chunks.byte_range(lo, hi)
            case BitPacked(bits):  # chunks begin at whole bytes
                return self._begin + lo * bits // 8, self._begin + (hi * bits + 7) // 8
        return self._begin, self._end

    def decode(self, stored: Bytes, lo: int, hi: int, context: CodingContext, threads: int) -> Bytes:
        """Decode the codes [lo, hi).

        Args:
            stored: the bytes of `byte_range`.
            context: codes of the parent or of other tensors (`base`), and the members' moments, if the recipe uses
                them; of this range.

        Raises:
            ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
        """
        match self._recipe:
            case BitPacked(bits):
                return _native.unpack_bits(stored, hi - lo, bits).astype(np.uint8)
            case LzmaCodes(bits):
                return _decode_lzma(stored, hi - lo, bits)
            case CoderConfig():
                out = np.empty(hi - lo, np.uint8)
                self._chunks.decode(BYTE_FORMAT, stored, out, context, lo, threads)
            case CyclicDelta(modulus, rearranged, runs):
                out = np.empty(hi - lo, np.uint8)
                data = _unpad(stored)
                _native.cyclic_decode(data, context.base, modulus=modulus, rearranged=rearranged, runs=runs, out=out)
        return out
