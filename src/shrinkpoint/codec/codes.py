"""The codes of one record <-> bytes, in one of several forms. Exact."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from shrinkpoint import _native
from shrinkpoint.codec.number import Number
from shrinkpoint.codec.recipe import Codes, Cyclic, Packed, Quantized, Squeezed
from shrinkpoint.codec.run import CHUNK, Bytes, Known, Run
from shrinkpoint.errors import PolicyError

CODERS = ("context", "alone", "packed", "rearranged", "runs", "huffman")
"""How codes may be coded: under the parent's codes, by themselves, in fixed width; and as arXiv 2306.11800 does it,
in whole or without its later stages (its table of the delta encoder). Only on request, for it is slow: "lzma", fixed
width and then LZMA, as arXiv 2406.11257 does it."""
DELTA_CODERS = ("context", "rearranged", "runs", "huffman")
"""Those of them that look at the parent."""

Stored: TypeAlias = bytes | bytearray | memoryview

_BYTE = Number(8)
_LENGTH = struct.Struct("<Q")
_LEAST_DICTIONARY, _LARGEST_DICTIONARY = 1 << 12, 1 << 26
_LZMA_MEMORY = 1 << 27
"""Bytes that a decoder of LZMA may take; the largest dictionary asks for 65 MiB."""
_SMALLEST = 28
"""Bytes that stand for a chunk of codes at least: what bounds the memory a reader takes for a record. A chunk of a run
has as many anyway (its header, four states, the slack); a run of equal differences is filled up to it."""


def forms(
    codes: Bytes, used: int, previous: Bytes | None, known: Known, coders: Sequence[str], threads: int
) -> Iterator[tuple[Codes, Stored, Stored]]:
    """(how, side, codes) in every form that `coders` allow; at least one, since fixed width always serves.

    Args:
        used: how many codes there may be.
        previous: the codes that are context, those of the parent or of other tensors.
    """
    largest = int(previous.max()) if previous is not None and previous.nbytes else 0
    bits = max(1, (used - 1).bit_length())
    run = _run(codes, previous, largest, known, coders, threads)
    if run is not None:
        arrays = Known(base=previous, moment1=known.moment1, moment2=known.moment2)
        side, coded = run.encode(_BYTE, codes, arrays, threads)
        yield run, side.data, coded.data
    others = [coder for coder in ("rearranged", "runs", "huffman", "lzma") if coder in coders and codes.nbytes]
    for coder in others:
        if coder == "lzma":
            yield Squeezed(bits), b"", _squeezed(codes, bits)
        else:
            rearranged = coder == "rearranged" and previous is not None
            how = Cyclic(max(used, largest + 1), rearranged, runs=coder != "huffman")
            yield how, b"", _cyclic(codes, previous, how)
    if "packed" in coders or (run is None and not others):
        yield Packed(bits), b"", _native.pack_bits(codes.astype(np.uint32), bits).data


def _run(
    codes: Bytes, previous: Bytes | None, largest: int, known: Known, coders: Sequence[str], threads: int
) -> Run | None:
    """The smallest run that `coders` allow, measured on a part of the codes."""
    predictor = "none" if previous is None else "base"
    runs = []
    if "alone" in coders or ("context" in coders and previous is None):
        runs.append(Run("codes"))
    if "context" in coders and previous is not None:
        runs.append(Run("codes", predictor=predictor, top=largest))
    if "context" in coders and known.moment1 is not None and known.moment2 is not None:
        runs.append(Run("codes", predictor=predictor, moments=True, top=largest))
    if len(runs) < 2 or codes.nbytes == 0:
        return runs[0] if runs and codes.nbytes else None
    arrays = Known(base=previous, moment1=known.moment1, moment2=known.moment2)
    stride = max(1, codes.nbytes >> 17)
    return min(runs, key=lambda run: run.measure(_BYTE, codes, arrays, stride, threads))


def _cyclic(codes: Bytes, previous: Bytes | None, how: Cyclic) -> bytes:
    coded = _native.cyclic_encode(codes, previous, modulus=how.modulus, rearranged=how.rearranged, runs=how.runs)
    return _padded(coded.tobytes(), codes.nbytes)


def _squeezed(codes: Bytes, bits: int) -> bytes:
    lzma = _lzma()
    packed = _native.pack_bits(codes.astype(np.uint32), bits).tobytes()
    # Of the strongest preset, but for a dictionary beyond the data: a reader and a writer take memory by its size.
    size = min(max(len(packed), _LEAST_DICTIONARY), _LARGEST_DICTIONARY)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
    coded = lzma.compress(packed, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=filters)
    return _padded(coded, codes.nbytes)


def _padded(coded: bytes, count: int) -> bytes:
    return (_LENGTH.pack(len(coded)) + coded).ljust(-(-count // CHUNK) * _SMALLEST, b"\0")


def _unsqueezed(stored: Bytes, count: int, bits: int) -> Bytes:
    """Never more than the codes need, whatever the bytes say."""
    lzma = _lzma()
    size = (count * bits + 7) // 8
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY)
    try:
        packed = decompressor.decompress(_unpadded(stored).tobytes(), max_length=size + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"codes that are no LZMA: {error}") from error
    if len(packed) != size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"{len(packed)} bytes out of LZMA for {count} codes of {bits} bits")
    return _native.unpack_bits(np.frombuffer(packed, np.uint8), count, bits).astype(np.uint8)


def _lzma() -> Any:
    """Of the standard library, where Python was built with it."""
    try:
        return importlib.import_module("lzma")
    except ImportError as error:
        found, expected = "a Python that was built without it", "the module lzma"
        raise PolicyError("codes in LZMA", found=found, expected=expected, do="use a Python with lzma") from error


def _unpadded(stored: Bytes) -> Bytes:
    (size,) = _LENGTH.unpack(stored[: _LENGTH.size].tobytes())
    end = _LENGTH.size + size
    if end > stored.nbytes:
        raise _native.Truncated("the codes end too early")
    if stored[end:].any():
        raise ValueError("codes that are filled up with something")
    return stored[_LENGTH.size : end]


def decode_codes(
    count: int, recipe: Quantized, side: Bytes, stored: Bytes, previous: Bytes | None, known: Known, threads: int
) -> Bytes:
    """`count` codes; raises as `codec.decode_quantized`."""
    if side.nbytes and not isinstance(recipe.codes, Run):
        raise ValueError("a side of codes that have none")
    match recipe.codes:
        case Packed(bits):
            if stored.nbytes != (count * bits + 7) // 8:
                raise _native.Truncated(f"{stored.nbytes} bytes for {count} codes of {bits} bits")
            return _native.unpack_bits(stored, count, bits).astype(np.uint8)
        case Squeezed(bits):
            _check_length(stored, count, CHUNK)
            return _unsqueezed(stored, count, bits)
        case Run() as run:
            _check_length(stored, count, run.chunk)
            out = np.empty(count, np.uint8)
            arrays = Known(base=previous, moment1=known.moment1, moment2=known.moment2)
            run.decode(_BYTE, side, stored, out, arrays, threads)
            return out
        case Cyclic() as how:
            _check_length(stored, count, CHUNK)
            out = np.empty(count, np.uint8)
            data = _unpadded(stored)
            _native.cyclic_decode(
                data, previous, modulus=how.modulus, rearranged=how.rearranged, runs=how.runs, out=out
            )
            return out


def _check_length(stored: Bytes, count: int, chunk: int) -> None:
    """Before the memory is taken: what decodes to a lot is not arbitrarily short."""
    if stored.nbytes < -(-count // chunk) * _SMALLEST:
        raise _native.Truncated("the codes are too short for the tensors' shapes")
