"""Both ends know the same random places, and nothing but values crosses."""

from __future__ import annotations

import math

import pytest
import torch
from contracts.compressor import CompressorContract, noise
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.comm import Compressor, CompressorContext, RandomK, Uniform
from shrinkpoint.comm.compressors import sparse

CPU = torch.device("cpu")


class TestRandomK(CompressorContract):
    compressors = (RandomK(0.5), RandomK(0.1, scaled=True), RandomK(0.02, "bf16", seed=9), RandomK(0.3, Uniform(4, 64)))
    dense = False

    def encode_torch(self, compressor: Compressor, x: Tensor, context: CompressorContext) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "random_indices", places_by_torch)
            patch.setattr(sparse, "gather_values", sparse._gather_values_torch)
            return compressor.encode(x, context)

    def decode_torch(self, compressor: Compressor, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "random_indices", places_by_torch)
            return compressor.decode(wire, out, context)


def places_by_torch(n: int, k: int, start: int, device: torch.device) -> Tensor:
    return sparse._random_indices_torch(n, k, start, device) if k < n else torch.arange(n)


def decoded(compressor: RandomK, x: Tensor, key: int = 0) -> Tensor:
    context = CompressorContext(key=key)
    return compressor.decode(compressor.encode(x, context), torch.full_like(x, 7.0), context)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 6000), st.floats(0, 1), st.integers(0, (1 << 32) - 1))
def test_indices_are_as_many_as_wanted_ascending_and_the_same_by_both_ways_of_computing(n, part, start):
    k = max(1, min(n - 1, int(n * part)))
    places = sparse.random_indices(n, k, start, CPU)
    assert torch.equal(places, sparse._random_indices_torch(n, k, start, CPU))
    assert places.numel() == k and (places[1:] > places[:-1]).all() and places[0] >= 0 and places[-1] < n


def test_the_indices_are_those_that_crossed():
    x, compressor, context = noise((30, 40)), RandomK(0.1), CompressorContext(key=5)
    places = compressor.indices(compressor.encode(x, context), x.shape, context)
    out = decoded(compressor, x, key=5).view(-1)
    assert out.nonzero().flatten().tolist() == places.tolist() and places.numel() == 120
    assert bits(out[places]) == bits(x.view(-1)[places])


def test_every_key_and_every_seed_has_its_own_indices():
    x = torch.ones(1000)
    seen = [decoded(RandomK(0.1, seed=seed), x, key) for seed in range(4) for key in range(50)]
    shared = torch.stack(seen) @ torch.stack(seen).T - 100 * torch.eye(200)
    # Of 100 of 1000 places two sets share 10 on average, with a standard deviation of 2.85.
    assert shared.max() < 28 and abs(shared.sum() / (200 * 199) - 10) < 0.2


def test_every_index_is_as_likely_as_any_other():
    count = sum(decoded(RandomK(0.1), torch.ones(300), key) for key in range(2000))
    # 200 on average, with a standard deviation of 13.4.
    assert count.sum() == 2000 * 30 and count.min() > 140 and count.max() < 260 and 11 < count.std() < 16


def test_neighbours_are_chosen_no_more_often_together_than_others():
    taken = torch.stack([decoded(RandomK(0.2), torch.ones(500), key) for key in range(400)])
    for apart in (1, 2, 64):
        together = (taken[:, apart:] * taken[:, :-apart]).mean()
        assert abs(together - 0.2 * 99 / 499) < 0.004


def test_the_mean_of_scaled_messages_is_the_tensor():
    x = noise((50,))
    for key in range(5):
        assert torch.equal(decoded(RandomK(0.2, scaled=True), x, key), 5 * decoded(RandomK(0.2), x, key))
    mean = sum(decoded(RandomK(0.2, scaled=True), x, key) for key in range(2500)) / 2500
    # A value's standard deviation is 2 / 50 of it.
    assert ((mean - x) / x).abs().max() < 0.16


def test_nothing_but_values_crosses():
    assert RandomK(0.1).wire_bytes((1000,), torch.float32) == 400
    assert RandomK(0.1, "bf16").wire_bytes((10, 100), torch.float32) == 200
    assert RandomK(0.1).wire_bytes((1000,), torch.float16) == 200
    assert RandomK(0.1, Uniform(4)).wire_bytes((1000,), torch.float32) == 8 + 64


def test_a_value_that_is_not_finite_and_was_not_picked_makes_the_first_one_nan():
    x, compressor, context = noise((1000,)), RandomK(0.1), CompressorContext(key=3)
    places = compressor.indices(compressor.encode(x, context), x.shape, context)
    picked, other = int(places[50]), next(i for i in range(1000) if i not in set(places.tolist()))
    for bad in (math.nan, math.inf, -math.inf):
        for place, first_is_nan in ((picked, False), (other, True)):
            y = x.clone()
            y[place] = bad
            out = decoded(compressor, y, key=3)[places]
            assert bool(out[0].isnan()) == first_is_nan and out[1:50].isfinite().all()
            assert torch.equal(out[50].isfinite(), y[places[50]].isfinite())
