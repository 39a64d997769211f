"""Forms of codes: what a reader takes of LZMA and what it refuses; moments as the only context."""

from __future__ import annotations

import lzma
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.codebooks import alike, symbols_of

from shrinkpoint import _native
from shrinkpoint.codec.codebook_record import CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.record import coding_context, decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import CorruptError, FormatError, TruncatedError
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo


def squeezed() -> EncodedRecord:
    """A record of 300 codes of 3 bits in LZMA; `stream` puts another stream into it."""
    one = CodebookTensor((torch.arange(300) % 5).to(torch.uint8), torch.arange(7.0), torch.empty(0).bfloat16(), 0)
    info, values = TensorInfo("w", (300,), "F32"), one.dequantize(torch.float32)
    return encode_codebook_record(CodebookInput("w", (info,), (values,), (one,)), coders=("lzma",), threads=1)


def packed_codes() -> bytes:
    return _native.pack_bits((np.arange(300) % 5).astype(np.uint32), 3).tobytes()


def stream(record: EncodedRecord, codes: bytes, *, size: int | None = None, fill: bytes = b"") -> EncodedRecord:
    symbols = bytes(record.parts["symbols"])
    side, old, _ = struct.unpack("<IQQ", symbols[:20])
    assert side == 0
    new = struct.pack("<Q", len(codes) if size is None else size) + codes + fill
    new = new.ljust(28, b"\0")
    parts = symbols[:4] + struct.pack("<Q", len(new)) + symbols[12:20] + new + symbols[20 + old :]
    return replace(record, parts={"symbols": parts})


def test_lzma_of_any_sound_stream_is_read():
    record, packed = squeezed(), packed_codes()
    expected = (torch.arange(300) % 5).float()
    for check in (lzma.CHECK_NONE, lzma.CHECK_CRC32):
        for preset in (0, 9):
            sound = stream(record, lzma.compress(packed, lzma.FORMAT_XZ, check, preset))
            assert torch.equal(decode(sound, {}, None).tensors["w"], expected)


def test_lzma_holds_what_fixed_width_would_be():
    one = symbols_of((700,), 29)
    info, values = TensorInfo("w", (700,), "F32"), one.dequantize(torch.float32)
    parts = []
    for coder in ("packed", "lzma"):
        record = encode_codebook_record(CodebookInput("w", (info,), (values,), (one,)), coders=(coder,), threads=1)
        data = bytes(record.parts["symbols"])
        assert record.recipe["codes"] == {coder: 5} and data[:4] == bytes(4)
        parts.append(data[20 : 20 + int.from_bytes(data[4:12], "little")])
    (packed, squeezed), size = parts, int.from_bytes(parts[1][:8], "little")
    assert lzma.decompress(squeezed[8 : 8 + size], lzma.FORMAT_XZ) == packed and not any(squeezed[8 + size :])
    fields = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: 5 * 700].reshape(-1, 5)
    assert torch.equal(torch.from_numpy(fields @ (1 << np.arange(5))), one.codes.long())


def test_lzma_that_is_damaged_is_refused():
    record, packed = squeezed(), packed_codes()
    sound = lzma.compress(packed, lzma.FORMAT_XZ, lzma.CHECK_NONE)
    for end in range(len(sound)):
        with pytest.raises((CorruptError, TruncatedError)):
            decode(stream(record, sound[:end]), {}, None)
    wrong = {
        "not LZMA": [lzma.compress(packed, lzma.FORMAT_ALONE), b"\0" * 60, sound[1:]],
        "LZMA gives": [
            b"",
            sound + b"\0",
            sound + b"\0" * 4,
            sound + sound,
            lzma.compress(b""),
            lzma.compress(packed[:-1]),
            lzma.compress(packed + b"\0"),
        ],
    }
    for match, streams in wrong.items():
        for one in streams:
            with pytest.raises(CorruptError, match=match):
                decode(stream(record, one), {}, None)
    with pytest.raises(TruncatedError, match="too early"):
        decode(stream(record, sound, size=1 << 62), {}, None)
    with pytest.raises(CorruptError, match="padding is not zero"):
        decode(stream(record, sound, fill=b"\0\1"), {}, None)


