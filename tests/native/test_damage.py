"""Damaged bytes and wrong arguments are errors, or at worst other numbers: never a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.parameters import each_value
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import Case, cases, make
from reference.run import Run

from shrinkpoint import _native
from shrinkpoint._native import Companion, Corrupt, Model, Predictor, Tokens, Truncated

FACTORED = replace(make(1, Run("level", 32, 23, fine=1, companion="base", chunk=64), 150), shapes=[(10, 14), (1, 10)])
SMALL = {
    "planes": make(2, Run("planes", 32, chunk=64), 150),
    "level": FACTORED,
    "wild level": make(3, Run("level", 64, 52), 60, "wild"),
    "delta": make(4, Run("delta", 16, 7, predictor="base", top=125, chunk=100), 150, hint=True),
    "wide delta": make(5, Run("delta", 64, 52, predictor="none"), 60, "wild"),
    "codes": make(10, Run("codes", 8, predictor="base", top=9, chunk=100), 150, moments=True),
    "square": make(6, Run("delta", 32, 23, predictor="square", parameters=(0.9, 0.95, 0.1, 0.05)), 150),
}
LARGE = {
    "planes": make(7, Run("planes", 16), 40000),
    "level": make(8, Run("level", 32, 23, bias=121, chunk=40000), 80000),
    "codes": make(11, Run("codes", 8, predictor="base", chunk=40000), 80000),
    "delta": make(9, Run("delta", 16, 7, predictor="base", top=125, chunk=33000), 66000, "wild"),
}
small = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
large = pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)


def survives(case: Case, side: bytes, codes: bytes) -> None:
    """Decoding ends, in an error of the data or in some numbers."""
    try:
        case.decode(side, codes)
    except (Corrupt, Truncated):
        return


def resized(side: bytes, length: int) -> bytes:
    """The same side data with another size for the only (or last) chunk."""
    return side[:-4] + length.to_bytes(4, "little")


@small
def test_side_data_cut_anywhere_are_refused(case: Case) -> None:
    side, codes = case.encode()
    for length in range(len(side)):
        with pytest.raises((Corrupt, Truncated)):
            case.decode(side[:length], codes)
    with pytest.raises((Corrupt, Truncated)):
        case.decode(side + b"\0", codes)


@small
def test_codes_cut_anywhere_are_refused(case: Case) -> None:
    side, codes = case.encode()
    for length in range(len(codes)):
        with pytest.raises(Truncated):
            case.decode(side, codes[:length])
    with pytest.raises(Corrupt):
        case.decode(side, codes + b"\0")


@small
def test_a_chunk_cut_anywhere_is_refused_though_its_announced_size_fits(case: Case) -> None:
    side, codes = case.encode()
    last = int.from_bytes(side[-4:], "little")
    for length in range(last):
        with pytest.raises((Corrupt, Truncated)):
            case.decode(resized(side, length), codes[: len(codes) - last + length])


@large
def test_a_chunk_of_32_lanes_cut_anywhere_is_refused(case: Case) -> None:
    side, codes = case.encode()
    last = int.from_bytes(side[-4:], "little")
    for length in [*range(0, 200, 7), *range(200, last, max(1, last // 40)), last - 9, last - 8, last - 1]:
        with pytest.raises((Corrupt, Truncated)):
            case.decode(resized(side, length), codes[: len(codes) - last + length])


@large
def test_a_symbol_stream_that_announces_another_size_is_refused(case: Case) -> None:
    side, codes = case.encode()
    stream = int.from_bytes(codes[:4], "little")
    for other in (0, 127, 128, stream - 2, stream - 1, stream + 1, stream + 2, len(codes) - 4, 2**31, 2**32 - 1):
        with pytest.raises((Corrupt, Truncated)):
            case.decode(side, other.to_bytes(4, "little") + codes[4:])


@settings(deadline=None, max_examples=30)
@given(cases, st.data())
def test_flipped_bytes_never_crash(case: Case, data: st.DataObject) -> None:
    parts = [bytearray(part) for part in case.encode()]
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    survives(case, *map(bytes, parts))


@small
def test_no_single_flipped_byte_crashes(case: Case) -> None:
    side, codes = case.encode()
    for at in range(len(side)):
        survives(case, side[:at] + bytes([side[at] ^ 0x85]) + side[at + 1 :], codes)
    for at in range(len(codes)):
        survives(case, side, codes[:at] + bytes([codes[at] ^ 0x85]) + codes[at + 1 :])


@large
def test_flipped_bytes_of_32_lanes_never_crash(case: Case) -> None:
    side, codes = case.encode()
    random = np.random.default_rng(1)
    for at in [*range(140), *random.integers(0, len(codes), 60)]:
        survives(case, side, codes[:at] + bytes([codes[at] ^ 0xFF]) + codes[at + 1 :])


@settings(deadline=None, max_examples=30)
@given(cases, st.binary(max_size=200), st.binary(max_size=200))
def test_anything_at_all_never_crashes(case: Case, side: bytes, codes: bytes) -> None:
    survives(case, side, codes)


def model(**fields: Any) -> Model:
    out = Model()
    for name, value in {"width": 32, "mantissa": 23, **fields}.items():
        setattr(out, name, value)
    return out


HOSTILE: list[dict[str, Any]] = [
    *({"width": width, "mantissa": 0} for width in (0, 1, 7, 24, 33, 128, 2**31)),
    *({"mantissa": mantissa} for mantissa in (31, 32, 33, 2**32 - 1)),
    *({"tokens": Tokens.LEVEL, "bias": bias} for bias in (1 << 20, -(1 << 20), 2**31 - 1, -(2**31))),
    *({"tokens": Tokens.DELTA, "top": top} for top in (-1, 1 << 12, 2**31 - 1, -(2**31))),
    *({"tokens": Tokens.DELTA, "shift": shift} for shift in (32, 33, 2**32 - 1)),
    {"tokens": Tokens.LEVEL, "fine": 24},
    {"tokens": Tokens.LEVEL, "shift": 24},
    {"tokens": Tokens.LEVEL, "fine": 12, "shift": 12},
    {"tokens": Tokens.LEVEL, "fine": 2**32 - 1, "shift": 1},
    {"tokens": Tokens.LEVEL, "fine": 2**31, "shift": 2**31},
    {"tokens": Tokens.LEVEL, "mantissa": 0},
    {"tokens": Tokens.LEVEL, "width": 8, "mantissa": 3},
    {"tokens": Tokens.LEVEL, "predictor": Predictor.BASE},
    {"tokens": Tokens.LEVEL, "companion": Companion.BASE},
    {"tokens": Tokens.LEVEL, "companion": Companion.MOMENT1},
    {"tokens": Tokens.DELTA, "companion": Companion.BASE},
    {"tokens": Tokens.DELTA, "predictor": Predictor.BASE},
    {"tokens": Tokens.DELTA, "predictor": Predictor.ADAM},
    {"tokens": Tokens.DELTA, "predictor": Predictor.SQUARE},
    {"tokens": Tokens.DELTA, "predictor": Predictor.ADAM, "width": 16, "mantissa": 7},
    {"tokens": Tokens.PLANES, "predictor": Predictor.BASE},
    {"tokens": Tokens.CODES},
    *({"tokens": Tokens.CODES, "width": width, "mantissa": 0} for width in (16, 32, 64)),
    *({"tokens": Tokens.CODES, "width": 8, "mantissa": mantissa} for mantissa in (1, 3)),
    *({"tokens": Tokens.CODES, "width": 8, "mantissa": 0, "top": top} for top in (-1, 256, 1 << 11)),
    {"tokens": Tokens.CODES, "width": 8, "mantissa": 0, "shift": 1},
    {"tokens": Tokens.CODES, "width": 8, "mantissa": 0, "companion": Companion.BASE},
    *({"tokens": Tokens.CODES, "width": 8, "mantissa": 0, "predictor": one} for one in list(Predictor)[1:]),
    {"tokens": Tokens.PLANES, "companion": Companion.BASE},
]


def test_a_model_that_no_encoder_writes_is_corrupt() -> None:
    for fields in HOSTILE:
        values = np.zeros(64, np.uint8)
        with pytest.raises(Corrupt):
            _native.encode(model(**fields), values)
        with pytest.raises(Corrupt):
            _native.estimate_bits(model(**fields), values)
        with pytest.raises(Corrupt):
            _native.decode(model(**fields), b"", b"", values)


@pytest.mark.parametrize("tokens", [Tokens.DELTA, Tokens.PLANES, Tokens.CODES])
def test_factors_of_anything_but_levels_are_corrupt(tokens: Tokens) -> None:
    fields = {"width": 8, "mantissa": 0} if tokens == Tokens.CODES else {}
    with pytest.raises(Corrupt, match="companions and factors"):
        _native.decode(model(tokens=tokens, **fields), b"", b"", np.zeros(64, np.uint8), shapes=[(4, 4)])


@pytest.mark.parametrize("center", [-1, (1 << 20) + 1, -(2**31)])
def test_a_factor_out_of_range_is_corrupt(center: int) -> None:
    side, codes = FACTORED.encode()
    at = 4 + int.from_bytes(side[:4], "little")
    with pytest.raises(Corrupt):
        FACTORED.decode(side[:at] + center.to_bytes(4, "little", signed=True) + side[at + 4 :], codes)


WORDS = np.zeros(16, np.uint32)
BASED = {"tokens": Tokens.DELTA, "predictor": Predictor.BASE}
WRONG: dict[str, Callable[[], Any]] = {
    "nothing to encode": lambda: _native.encode(model(), b""),
    "nothing to decode": lambda: _native.decode(model(), b"", b"", np.zeros(0, np.uint8)),
    "nothing to measure": lambda: _native.estimate_bits(model(), b""),
    "stride": lambda: _native.estimate_bits(model(), WORDS, stride=0),
    "chunk": lambda: _native.encode(model(), WORDS, chunk=0),
    "chunk to decode": lambda: _native.decode(model(), b"", b"", WORDS.copy(), chunk=0),
    "part of a value": lambda: _native.encode(model(), bytes(7)),
    "unaligned": lambda: _native.encode(model(), memoryview(bytes(9))[1:]),
    "short base": lambda: _native.encode(model(**BASED), WORDS, base=bytes(60)),
    "long base": lambda: _native.encode(model(**BASED), WORDS, base=bytes(68)),
    "base to decode": lambda: _native.decode(model(**BASED), b"", b"", WORDS.copy(), base=bytes(60)),
    "moment1": lambda: _native.encode(model(), WORDS, moment1=bytes(32)),
    "moment2": lambda: _native.encode(model(), WORDS, moment2=bytes(65)),
    "moment1_base": lambda: _native.encode(model(), WORDS, moment1_base=b""),
    "hint": lambda: _native.encode(model(), WORDS, hint=bytes(15)),
    "others": lambda: _native.difference_classes(model(), WORDS, bytes(60)),
    "too few rows": lambda: _native.fit_factors(model(tokens=Tokens.LEVEL), WORDS, [(3, 5)]),
    "too many rows": lambda: _native.fit_factors(model(tokens=Tokens.LEVEL), WORDS, [(4, 5)]),
    "no rows": lambda: _native.fit_factors(model(tokens=Tokens.LEVEL), WORDS, [(0, 5), (4, 4)]),
    "overflow": lambda: _native.fit_factors(model(tokens=Tokens.LEVEL), WORDS, [(2**63, 2), (4, 4)]),
    "overflow of sums": lambda: _native.fit_factors(model(tokens=Tokens.LEVEL), WORDS, [(1, 16)] * 2),
    "shapes to decode": lambda: _native.decode(model(tokens=Tokens.LEVEL), b"", b"", WORDS.copy(), shapes=[(1, 5)]),
    "parameters": lambda: model(parameters=[1.0, 2.0, 3.0]),
    "no bits": lambda: _native.pack_bits(WORDS, 0),
    "33 bits": lambda: _native.pack_bits(WORDS, 33),
    "33 bits to unpack": lambda: _native.unpack_bits(b"", 0, 33),
    "no planes": lambda: _native.split_planes(b"", 0),
    "9 planes": lambda: _native.split_planes(bytes(9), 9),
    "part of planes": lambda: _native.split_planes(bytes(7), 2),
    "part of planes to join": lambda: _native.join_planes(bytes(7), 2),
}


def test_a_wrong_argument_is_refused() -> None:
    for call in WRONG.values():
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize(("code", "count"), each_value([_native.encode, _native.estimate_bits], [8, 15, 17, 4096]))
def test_factors_that_belong_to_other_values_are_refused(code: Callable[..., Any], count: int) -> None:
    level = model(tokens=Tokens.LEVEL)
    factors = _native.fit_factors(level, WORDS, [(4, 4)])
    with pytest.raises(ValueError, match="of other values"):
        code(level, np.zeros(count, np.uint32), factors=factors)


@pytest.mark.parametrize("count", [0, 1, 15, 17, 2**40, 2**63])
def test_packed_bits_of_another_count_are_truncated(count: int) -> None:
    with pytest.raises(Truncated):
        _native.unpack_bits(_native.pack_bits(WORDS, 8), count, 8)


def test_what_may_not_be_written_is_no_place_for_numbers() -> None:
    side, codes = SMALL["planes"].encode()
    for out in (bytes(600), np.zeros((300, 2), np.uint8)[:, 0]):
        with pytest.raises((BufferError, ValueError)):
            _native.decode(SMALL["planes"].model(), side, codes, out, chunk=64)


@pytest.mark.parametrize(("others", "level"), each_value([0, 3, 40], [0, 1, 2]))
def test_the_end_of_a_stream_of_few_bits_a_symbol_is_read_and_its_loss_noticed(level: int, others: int) -> None:
    """Most of 80,000 symbols cost next to nothing, so that many of them are decoded from the last bytes."""
    values = np.zeros(80_000, np.uint8)
    values[:: values.size // others if others else values.size + 1] = 7
    model = Model()
    model.tokens, model.width = Tokens.CODES, 8
    before = _native._use_simd(2)
    try:
        _native._use_simd(level)
        side, codes = _native.encode(model, values, chunk=40_000)
        out = np.empty_like(values)
        _native.decode(model, side, codes, out, chunk=40_000)
        assert np.array_equal(out, values)
        size = int.from_bytes(codes[:4].tobytes(), "little")
        for missing in (2, 4):  # words of the first chunk's symbols, which then follow one another too early
            short = np.concatenate([codes[: 4 + size - missing], codes[4 + size :]])
            short[:4] = np.frombuffer((size - missing).to_bytes(4, "little"), np.uint8)
            sizes = np.frombuffer(side[-8:].tobytes(), "<u4") - np.array([missing, 0], "<u4")
            resized_side = np.concatenate([side[:-8], sizes.view(np.uint8)])
            with pytest.raises((Corrupt, Truncated)):
                _native.decode(model, resized_side, short, out, chunk=40_000)
    finally:
        _native._use_simd(before)
