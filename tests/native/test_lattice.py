"""Points in the native core: every bit is what whole tensors of torch give, on any numbers and instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import lattice as reference
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.coder import BYTE_FORMAT, CoderConfig, CodingContext
from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, ZERO_CODE, Lattice, LatticeTensor
from shrinkpoint.tensors.dtypes import tensor_bytes

Bytes = NDArray[np.uint8]
several = settings(deadline=None, max_examples=75)
SHAPES = [(0, 4), (1, 0), (1, 1), (1, 9), (9, 1), (3, 5), (1, 3000), (3000, 1), (5, 700), (700, 5)]
"""No values, one, a row, a column, matrices; within a tile and beyond one."""
SPECIAL = [0, 1 << 31, 1, 0x007FFFFF, 0x807FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001]
"""Zeros, denormals, the largest, infinities, nans."""


@dataclass(frozen=True)
class Case:
    """A matrix; `squares`, `parent` and `before` may be missing."""

    lattice: Lattice
    codes: Tensor
    parent: Tensor | None
    squares: Tensor | None
    threads: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def native(self) -> _native.Lattice:
        return self.lattice.to_native(self.shape)

    def arguments(self) -> dict[str, Any]:
        return {"squares": None if self.squares is None else tensor_bytes(self.squares), "threads": self.threads}

    def guess(self) -> tuple[Bytes, Bytes]:
        guesses, contexts = room(self, 2), room(self, 1)
        parent = None if self.parent is None else tensor_bytes(self.parent)
        _native.lattice_predict(self.native, guesses, contexts, parent=parent, **self.arguments())
        return guesses, contexts

    def tokens(self, expected: Tensor | None = None) -> tuple[Bytes, Bytes, Bytes, bool, bool]:
        """Contexts, tokens, escapes, whether codes are in range, and whether they stand for what was expected."""
        contexts, tokens = room(self, 1), room(self, 1)
        known = {"parent": self.parent, "expected": expected}
        given = {name: None if one is None else tensor_bytes(one) for name, one in known.items()}
        arguments = given | self.arguments()
        escapes, largest, *checks = _native.lattice_encode(
            self.native, tensor_bytes(self.codes), contexts, tokens, **arguments
        )
        assert largest == contexts.max(initial=0)
        return contexts, tokens, escapes, *checks

    def with_narrow_codes(self) -> Case | None:
        """The same with codes of one byte; None if they do not fit."""
        narrow = self.codes.to(torch.int8)
        return replace(self, codes=narrow) if torch.equal(narrow.to(torch.int16), self.codes) else None

    def points(self, tokens: Bytes, contexts: Bytes, guesses: Bytes, escapes: Bytes) -> tuple[Bytes, Bytes, int]:
        codes, values = guesses.copy(), room(self, 4)
        used, _ = _native.lattice_decode(self.native, tokens, contexts, escapes, codes, values, **self.arguments())
        return codes, values, used

    def values(self) -> Bytes:
        out = room(self, 4)
        _native.lattice_values(self.native, tensor_bytes(self.codes), out, **self.arguments())
        return out


def room(case: Case, itemsize: int) -> Bytes:
    return np.full(case.codes.numel() * itemsize, 0xA5, np.uint8)


def same(found: Bytes, expected: Tensor, dtype: torch.dtype) -> None:
    np.testing.assert_array_equal(found, tensor_bytes(expected.to(dtype)))


def numbers(random: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    """Bit patterns of any kind."""
    bits = random.integers(0, 1 << 32, shape, np.uint32)
    special = random.choice(np.array(SPECIAL, np.uint32), shape)
    return torch.from_numpy(np.where(random.random(shape) < 0.3, special, bits).astype(np.uint32).view(np.float32))


def lattice(
    random: np.random.Generator, law: str, shape: tuple[int, int], *, seed: int = 0, step: int = 1, spread: int = 20
) -> Lattice:
    counts = shape[0], 1 if shape[0] == 1 or law == "relative" else shape[1]
    rows, columns = (torch.from_numpy(random.integers(-spread, spread + 1, n).astype(np.int16)) for n in counts)
    return Lattice(law, rows - 40, columns, step if law == "log" else 1, seed)  # type: ignore[arg-type]


def make(law: str, shape: tuple[int, int], random: int, *, parent: str = "near", most: int = 3, **options: int) -> Case:
    generator = np.random.default_rng(random)
    made = lattice(generator, law, shape, **options)
    codes = torch.from_numpy(generator.integers(-most, most + 1, shape).astype(np.int16))
    if law == "log":
        codes = codes.masked_fill(torch.from_numpy(generator.random(shape) < 0.1), ZERO_CODE)
    squares = None
    if law == "relative":
        drawn = generator.standard_normal(shape).astype(np.float32) ** 2 * (generator.random(shape) < 0.9)
        squares = torch.from_numpy(drawn.astype(np.float32))
    known = None
    if parent == "near":
        moved = torch.from_numpy((codes.numpy() + (generator.random(shape) < 0.2)).astype(np.int16))
        known = reference.values(replace(made, seed=0), moved.clamp(-MAX_LATTICE_CODE, MAX_LATTICE_CODE), squares)
    elif parent != "none":
        known = numbers(generator, shape)
        known = known.to(torch.bfloat16) if parent == "narrow" else known
    return Case(made, codes, known, squares)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return make(
        draw(st.sampled_from(["linear", "relative", "log"])),
        draw(st.sampled_from(SHAPES)),
        draw(st.integers(0, 1 << 32)),
        parent=draw(st.sampled_from(["none", "near", "any", "narrow"])),
        most=draw(st.sampled_from([0, 3, 200, MAX_LATTICE_CODE])),
        step=draw(st.integers(1, 1024) | st.just(24)),
        seed=draw(st.just(0) | st.integers(0, 2**32 - 1)),
        spread=draw(st.sampled_from([0, 20, 900])),
    )


def agree(case: Case) -> None:
    expected, under = reference.guess(case.lattice, case.shape, case.parent, case.squares)
    guesses, contexts = case.guess()
    same(guesses, expected, torch.int16)
    same(contexts, under, torch.uint8)
    made = reference.values(case.lattice, case.codes, case.squares)
    same(case.values(), made, torch.float32)
    symbols, large = reference.tokens(case.codes, expected, under)
    told, tokens, escapes, in_range, kept = case.tokens(made)
    np.testing.assert_array_equal(told, contexts)
    same(tokens, symbols, torch.uint8)
    same(escapes, large, torch.int32)
    assert in_range and kept
    narrow = case.with_narrow_codes()
    if narrow is not None:
        same(narrow.values(), made, torch.float32)
        assert [np.asarray(part).tobytes() for part in narrow.tokens(made)] == [
            np.asarray(part).tobytes() for part in case.tokens(made)
        ]
    codes, values, used = case.points(tokens, contexts, guesses, escapes)
    assert used == large.numel()
    same(codes, reference.points(symbols, under, expected, large), torch.int16)
    same(codes, case.codes, torch.int16)
    same(values, made, torch.float32)


@several
@given(cases())
def test_native_says_what_torch_says(case: Case) -> None:
    agree(case)


@pytest.mark.parametrize("law", ["linear", "relative", "log"])
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(law: str) -> None:
    case = make(law, (90, 3001), 7, most=200, seed=5, step=24)  # several pieces, rows across tiles
    for most in (0, 1, 2):
        _native._use_simd(most)
        for threads in (1, 3):
            agree(replace(case, threads=threads))
            agree(replace(case, threads=threads, parent=numbers(np.random.default_rng(most), case.shape)))


@pytest.mark.parametrize("law", ["linear", "relative"])
@pytest.mark.parametrize("width", [32, 16])
def test_the_nearest_point_is_torch_s_and_an_old_one_is_held(law: str, width: int) -> None:
    for shape in SHAPES:
        case = make(law, shape, 3, seed=9 * (shape[0] > 3))
        seconds = None if law == "linear" else make("log", shape, 3, most=2, step=24)
        seconds = seconds and replace(seconds, codes=seconds.codes.clamp(min=-2))  # none is zero
        squares = None if seconds is None else reference.values(seconds.lattice, seconds.codes)
        values = reference.values(case.lattice, case.codes, squares) * 1.07
        values = values.to(torch.bfloat16) if width == 16 else values
        before = (case.codes + torch.randint(-1, 2, case.shape, generator=torch.Generator().manual_seed(1))).short()
        for old, hold in ((None, 0.5), (before, 0.5), (before, 0.7), (before, 1.5)):
            expected, fits = reference.nearest(case.lattice, values, squares, old, hold)
            assert fits
            arguments: dict[str, Any] = {"hysteresis": hold, "threads": case.threads}
            if seconds is not None:
                codes = seconds.with_narrow_codes() or seconds
                arguments |= {"seconds": seconds.native, "second_codes": tensor_bytes(codes.codes)}
            for dtype in (torch.int16, torch.int8) if old is not None else (torch.int16,):
                arguments["previous"] = None if old is None else tensor_bytes(old.to(dtype))
                for code_bytes in (2, 1):
                    codes_out = room(case, code_bytes)
                    fitting = _native.lattice_quantize(case.native, tensor_bytes(values), codes_out, **arguments)
                    narrow = torch.equal(expected.to(torch.int8).to(torch.int16), expected)
                    assert fitting == (1 if code_bytes == 1 and narrow else 2) or not expected.numel()
                    if fitting == code_bytes:
                        same(codes_out, expected.to(torch.int8 if code_bytes == 1 else torch.int16), None)


@pytest.mark.parametrize("far", [40000.0, -32766.0, float("inf"), float("nan")])
def test_a_value_that_no_code_reaches_is_told(far: float) -> None:
    flat = Lattice("linear", torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.int16)).to_native((1, 5000))
    values, codes = np.zeros(5000, np.float32), np.zeros(10000, np.uint8)
    values[4000] = 32765.75
    assert not _native.lattice_quantize(flat, tensor_bytes(torch.from_numpy(values)) * 0 + 255, codes)
    assert _native.lattice_quantize(flat, values.view(np.uint8), codes) == 2 and codes.view(np.int16)[4000] == 32766
    assert _native.lattice_quantize(flat, values.view(np.uint8), codes[:5000]) == 2  # codes of one byte are too narrow
    values[3000] = far
    assert not _native.lattice_quantize(flat, values.view(np.uint8), codes)


def test_codes_that_stand_for_other_values_are_told() -> None:
    for law in ("linear", "relative", "log"):
        case = make(law, (3, 1500), 1, seed=3)
        made = reference.values(case.lattice, case.codes, case.squares)
        for dtype in (torch.float32, torch.bfloat16):
            expected = made.to(dtype)
            assert case.tokens(expected)[3:] == (True, True)
            expected.view(torch.int16)[2, 1400] ^= 1
            assert case.tokens(expected)[3:] == (True, False)


@pytest.mark.parametrize("code", [-32768, -32767, 32767])
def test_codes_that_no_reader_takes_are_told(code: int) -> None:
    case = make("linear", (3, 1500), 1)
    case.codes[1, 1300] = code
    assert not case.tokens()[3]
    guesses, contexts = case.guess()
    _, tokens, escapes, *_ = case.tokens()
    with pytest.raises(ValueError, match="too far out"):
        case.points(tokens, contexts, guesses, escapes)


def test_more_and_fewer_escapes_than_tokens_that_say_so_are_noticed() -> None:
    case = make("linear", (90, 3001), 7, parent="none", most=MAX_LATTICE_CODE)
    guesses, contexts = case.guess()
    _, tokens, escapes, *_ = case.tokens()
    assert escapes.size > 4 * 200_000
    more = np.concatenate([escapes, escapes[:4]])
    assert case.points(tokens, contexts, guesses, more)[2] == escapes.size // 4
    for fewer in (escapes[:-4], escapes[:4], escapes[:0]):
        with pytest.raises(ValueError, match="escapes"):
            case.points(tokens, contexts, guesses, fewer.copy())
    huge = np.full(escapes.size // 4, -(2**31), np.int32)
    with pytest.raises(ValueError, match="too far out"):
        case.points(tokens, contexts, guesses, huge.view(np.uint8))


def _shorts(*numbers: int) -> Bytes:
    return np.array(numbers, np.int16).view(np.uint8)


FLAT = _native.Lattice(_shorts(0, 0), _shorts(0), 2, 3)


def _bytes(count: int) -> Bytes:
    return np.zeros(count, np.uint8)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_roots_of_codes_are_the_roots_of_the_values_they_stand_for(most: int) -> None:
    """Within all octaves and at their ends, where the octave stays, and of zero."""
    _native._use_simd(most)
    generator = torch.Generator().manual_seed(3)
    rows = torch.arange(-960, 961, 30, dtype=torch.int16)
    codes = torch.randint(ZERO_CODE, 128, (rows.numel(), 40), generator=generator).to(torch.int8)
    seconds = Lattice("log", rows, torch.arange(40, dtype=torch.int16), step=3)
    values = LatticeTensor(codes, seconds).dequantize(torch.float32)
    relative = Lattice("relative", torch.zeros(rows.numel(), dtype=torch.int16), torch.zeros(1, dtype=torch.int16))
    shape, out = (rows.numel(), 40), np.empty((2, codes.numel()), np.float32)
    for squares, place in ((tensor_bytes(values), out[0]), ((seconds.to_native(shape), tensor_bytes(codes)), out[1])):
        multiples = tensor_bytes(torch.ones_like(codes))
        _native.lattice_values(relative.to_native(shape), multiples, place.view(np.uint8), squares=squares)
    assert (out[0] == np.sqrt(values.numpy().astype(np.float64)).astype(np.float32).reshape(-1)).all()
    assert (out[0].view(np.int32) == out[1].view(np.int32)).all() and (out == 0).any()


BOTH = _bytes(24)


def _decode_codes(parts: list[Any], tokens: Bytes | None = None) -> list[Bytes | None]:
    config = CoderConfig("codes", predictor="base")
    tokens = _bytes(6) if tokens is None else tokens
    side, coded = config.encode(BYTE_FORMAT, tokens, CodingContext(base=_bytes(6)), 1)
    return _native.lattice_decode_codes(config.native_model(BYTE_FORMAT), side, coded, 6, 0, parts)


def test_a_difference_without_its_escape_is_refused() -> None:
    tokens = np.array([0, 0, 0x80, 0, 0, 0], np.uint8)
    with pytest.raises(ValueError, match="more large differences than escapes"):
        _decode_codes([(FLAT, 0, _bytes(6), None, None)], tokens)


def test_a_code_beyond_all_others_is_refused() -> None:
    parent = np.full(6, 2**15 - 2, np.int16).view(np.uint8)
    tokens = np.array([0, 0, 0, 0, 0, 3], np.uint8)
    with pytest.raises(ValueError, match="too far out"):
        _decode_codes([(FLAT, 0, _bytes(6), (FLAT, parent), None)], tokens)


WRONG: dict[str, Callable[[], Any]] = {
    "too few rows": lambda: _native.Lattice(_shorts(0), _shorts(0), 2, 3),
    "too few columns": lambda: _native.Lattice(_shorts(0, 0), _shorts(0, 0), 2, 3),
    "half an exponent": lambda: _native.Lattice(_bytes(5), _shorts(0), 2, 3),
    "more places than bytes can be counted": lambda: _native.Lattice(_shorts(0, 0, 0, 0), _shorts(0), 4, 1 << 62),
    "no step": lambda: _native.Lattice(_shorts(0), _shorts(0), 1, 3, powers=True, step=0),
    "too large a step": lambda: _native.Lattice(_shorts(0), _shorts(0), 1, 3, powers=True, step=4097),
    "too few guesses": lambda: _native.lattice_predict(FLAT, _bytes(10), _bytes(6)),
    "too many contexts": lambda: _native.lattice_predict(FLAT, _bytes(12), _bytes(7)),
    "a parent of another size": lambda: _native.lattice_predict(FLAT, _bytes(12), _bytes(6), parent=_bytes(20)),
    "squares of another size": lambda: _native.lattice_predict(FLAT, _bytes(12), _bytes(6), squares=_bytes(12)),
    "codes of another size": lambda: _native.lattice_encode(FLAT, _bytes(7), _bytes(6), _bytes(6)),
    "values of another size": lambda: _native.lattice_encode(
        FLAT, _bytes(12), _bytes(6), _bytes(6), expected=_bytes(23)
    ),
    "too few tokens": lambda: _native.lattice_decode(FLAT, _bytes(5), _bytes(6), _bytes(0), _bytes(12), _bytes(24)),
    "too few codes for a chunk": lambda: _decode_codes([(FLAT, 0, _bytes(5), None, None)]),
    "positions behind the last": lambda: _decode_codes([(FLAT, 3, _bytes(6), None, None)]),
    "no part of a lattice": lambda: _decode_codes([]),
    "a part without a lattice": lambda: _decode_codes([(None, 0, _bytes(6), None, None)]),
    "codes in the place of squares": lambda: _decode_codes([(FLAT, 0, BOTH[:6], None, BOTH)]),
    "codes in the place of others": lambda: _decode_codes([(FLAT, 0, BOTH[1:7], (FLAT, BOTH[:6]), None)]),
    "codes in the place of wide ones": lambda: _decode_codes([(FLAT, 0, BOTH[:6], (FLAT, BOTH[:12]), None)]),
    "half an escape": lambda: _native.lattice_decode(FLAT, _bytes(6), _bytes(6), _bytes(2), _bytes(12), _bytes(24)),
    "too little room": lambda: _native.lattice_values(FLAT, _bytes(12), _bytes(20)),
    "values that are not aligned": lambda: _native.lattice_values(FLAT, _bytes(12), _bytes(28)[1:25]),
    "no values": lambda: _native.lattice_quantize(FLAT, _bytes(0), _bytes(12)),
    "old codes of another size": lambda: _native.lattice_quantize(FLAT, _bytes(24), _bytes(12), previous=_bytes(7)),
    "the nearest of powers": lambda: _native.lattice_quantize(
        _native.Lattice(_shorts(0), _shorts(0), 1, 6, powers=True), _bytes(24), _bytes(12)
    ),
}


def test_a_wrong_argument_is_refused() -> None:
    for call in WRONG.values():
        with pytest.raises(ValueError):
            call()


def test_what_is_written_shares_no_memory_with_what_is_read() -> None:
    both = _bytes(24)
    for call in (
        lambda: _native.lattice_values(FLAT, both[:12], both),
        lambda: _native.lattice_quantize(FLAT, both, both[:12]),
        lambda: _native.lattice_predict(FLAT, both[:12], both[6:12]),
        lambda: _native.lattice_encode(FLAT, both[:12], _bytes(6), both[6:12]),
        lambda: _native.lattice_decode(FLAT, _bytes(6), both[:6], _bytes(0), _bytes(12), both),
    ):
        with pytest.raises(ValueError, match="shares memory"):
            call()


def test_bits_do_not_depend_on_what_the_thread_does_with_denormals() -> None:
    case = make("linear", (2, 100), 4, parent="any")
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    try:
        flushed = [part.tobytes() for part in case.guess()]
    finally:
        torch.set_flush_denormal(False)
    assert flushed == [part.tobytes() for part in case.guess()]