def test_no_flipped_bit_of_lzma_gives_wrong_values():
    record, expected = squeezed(), (torch.arange(300) % 5).float()
    sound = lzma.compress(packed_codes(), lzma.FORMAT_XZ, lzma.CHECK_NONE)
    refused = 0
    for place in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[place // 8] ^= 1 << place % 8
        try:
            assert torch.equal(decode(stream(record, bytes(flipped)), {}, None).tensors["w"], expected)
        except FormatError:
            refused += 1
    assert refused > 7 * len(sound)


def test_lzma_of_far_more_than_the_codes_takes_no_memory_for_it():
    record = squeezed()
    bomb = lzma.compress(bytes(1 << 26), lzma.FORMAT_XZ, lzma.CHECK_NONE, preset=0)
    assert len(bomb) < 1 << 15
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"LZMA gives \d+ bytes for 300 codes"):
            decode(stream(record, bomb), {}, None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_dictionary_larger_than_any_writer_s_is_refused():
    def filtered(size: int) -> bytes:
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 4096}]
        sound = bytearray(lzma.compress(packed_codes(), lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=filters))
        assert sound[12:17] == b"\x02\x00\x21\x01\x00"  # the block's header: one filter, LZMA2, of 4 KiB
        sound[16] = size
        sound[20:24] = struct.pack("<I", zlib.crc32(bytes(sound[12:20])))
        return bytes(sound)

    record, expected = squeezed(), (torch.arange(300) % 5).float()
    for size in (0, 1, 28):  # 28: 64 MiB
        assert torch.equal(decode(stream(record, filtered(size)), {}, None).tensors["w"], expected)
    for size in (30, 38, 40, 41):  # 128 MiB, 2 GiB, 4 GiB less one, no size at all
        with pytest.raises(CorruptError, match="not LZMA"):
            decode(stream(record, filtered(size)), {}, None)


def pushed(*, residual: bool) -> tuple[CodebookTensor, dict[str, torch.Tensor], torch.Tensor]:
    """Codes that Adam's moments say the half of, the moments, and a parent's values."""
    random = torch.Generator().manual_seed(5)
    m, v = torch.randn(300, 300, generator=random) * 1e-3, torch.full((300, 300), 1e-7)
    codes = torch.where(m < -0.001, 2, torch.where(m > 0.001, 3, 0)).to(torch.uint8)
    one = CodebookTensor(codes, torch.tensor([-1e-3, 1e-3]), torch.empty(0).bfloat16(), residual=residual)
    return one, {"m": m, "v": v}, torch.randn(300, 300, generator=random)


def size_of(record: EncodedRecord) -> int:
    return len(record.parts["symbols"])


@pytest.mark.parametrize("residual", [False, True])
def test_moments_are_context_where_there_are_no_codes_of_a_parent(residual):
    one, moments, base = pushed(residual=residual)
    info, values = TensorInfo("w", (300, 300), "F32"), one.dequantize(torch.float32, base)
    parent = Reference({"w": base}) if residual else None
    alone = encode_codebook_record(CodebookInput("w", (info,), (values,), (one,), reference=parent), threads=1)
    known = coding_context((info,), 1, None, [("m", "v")], moments)
    material = CodebookInput("w", (info,), (values,), (one,), known, ((0, 1),), parent)
    under = encode_codebook_record(material, threads=1)
    assert under.recipe["codes"] == {"run": {"tokens": "codes", "moments": True}}
    assert "moments" in under.recipe and "moments" not in alone.recipe
    assert size_of(under) < 0.2 * size_of(alone)
    assert alike(decode(under, moments, parent).quantized["w"], one)
    assert encode_codebook_record(material, coders=("context",), threads=1) == under


def test_moments_that_say_nothing_are_not_context():
    one = symbols_of((300, 300), 6)
    info, values = TensorInfo("w", (300, 300), "F32"), one.dequantize(torch.float32)
    moments = {"m": torch.ones(300, 300), "v": torch.ones(300, 300)}
    known = coding_context((info,), 1, None, [("m", "v")], moments)
    record = encode_codebook_record(CodebookInput("w", (info,), (values,), (one,), known, ((0, 1),)), threads=1)
    assert record.recipe["codes"] == {"run": {"tokens": "codes"}} and "moments" not in record.recipe
