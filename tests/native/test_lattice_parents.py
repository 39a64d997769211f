"""Parents and second moments that are given as codes: every bit is that of the same values given as floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lattice_records import lattice_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.coder import BYTE_FORMAT, CoderConfig, CodingContext
from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, ZERO_CODE, Lattice, LatticeTensor
from shrinkpoint.tensors.dtypes import tensor_bytes

several = settings(deadline=None, max_examples=75)
SHAPES = [(1, 0), (1, 1), (1, 9), (9, 1), (3, 5), (1, 3000), (3000, 1), (5, 700), (700, 5)]
"""No values, one, a row, a column, matrices; within a tile and beyond one."""


@dataclass(frozen=True)
class Pair:
    """A tensor, its parent, and the second moment that it is relative to."""

    tensor: LatticeTensor
    parent: LatticeTensor
    second: LatticeTensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.codes.shape[0], self.tensor.codes.shape[1]

    def moments(self) -> Tensor | None:
        return None if self.second is None else self.second.dequantize(torch.float32)

    def as_codes(self, tensor: LatticeTensor | None) -> Any:
        return None if tensor is None else (tensor.lattice.to_native(self.shape), tensor_bytes(tensor.codes))

    def encode(self, parent: Any, squares: Any, threads: int = 1) -> list[object]:
        """Contexts, tokens and escapes, and the digests of values and parent."""
        contexts, tokens = (np.full(self.tensor.codes.numel(), 0xA5, np.uint8) for _ in range(2))
        digest, base = _native.Hasher(), _native.Hasher()
        escapes, _, in_range, same = _native.lattice_encode(
            self.tensor.lattice.to_native(self.shape),
            tensor_bytes(self.tensor.codes),
            contexts,
            tokens,
            parent=parent,
            squares=squares,
            digest=digest,
            base=base,
            threads=threads,
        )
        assert in_range and same
        return [contexts.tobytes(), tokens.tobytes(), escapes.tobytes(), digest.hexdigest(), base.hexdigest()]

    def agree(self, threads: int = 1) -> None:
        moments, parent = self.moments(), self.parent.dequantize(torch.float32)
        squares = None if moments is None else tensor_bytes(moments)
        found = self.encode(self.as_codes(self.parent), self.as_codes(self.second), threads)
        assert found == self.encode(tensor_bytes(parent), squares)
        values = self.tensor.dequantize(torch.float32, moments)
        assert found[3:] == [_native.xxh3_128(tensor_bytes(values)), _native.xxh3_128(tensor_bytes(parent))]
        self.decode(found, values, threads)
        if values.numel() and not found[2]:
            for overwrite in (False, True):
                self.decode_tiles(found, threads, overwrite)

    def decode(self, found: list[object], values: Tensor, threads: int) -> None:
        """From guesses and tokens to codes of either width."""
        count, native = values.numel(), self.tensor.lattice.to_native(self.shape)
        contexts, tokens, escapes = (np.frombuffer(part, np.uint8).copy() for part in found[:3])  # type: ignore[arg-type]
        guesses, again = np.zeros(2 * count, np.uint8), np.zeros(count, np.uint8)
        base, digest = _native.Hasher(), _native.Hasher()
        parent, squares = self.as_codes(self.parent), self.as_codes(self.second)
        _native.lattice_predict(native, guesses, again, parent=parent, squares=squares, base=base, threads=threads)
        assert again.tobytes() == found[0] and base.hexdigest() == found[4]
        alone, contexts_alone = np.zeros_like(guesses), np.zeros_like(again)  # without the parent's values
        _native.lattice_predict(native, alone, contexts_alone, parent=parent, squares=squares, threads=threads)
        assert np.array_equal(alone, guesses) and np.array_equal(contexts_alone, again)
        narrow, out = np.zeros(count, np.uint8), np.zeros(4 * count, np.uint8)
        used, fits = _native.lattice_decode(
            native,
            tokens,
            contexts,
            escapes,
            guesses,
            out,
            codes=narrow,
            squares=squares,
            digest=digest,
            threads=threads,
        )
        assert used == escapes.size // 4 and digest.hexdigest() == found[3]
        assert out.tobytes() == tensor_bytes(values).tobytes()
        assert torch.equal(torch.from_numpy(guesses.view(np.int16)), self.tensor.codes.to(torch.int16).reshape(-1))
        assert fits == (self.tensor.narrow().codes.dtype == torch.int8)
        if fits:
            assert torch.equal(torch.from_numpy(narrow.view(np.int8)), self.tensor.narrow().codes.reshape(-1))

    def decode_tiles(self, found: list[object], threads: int, overwrite: bool) -> None:
        """From coded bytes to codes, of the tensor's two thirds; into the parent's codes if these have one byte."""
        contexts, tokens = (np.frombuffer(part, np.uint8) for part in found[:2])  # type: ignore[call-overload]
        config = CoderConfig("codes", predictor="base", top=int(contexts.max()), chunk=1 << 15)
        side, coded = config.encode(BYTE_FORMAT, tokens, CodingContext(base=contexts), 1)
        ends = [0, tokens.size // 3, tokens.size]
        parts: list[Any] = []
        for first, last in pairwise(ends):
            parent, second = (None if source is None else self.part(source, first, last) for source in self.sources)
            assert parent is not None
            narrow = parent[1] if overwrite and parent[1].size == last - first else np.zeros(last - first, np.uint8)
            parts.append((self.tensor.lattice.to_native(self.shape), first, narrow, parent, second))
        wide = _native.lattice_decode_codes(
            config.native_model(BYTE_FORMAT), side, coded, tokens.size, 0, parts, chunk=config.chunk, threads=threads
        )
        expected = self.tensor.codes.to(torch.int16).reshape(-1).numpy()
        for (first, last), part, codes in zip(pairwise(ends), parts, wide, strict=True):
            fits = bool((np.abs(expected[first:last] + 0.5) < 128).all())
            assert (codes is None) == fits
            decoded = part[2].view(np.int8) if codes is None else codes.view(np.int16)
            assert np.array_equal(decoded, expected[first:last])

    @property
    def sources(self) -> tuple[LatticeTensor | None, LatticeTensor | None]:
        return self.parent, self.second

    def part(self, tensor: LatticeTensor, first: int, last: int) -> tuple[_native.Lattice, Any]:
        codes = tensor.codes.reshape(-1)[first:last].clone()
        return tensor.lattice.to_native(self.shape), tensor_bytes(codes)


def points(random: np.random.Generator, grid: Lattice, shape: tuple[int, int], most: int) -> LatticeTensor:
    codes = torch.from_numpy(random.integers(-most, most + 1, shape).astype(np.int16))
    if grid.spacing == "log":
        codes = codes.masked_fill(torch.from_numpy(random.random(shape) < 0.1), ZERO_CODE)
    made = LatticeTensor(codes, grid)
    return made.narrow() if random.random() < 0.7 else made


def make(law: str, shape: tuple[int, int], random: int, *, same: bool, most: int = 3, spread: int = 20) -> Pair:
    generator = np.random.default_rng(random)
    seed = 0 if law == "log" else int(generator.integers(0, 3)) * 77
    options = {"at": -40, "spread": spread, "random": random}
    grid = lattice_of(law, shape, seed=seed, step=int(generator.integers(1, 60)), **options)
    parent_law = "linear" if law == "relative" else law
    other = lattice_of(parent_law, shape, seed=5, step=24, **(options | {"random": random + 1}))
    tensor = points(generator, grid, shape, most)
    moved = torch.from_numpy(generator.integers(-1, 2, shape).astype(np.int16))
    codes = (tensor.codes.to(torch.int16) + moved).clamp(-MAX_LATTICE_CODE, MAX_LATTICE_CODE)
    parent = LatticeTensor(codes, grid) if same and law != "relative" else points(generator, other, shape, most)
    second = None
    if law == "relative":
        second = points(generator, lattice_of("log", shape, step=24, **options), shape, 5)
    return Pair(tensor, parent, second)


@several
@given(
    st.sampled_from(["linear", "relative", "log"]),
    st.sampled_from(SHAPES),
    st.integers(0, 1 << 32),
    st.booleans(),
    st.sampled_from([0, 3, 200, MAX_LATTICE_CODE]),
    st.sampled_from([0, 20, 400]),
)
def test_codes_predict_as_their_values_do(
    law: str, shape: tuple[int, int], random: int, same: bool, most: int, spread: int
) -> None:
    make(law, shape, random, same=same, most=most, spread=spread).agree()


@pytest.mark.parametrize("law", ["linear", "relative", "log"])
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(law: str) -> None:
    for most in (0, 1, 2):
        _native._use_simd(most)
        for threads in (1, 3):
            for same in (True, False):
                make(law, (90, 3001), 7, same=same, most=200).agree(threads)


def test_the_largest_codes_of_the_same_lattice_are_their_own_guesses() -> None:
    pair = make("linear", (40, 3000), 3, same=True, most=MAX_LATTICE_CODE)
    for seed in (0, 9):
        grid = replace(pair.tensor.lattice, seed=seed)
        Pair(replace(pair.tensor, lattice=grid), replace(pair.parent, lattice=grid), None).agree(2)


@pytest.mark.parametrize("law", ["linear", "log"])
@pytest.mark.parametrize("share", [0.0, 0.0003, 0.05])
@pytest.mark.parametrize("most", [3, 127])
def test_few_codes_move_from_a_parent_of_one_byte(law: str, share: float, most: int) -> None:
    """Some of them move beyond a byte, where the parent has the largest codes."""
    shape, random = (90, 3001), np.random.default_rng(11)
    pair = make(law, shape, 7, same=True, most=most)
    before = torch.from_numpy(random.integers(-most, most + 1, shape).astype(np.int16))
    moves = random.choice([-2, -1, 1, 2], shape) * (random.random(shape) < share)
    guess = before if law == "linear" else torch.where(before == ZERO_CODE, ZERO_CODE, 0)
    codes = (guess + torch.from_numpy(moves)).to(torch.int16)
    parent = LatticeTensor(before, pair.parent.lattice).narrow()
    assert parent.codes.dtype == torch.int8
    for level, threads in product((0, 1, 2), (1, 3)):
        _native._use_simd(level)
        Pair(LatticeTensor(codes, pair.tensor.lattice).narrow(), parent, None).agree(threads)


def refusal(pair: Pair, parent: Any, squares: Any) -> str:
    """The message of the error; the error itself would keep native objects alive."""
    try:
        pair.encode(parent, squares)
    except ValueError as error:
        return str(error)
    return ""


def test_a_lattice_of_another_size_is_refused() -> None:
    pair, other = make("linear", (3, 5), 1, same=True), make("linear", (5, 5), 1, same=True)
    assert "another size" in refusal(pair, other.as_codes(other.parent), None)
    assert "another size" in refusal(pair, None, other.as_codes(other.parent))
    too_long = pair.tensor.lattice.to_native((3, 5)), np.zeros(31, np.uint8)
    assert "number of bytes" in refusal(pair, too_long, None)
