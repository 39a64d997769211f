"""Cyclic deltas: native core and reference agree, everything comes back, and damage is an error or other codes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import cyclic, huffman
from reference.bits import Reader, Writer
from reference.cyclic import Cyclic

from shrinkpoint import _native
from shrinkpoint._native import Corrupt, Truncated

Codes = NDArray[np.uint8]
WAYS = [(rearranged, runs) for rearranged in (False, True) for runs in (False, True)]
several = settings(deadline=None, max_examples=50)
each_way = pytest.mark.parametrize(("rearranged", "runs"), WAYS)


def encode(form: Cyclic, codes: Codes, previous: Codes | None) -> bytes:
    how = {"modulus": form.modulus, "rearranged": form.rearranged, "runs": form.runs}
    return _native.cyclic_encode(codes, previous, **how).tobytes()


def decode(form: Cyclic, data: bytes, previous: Codes | None, count: int) -> Codes:
    out = np.full(count, 0xA5, np.uint8)
    how = {"modulus": form.modulus, "rearranged": form.rearranged, "runs": form.runs}
    _native.cyclic_decode(data, previous, **how, out=out)
    return out


def round_trip(form: Cyclic, codes: Codes, previous: Codes | None) -> bytes:
    data = encode(form, codes, previous)
    np.testing.assert_array_equal(decode(form, data, previous, codes.size), codes)
    return data


def pair(seed: int, before: int, now: int, count: int, stays: float = 0.8) -> tuple[Codes, Codes]:
    """`now` codes of which most follow from the `before` codes that stood there."""
    random = np.random.default_rng(seed)
    previous = random.integers(0, before, count)
    codes = np.where(random.random(count) < stays, previous * now // before, random.integers(0, now, count))
    return codes.astype(np.uint8), previous.astype(np.uint8)


@st.composite
def cases(draw: st.DrawFn, most: int = 120) -> tuple[Cyclic, Codes, Codes | None]:
    few = st.integers(1, 12) | st.integers(1, 256)
    before, now = draw(few), draw(few)
    codes, previous = pair(
        draw(st.integers(0, 2**32 - 1)), before, now, draw(st.integers(0, most)), draw(st.sampled_from((0, 0.8, 1)))
    )
    form = Cyclic(draw(st.integers(max(before, now), 256)), draw(st.booleans()), draw(st.booleans()))
    return form, codes, previous if draw(st.booleans()) else None


@several
@given(cases())
def test_the_reference_decodes_what_native_encoded(case: tuple[Cyclic, Codes, Codes | None]) -> None:
    form, codes, previous = case
    data = round_trip(form, codes, previous)
    before = None if previous is None else previous.tolist()
    assert cyclic.decode(form, data, before, codes.size) == codes.tolist()


@several
@given(cases())
def test_native_decodes_what_the_reference_encoded(case: tuple[Cyclic, Codes, Codes | None]) -> None:
    form, codes, previous = case
    data = cyclic.encode(form, codes.tolist(), None if previous is None else previous.tolist())
    np.testing.assert_array_equal(decode(form, data, previous, codes.size), codes)


@each_way
def test_every_pair_of_numbers_of_codes_comes_back(rearranged: bool, runs: bool) -> None:
    numbers = [*range(1, 19), 32, 34, 255, 256]
    for before, now in product(numbers, numbers):
        codes, previous = pair(before * 257 + now, before, now, 300)
        round_trip(Cyclic(max(before, now), rearranged, runs), codes, previous)


@each_way
def test_every_size_comes_back(rearranged: bool, runs: bool) -> None:
    for count in (*range(70), 1023, 1024, 1025, 100_003):
        codes, previous = pair(count, 8, 12, count)
        for before in (None, previous):
            round_trip(Cyclic(12, rearranged, runs), codes, before)


@each_way
def test_runs_beyond_sixteen_bits_come_back(rearranged: bool, runs: bool) -> None:
    for length in (65535, 65536, 65537, 1_000_001):
        codes = np.concatenate([np.full(length, 3, np.uint8), np.full(length, 7, np.uint8), np.array([3], np.uint8)])
        for previous in (None, np.zeros_like(codes), codes, np.full_like(codes, 7)):
            round_trip(Cyclic(8, rearranged, runs), codes, previous)


def test_codes_that_stay_cost_nearly_nothing_with_runs_and_a_bit_each_without() -> None:
    previous = pair(1, 16, 16, 1 << 20)[1]
    assert len(encode(Cyclic(16, True, True), previous, previous)) < 16 * 16
    assert len(encode(Cyclic(16, False, True), previous, previous)) < 16
    for rearranged in (False, True):
        size = len(encode(Cyclic(16, rearranged, False), previous, previous))
        assert 1 << 17 <= size < (1 << 17) + 16 * 4


def test_no_codes_are_no_bytes() -> None:
    for rearranged, runs in WAYS:
        assert round_trip(Cyclic(8, rearranged, runs), np.empty(0, np.uint8), np.empty(0, np.uint8)) == b""


def test_grouping_pays_where_codes_move_by_their_own_rules() -> None:
    random = np.random.default_rng(1)
    previous = random.integers(0, 8, 1 << 16).astype(np.uint8)
    moves = random.random(previous.size) < np.where(previous < 4, 0.001, 0.5)
    codes = np.where(moves, (previous + 1) % 8, previous).astype(np.uint8)
    sizes = {way: len(encode(Cyclic(8, *way), codes, previous)) for way in WAYS}
    assert min(sizes, key=sizes.__getitem__) == (True, True)


@several
@given(st.lists(st.sampled_from((0, 0, 1, 1, 2, 3, 5, 100, 10**4, 10**6)), min_size=1, max_size=24))
def test_no_code_of_fifteen_bits_is_shorter(counts: list[int]) -> None:
    check_lengths([min(count, 40_000) for count in counts])


def test_a_code_that_would_be_longer_than_fifteen_bits_is_the_best_that_is_not() -> None:
    fibonacci = [1, 1]
    while sum(fibonacci) < 200_000:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    assert len(fibonacci) > 17
    assert max(check_lengths(fibonacci)) == 15


def check_lengths(counts: list[int]) -> list[int]:
    """The lengths that native finds for values that occur so often."""
    codes = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    if not codes.size:
        return []
    form = Cyclic(256, False, False)
    deltas = [0] * 256
    for code, count in enumerate(counts):
        deltas[-code % 256] = count
    data = round_trip(form, codes, None)
    lengths = huffman.read(Reader(data), 256)
    assert huffman.cost(deltas, lengths) == huffman.cost(deltas, huffman.lengths(deltas))
    return lengths


# ---- damage

SMALL = [
    (Cyclic(modulus, rearranged, runs), *pair(3, before, now, 150))
    for rearranged, runs in WAYS
    for before, now, modulus in ((8, 12, 12), (256, 256, 256), (1, 2, 2))
]
small = pytest.mark.parametrize(("form", "codes", "previous"), SMALL, ids=[str(form) for form, _, _ in SMALL])


@small
def test_a_stream_cut_anywhere_is_refused(form: Cyclic, codes: Codes, previous: Codes) -> None:
    for before in (previous, None):
        data = encode(form, codes, before)
        for length in range(len(data)):
            with pytest.raises((Corrupt, Truncated)):
                decode(form, data[:length], before, codes.size)


@small
def test_a_stream_that_goes_on_is_refused(form: Cyclic, codes: Codes, previous: Codes) -> None:
    data = encode(form, codes, previous)
    for more in (b"\0", b"\1", bytes(8), bytes(9)):
        with pytest.raises(Corrupt):
            decode(form, data + more, previous, codes.size)


@small
def test_no_flipped_bit_crashes(form: Cyclic, codes: Codes, previous: Codes) -> None:
    data = encode(form, codes, previous)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        survives(form, bytes(damaged), previous, codes.size)


@several
@given(cases(), st.binary(max_size=80))
def test_anything_at_all_never_crashes(case: tuple[Cyclic, Codes, Codes | None], data: bytes) -> None:
    form, codes, previous = case
    survives(form, data, previous, codes.size)


@several
@given(cases(), st.integers(0, 200), st.booleans(), st.booleans())
def test_another_form_never_crashes(
    case: tuple[Cyclic, Codes, Codes | None], count: int, rearranged: bool, runs: bool
) -> None:
    form, codes, previous = case
    other = Cyclic(form.modulus, rearranged, runs)
    survives(other, encode(form, codes, previous), None if previous is None else np.resize(previous, count), count)


def survives(form: Cyclic, data: bytes, previous: Codes | None, count: int) -> None:
    """Decoding ends, in an error of the data or in codes that there are."""
    try:
        out = decode(form, data, previous, count)
    except (Corrupt, Truncated):
        return
    assert out.size == 0 or int(out.max()) < form.modulus


def stream(table: list[tuple[int, int]], *fields: tuple[int, int]) -> bytes:
    """A table of (gap, length), then fields of bits."""
    writer = Writer()
    for gap, length in table:
        huffman.write_gamma(gap + 1, writer)
        writer.put(length, 4)
    for value, width in fields:
        writer.put(value, width)
    return writer.bytes()


# Four codes below 4, without codes before: symbols 0 to 3 are values, 4 is a run of 2 or 3, 5 one of 4.
REFUSED = {
    "too many codes": ("too many", stream([(0, 1), (0, 2), (0, 1)], (0, 32))),
    "too few codes": ("beyond its alphabet", stream([(0, length) for length in range(1, 7)], (1, 32))),
    "a symbol beyond the alphabet": ("beyond its alphabet", stream([(6, 0)], (0, 32))),
    "a gap beyond the alphabet": ("beyond its alphabet", stream([], (1 << 15, 16), (0, 64))),
    "a gap without end": ("beyond its alphabet", stream([], (0, 64))),
    "a symbol alone and others": ("alone", stream([(0, 1), (0, 0)], (0, 32))),
    "a run first": ("without a value", stream([(0, 1), (3, 1)], (1, 1), (0, 8))),
    "a run after a run": ("without a value", stream([(0, 1), (3, 1)], (0, 1), (1, 1), (0, 1), (1, 1), (0, 9))),
    "a run of one symbol alone": ("without a value", stream([(4, 0)], (0, 8))),
    "a run that is too long": ("beyond its group", stream([(0, 1), (4, 1)], (0, 1), (1, 1), (1, 2), (0, 8))),
    "bits that are no code": ("no Huffman code", stream([(0, 0)], (1, 1), (0, 8))),
    "ones behind the end": ("after its end", stream([(0, 1), (4, 1)], (0, 1), (1, 1), (0, 2), (1, 1))),
    "bytes behind the end": ("after its end", stream([(0, 1), (4, 1)], (0, 1), (1, 1), (0, 12))),
}


def test_what_no_encoder_writes_is_corrupt() -> None:
    for why, data in REFUSED.values():
        with pytest.raises(Corrupt, match=why):
            decode(Cyclic(4, False, True), data, None, 4)


def test_the_neighbours_of_what_no_encoder_writes_are_read() -> None:
    whole = stream([(0, 1), (4, 1)], (0, 1), (1, 1), (0, 2))
    assert decode(Cyclic(4, False, True), whole, None, 4).tolist() == [0, 0, 0, 0]
    lone = stream([(1, 0)], (0, 4))
    assert decode(Cyclic(4, False, True), lone, None, 4).tolist() == [3, 3, 3, 3]


def test_a_code_of_the_parent_beyond_the_modulus_is_corrupt() -> None:
    codes = np.zeros(4, np.uint8)
    for rearranged, runs in WAYS:
        with pytest.raises(Corrupt, match="parent"):
            decode(Cyclic(4, rearranged, runs), encode(Cyclic(4, False, runs), codes, None), codes + np.uint8(4), 4)


@pytest.mark.parametrize("modulus", [0, 257, 2**32 - 1])
def test_a_modulus_out_of_range_is_refused(modulus: int) -> None:
    with pytest.raises(Corrupt):
        decode(Cyclic(modulus, True, True), b"", None, 0)
    with pytest.raises(ValueError, match="modulus"):
        encode(Cyclic(modulus, True, True), np.zeros(3, np.uint8), None)


FOUR = np.arange(4, dtype=np.uint8)
FORM: dict[str, Any] = {"modulus": 4, "rearranged": True, "runs": True}
WRONG: dict[str, Callable[[], Any]] = {
    "a code": lambda: _native.cyclic_encode(FOUR + np.uint8(1), FOUR, **FORM),
    "a code before": lambda: _native.cyclic_encode(FOUR, FOUR + np.uint8(1), **FORM),
    "too few before": lambda: _native.cyclic_encode(FOUR, FOUR[:3], **FORM),
    "none before": lambda: _native.cyclic_encode(FOUR, b"", **FORM),
    "too many before": lambda: _native.cyclic_decode(b"", bytes(5), **FORM, out=FOUR.copy()),
    "out is what stood before": lambda: _native.cyclic_decode(b"", FOUR, **FORM, out=FOUR),
    "out is the stream": lambda: _native.cyclic_decode(FOUR, None, **FORM, out=FOUR[1:]),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        call()


def test_what_may_not_be_written_is_no_place_for_codes() -> None:
    with pytest.raises(BufferError):
        _native.cyclic_decode(b"", None, **FORM, out=bytes(4))  # type: ignore[arg-type]
