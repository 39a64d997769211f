"""Codes under the parent's codes come near to what they hold that is new."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from shrinkpoint import _native
from shrinkpoint._native import Model, Predictor, Tokens

Codes = NDArray[np.uint8]
COUNT = 1 << 18


def model(top: int = 0) -> Model:
    out = Model()
    out.tokens, out.predictor, out.top = Tokens.CODES, Predictor.BASE, top
    return out


def size(top: int, codes: Codes, **arrays: NDArray[np.float32] | Codes) -> int:
    return sum(part.nbytes for part in _native.encode(model(top), codes, **arrays))


def entropy(codes: Codes, context: NDArray[np.int64]) -> float:
    """Bytes that the codes need at least, each under its context."""
    counts = np.bincount(context * 256 + codes, minlength=(int(context.max()) + 1) * 256).reshape(-1, 256)
    used, totals = counts[counts > 0], counts.sum(1)
    return float((totals[totals > 0] * np.log2(totals[totals > 0])).sum() - (used * np.log2(used)).sum()) / 8


def moved(bins: int, push: NDArray[np.float64]) -> tuple[Codes, Codes]:
    """Codes of weights before and after each went a way of its own."""
    weights = np.random.default_rng(bins).standard_t(5, COUNT)
    borders = np.quantile(weights, np.linspace(0, 1, bins + 1)[1:-1])
    before, after = (np.searchsorted(borders, one).astype(np.uint8) for one in (weights, weights + push))
    return before, after


@pytest.mark.parametrize("bins", [2, 8, 18, 34, 130, 256])
def test_codes_take_what_is_new_in_them_and_little_more(bins: int) -> None:
    before, after = moved(bins, 0.02 * np.random.default_rng(1).standard_normal(COUNT))
    bound = entropy(after, before.astype(np.int64))
    for top in (0, bins - 1):
        assert bound < size(top, after, base=before) < 1.02 * bound + 700


def test_another_number_of_codes_keeps_what_the_parent_says() -> None:
    before, _ = moved(8, np.zeros(COUNT))
    _, after = moved(12, np.zeros(COUNT))
    after = np.searchsorted(np.linspace(0, 12, 8)[1:-1], after).astype(np.uint8)
    bound = entropy(after, before.astype(np.int64))
    assert size(0, after, base=before) < 1.02 * bound + 700


@pytest.mark.parametrize("bins", [8, 18, 34])
def test_moments_say_where_codes_go(bins: int) -> None:
    random = np.random.default_rng(2)
    moment1, deviation = (random.standard_normal(COUNT).astype(np.float32) * np.float32(1e-3) for _ in range(2))
    moment2 = deviation * deviation
    push = -0.1 * np.clip(moment1 / np.sqrt(moment2 + 1e-12), -3, 3) * random.random(COUNT)
    before, after = moved(bins, push)
    alone = size(bins - 1, after, base=before)
    with_moments = size(bins - 1, after, base=before, moment1=moment1, moment2=moment2)
    assert with_moments < 0.9 * alone
    # Fewer codes in the contexts leave more of them to the moments.
    assert with_moments <= size(0, after, base=before, moment1=moment1, moment2=moment2)


@pytest.mark.parametrize(("contexts", "top"), [(1, 0), (2, 1), (17, 255), (40, 20), (256, 0)])
def test_all_instruction_sets_write_and_read_the_same_codes(contexts: int, top: int) -> None:
    """Of codes that are mostly the parent's or not, under few contexts or many, with few symbols or all of them."""
    for shift in [0.0, 0.0002, 0.01, 0.3, 1.0]:
        for unlike in [0, 3 * 2048]:
            random = np.random.default_rng(contexts)
            share = 1 / np.arange(1, contexts + 1)
            before = random.choice(contexts, 5 * 2048 * 64 + 77, p=share / share.sum()).astype(np.uint8)
            moves = random.geometric(0.5, before.size) * random.choice([-1, 1], before.size)
            after = (before + moves * (random.random(before.size) < shift)).astype(np.uint8)
            after[:unlike] = random.integers(0, 256, unlike)  # what is frequent later is not frequent from the start
            widest = _native._use_simd(2)
            try:
                written = {}
                for level in range(widest + 1):
                    _native._use_simd(level)
                    side, codes = _native.encode(model(top), after, base=before)
                    written[level] = side.tobytes() + codes.tobytes()
                    again = np.empty_like(after)
                    _native.decode(model(top), side, codes, again, base=before)
                    assert np.array_equal(again, after)
            finally:
                _native._use_simd(widest)
            assert len(set(written.values())) == 1
