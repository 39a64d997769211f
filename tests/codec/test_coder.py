"""Every way of coding an array gives the array back, whatever is in it and however long it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.codec.coder import MAX_CHUNK, NUMBER_FORMATS, CoderConfig, CodingContext, NumberFormat
from shrinkpoint.codec.coder import NumberFormat as N

F64, F32, F16, BF16 = (NUMBER_FORMATS[name] for name in ("F64", "F32", "F16", "BF16"))
FLOATS = [F64, F32, F16, BF16]
INTEGERS = [N(8), N(16), N(32), N(64)]
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 2047, 2048, 2049, 5000]


def runs(number: NumberFormat) -> list[CoderConfig]:
    """One of each kind that this number allows."""
    out = [
        CoderConfig("planes"),
        CoderConfig("delta"),
        CoderConfig("delta", predictor="base"),
        CoderConfig("delta", predictor="base", moments=True),
    ]
    if number.mantissa:
        fine, top = 2, (1 << (number.width - number.mantissa - 1)) - 2
        out += [
            CoderConfig("level", fine=fine),
            CoderConfig("level", fine=0, bias=1),
            CoderConfig("level", fine=1, bias=top * 2 - 120),
        ]
        out += [CoderConfig("delta", predictor="base", top=top, moments=True)]
        if number.width <= 32:
            out += [
                CoderConfig("level", factors=True, fine=fine),
                CoderConfig("level", companion="base", factors=True, fine=fine),
            ]
        if number.has_float_exponent:
            out += [CoderConfig("level", companion="moment1", factors=True, fine=fine)]
    if number == F32:
        out += [CoderConfig("delta", predictor="adam", moments=True, top=130, parameters=(0.99, -1e-3, 0.05, 1e-8))]
        out += [CoderConfig("delta", predictor="square", parameters=(0.9, 0.999, 0.1, 0.001))]
    return out


def contents(number: NumberFormat, size: int) -> dict[str, np.ndarray]:
    """Bit patterns that coders get wrong, by name."""
    random, bits = np.random.default_rng(size), number.width
    word, top = np.dtype(f"u{number.itemsize}"), bits - 1
    exponent = ((1 << (bits - 1 - number.mantissa)) - 1) << number.mantissa if number.mantissa else 0
    special = [0, 1 << top, 1, (1 << top) + 1, (1 << bits) - 1, (1 << top) - 1]  # zeros, denormals, nans with payloads
    special += [exponent, exponent | 1 << top, exponent | 1, exponent - 1]  # infinities, signalling nan, largest finite
    return {
        "noise": np.frombuffer(random.bytes(size * number.itemsize), word),
        "zero": np.zeros(size, word),
        "constant": np.full(size, (1 << bits) - 2 & 0xA5A5A5A5A5A5A5A5, word),
        "special": random.choice(np.array([n % (1 << bits) for n in special], word), size),
        "counting": np.arange(size).astype(word),
        "falling": (-np.arange(size)).astype(word),
        "small": random.integers(0, 20, size).astype(word),
        "powers": (np.uint64(1) << random.integers(0, bits, size).astype(np.uint64)).astype(word),
        "weights": (random.standard_normal(size).astype("f4").view("u4") >> (32 - min(bits, 32))).astype(word),
    }


def known(number: NumberFormat, values: np.ndarray, near: bool) -> CodingContext:
    random = np.random.default_rng(1)
    moments = [random.standard_normal(values.size).astype("f4") * scale for scale in (1e-3, 1e-6, 1e-3)]
    moments[1] = np.abs(moments[1])
    for moment in moments:
        moment[::7], moment[3::11], moment[5::13] = 0, np.nan, np.inf
        moment[1::17] = -1e-42
    base = values ^ random.integers(0, 4, values.size).astype(values.dtype) if near else values[::-1]
    rows = 4 if values.size % 4 == 0 and values.size else 1
    shapes = [(rows, values.size // rows)] if values.size else []
    first, second, third = (moment.view(np.uint8) for moment in moments)
    return CodingContext(np.ascontiguousarray(base).view(np.uint8), first, second, third, shapes=shapes)


def round_trip(run: CoderConfig, number: NumberFormat, values: np.ndarray, context: CodingContext) -> np.ndarray:
    before = np.ascontiguousarray(values).view(np.uint8)
    side, codes = run.encode(number, before, context, 1)
    after = np.full(before.nbytes, 0x5A, np.uint8)
    run.decode(number, side, codes, after, context, 1)
    return after.view(values.dtype)


@pytest.mark.parametrize("number", FLOATS + INTEGERS, ids=str)
def test_every_run_returns_every_number(number):
    for size in SIZES:
        for name, values in contents(number, size).items():
            for near in (True, False):
                context = known(number, values, near)
                for run in runs(number):
                    back = round_trip(run, number, values, context)
                    assert (back == values).all(), (run, size, name, near)


@pytest.mark.parametrize("chunk", [1, 7, 64, 2048, 2049])
def test_chunks_of_any_size_return_every_number(chunk):
    for number in (F32, BF16, N(64)):
        for size in (chunk - 1, chunk, chunk + 1, 3 * chunk + 5):
            size = max(1, min(size, 5000))
            values = contents(number, size)["special"]
            for run in runs(number):
                chunked = replace(run, chunk=chunk)
                assert (round_trip(chunked, number, values, known(number, values, True)) == values).all(), (run, size)


def test_numbers_on_both_sides_of_a_full_chunk_return():
    for size in (MAX_CHUNK - 1, MAX_CHUNK, MAX_CHUNK + 1):
        values = contents(BF16, size)["weights"]
        for run in (CoderConfig("level", fine=2), CoderConfig("delta", predictor="base", top=130)):
            assert (round_trip(run, BF16, values, known(BF16, values, True)) == values).all()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_bits_return_under_any_run(data):
    number = data.draw(st.sampled_from(FLOATS + INTEGERS))
    run, chunk = data.draw(st.sampled_from(runs(number))), data.draw(st.sampled_from([5, 32, 2048, MAX_CHUNK]))
    run = replace(run, chunk=chunk)
    raw = data.draw(st.binary(min_size=8, max_size=400))
    values = np.frombuffer(raw[: len(raw) // number.itemsize * number.itemsize], f"u{number.itemsize}")
    context = known(number, values, data.draw(st.booleans()))
    assert (round_trip(run, number, values, context) == values).all()


@pytest.mark.parametrize("number", FLOATS, ids=str)
def test_low_bits_that_are_always_zero_are_not_stored(number):
    shift = number.mantissa - 3
    values = contents(number, 3000)["noise"] >> shift << shift
    context = known(number, values, near=False)
    short, long = CoderConfig("delta", predictor="base", shift=shift), CoderConfig("delta", predictor="base")
    assert (round_trip(short, number, values, context) == values).all()
    sizes = [sum(map(len, run.encode(number, values.view(np.uint8), context, 1))) for run in (short, long)]
    assert sizes[1] - sizes[0] > 3000 * shift / 8 * 0.9


def test_a_run_that_would_lose_bits_is_refused():
    values = np.array([1.5, -2.0, 3.3], "f4").view(np.uint8)
    for run in (CoderConfig("level", shift=16), CoderConfig("delta", shift=1), CoderConfig("level", sign=False)):
        with pytest.raises(ValueError, match="drops bits"):
            run.encode(F32, values, CodingContext(), 1)


def test_threads_do_not_change_a_byte():
    values = contents(F32, 100_000)["weights"].view(np.uint8)
    context = known(F32, values.view("u4"), near=True)
    for run in runs(F32):
        one, two = (replace(run, chunk=4096).encode(F32, values, context, threads) for threads in (1, 2))
        assert [part.tobytes() for part in one] == [part.tobytes() for part in two], run
        assert run.estimate_bytes(F32, values, context, 3, 1) == run.estimate_bytes(F32, values, context, 3, 2), run
