"""Buckets of one sign and one power of two: which are kept, and what their values become."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from contracts.quantizer import FINITE, StableQuantizerSuite
from helpers.exponents import quantize_exponents
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.exponent_buckets import ExponentBuckets, bucket_ids

REPRESENTATIVES = ("middle", "mean")


def only(x: Tensor, bits: int, representative: str = "middle") -> CodebookTensor:
    (one,) = quantize_exponents([x], bits, representative=representative)
    assert one.residual
    return one


def moves(one: CodebookTensor) -> Tensor:
    """What is added to the parent's values."""
    return replace(one, residual=False).dequantize(torch.float32)


def bucket(value: float) -> tuple[int, bool] | None:
    """The exponent and whether it is negative; None for zero."""
    return (math.frexp(value)[1], value < 0) if value else None


def kept_of(values: list[float], x: int) -> set[tuple[int, bool]]:
    """The paper's choice, of values one by one."""
    counts = Counter(bucket(value) for value in values if value)
    order = sorted(counts, key=lambda one: (-one[0], -counts[one], one[1]))
    return {*order[: 2**x - 1]}


def octaves(count: int = 4000, seed: int = 0, least: int = -149, most: int = 128) -> Tensor:
    """Values of both signs with exponents of a range, equally often."""
    random = torch.Generator().manual_seed(seed)
    exponent = torch.randint(least + 1, most + 1, (count,), generator=random)
    sign = torch.randint(0, 2, (count,), generator=random) * 2 - 1
    return torch.ldexp((0.5 + torch.rand(count, generator=random, dtype=torch.float64) / 2) * sign, exponent).float()


class Exponents(StableQuantizerSuite):
    """What is quantized are differences, so the suite gets them as values; the number of bins is x."""

    first = 2
    bins = (1, 2, 3, 7)
    refused = ()
    representative = "middle"

    def suited(self, x):
        return x.float()

    def quantize(self, x: Tensor, bins: int):
        return replace(only(x, min(bins, 7), self.representative), residual=False)

    def again(self, x, symbols):
        return self.quantize(x, 16)

    def has_the_form(self, x, bins, symbols):
        assert 1 <= symbols.bins <= 2**bins - 1
        super().has_the_form(x, symbols.bins, symbols)

    def takes_the_nearest(self, x, symbols):
        """Not so: a value takes the center of its octave, though that of the next one may be nearer."""
        centers = [0.0, 0.0, *symbols.centers.tolist()]
        for value, code in zip(x.detach().reshape(-1).tolist(), symbols.codes.reshape(-1).tolist(), strict=True):
            assert not code or bucket(value) == bucket(centers[code])

    def allowed(self, x, symbols):
        """Less than half of itself for the middle, less than itself for the mean, all of it where it is not kept."""
        share = 0.5 if self.representative == "middle" else 1.0
        return torch.where(symbols.codes == 0, 1.0, share) * x.abs()


class TestMiddle(Exponents):
    pass


class TestMean(Exponents):
    representative = "mean"


# which are kept


@settings(deadline=None, max_examples=50)
@given(
    st.lists(FINITE | st.sampled_from([0.0, -0.0, 1.0, -1.5, 2.0, -2.0, 3.0]), max_size=60),
    st.integers(1, 8),
    st.sampled_from(REPRESENTATIVES),
)
def test_the_buckets_with_the_largest_exponents_are_kept_and_of_two_signs_the_fuller(values, x, representative):
    values = torch.tensor(values).tolist()
    kept, found = kept_of(values, x), moves(only(torch.tensor(values), x, representative)).tolist()
    assert [bucket(value) if bucket(value) in kept else None for value in values] == [bucket(one) for one in found]


def test_of_two_signs_the_fuller_is_kept_and_the_positive_where_they_are_equally_full():
    x = torch.tensor([1.0, 1.5, -1.0, -1.25, -1.5, 0.5, -0.5])
    assert moves(only(x, 1)).tolist() == [0, 0, -1.25, -1.25, -1.25, 0, 0]
    assert moves(only(-x, 1)).tolist() == [0, 0, 1.25, 1.25, 1.25, 0, 0]
    assert moves(only(x, 2)).tolist() == [1.25, 1.25, -1.25, -1.25, -1.25, 0.5, 0]
    assert moves(only(-x, 2)).tolist() == [-1.25, -1.25, 1.25, 1.25, 1.25, 0, 0.5]


@pytest.mark.parametrize("representative", REPRESENTATIVES)
def test_x_bits_are_two_to_the_x_less_one_buckets(representative):
    for x in range(1, 9):
        one = only(octaves(), x, representative)
        used = one.codes.unique().numel()
        assert used == 2**x and one.num_codes <= 256
        assert one.first_code == (2 if x < 8 else 0)


def test_all_255_buckets_of_eight_bits_and_zero_are_told_apart():
    x = torch.cat([octaves(), torch.zeros(10)])
    one, seven = only(x, 8), only(x, 7)
    kept = kept_of(x.tolist(), 8)
    assert len(kept) == 255
    found = moves(one).tolist()
    assert [bucket(value) if bucket(value) in kept else None for value in x.tolist()] == [bucket(m) for m in found]
    assert (one.centers.diff() > 0).all() and 0.0 in one.centers.tolist() and not one.protected.any()
    assert ((moves(one) != 0) >= (moves(seven) != 0)).all()
    few = octaves(500, least=-8, most=-1)
    assert bits(moves(only(few, 8))) == bits(moves(only(few, 7)))


# what they become


@settings(deadline=None, max_examples=30)
@given(st.lists(FINITE, min_size=1, max_size=40))
def test_a_bucket_becomes_half_of_its_ends_or_its_mean(values):
    x = torch.tensor(values)
    for representative in REPRESENTATIVES:
        one = only(x, 8, representative)
        found = dict(zip(map(bucket, x.tolist()), moves(one).double().tolist(), strict=True))
        for kind in {bucket(value) for value in x.tolist()} - {None}:
            members = [value for value in x.tolist() if bucket(value) == kind]
            middle = min(members) / 2 + max(members) / 2
            expected = middle if representative == "middle" else math.fsum(m / len(members) for m in members)
            assert found[kind] == pytest.approx(expected, rel=2**-23, abs=2**-149)
            assert min(members) <= found[kind] <= max(members)


def test_the_mean_has_the_smaller_square_error_though_single_values_may_lie_farther():
    x = torch.tensor([1.0] + [1.99] * 9)
    errors = {one: (moves(only(x, 1, one)) - x).abs() for one in REPRESENTATIVES}
    assert errors["mean"].square().sum() < 0.7 * errors["middle"].square().sum()
    assert errors["mean"].max() > 0.8 and errors["middle"].max() < 0.5


def test_zero_of_either_sign_does_not_move_and_denormals_are_as_any_other_number():
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1.1e-40, 1.1754942e-38, 1.1754944e-38])
    assert bucket_ids(x)[:2].tolist() == [0, 0] and bucket_ids(x)[2:].unique().numel() == 6
    one = only(x, 7)
    assert one.codes[:2].tolist() == [0, 0]
    assert bits(moves(one)[2:]) == bits(x[2:])
    assert only(x, 1).codes.tolist() == [0, 0, 0, 0, 0, 0, 0, 2]


def test_where_nothing_differs_nothing_moves():
    for x in (torch.zeros(3, 4), torch.empty(0, 3)):
        one = only(x, 3)
        assert one.bins == 1 and not one.codes.any() and one.codes.shape == x.shape


# of several tensors


def test_together_a_tensor_that_moves_less_is_not_written_and_by_itself_it_is():
    large, small = octaves(least=-6, most=-1), octaves(seed=1, least=-26, most=-21)
    one, other = quantize_exponents([large, small], 2)
    assert one.codes.any() and not other.codes.any() and bits(one.centers) == bits(other.centers)
    one, other = quantize_exponents([large, small], 2, shared=False)
    assert one.codes.any() and other.codes.any()
    assert bits(moves(one)) == bits(moves(only(large, 2))) and bits(moves(other)) == bits(moves(only(small, 2)))
    assert quantize_exponents([], 2) == quantize_exponents([], 2, shared=False) == []


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(FINITE, max_size=12), min_size=1, max_size=4), st.integers(1, 8))
def test_tensors_together_are_as_one_tensor(parts, x):
    tensors = [torch.tensor(part) for part in parts]
    whole = only(torch.cat(tensors), x)
    several = quantize_exponents(tensors, x)
    assert bits(torch.cat([moves(one) for one in several])) == bits(moves(whole))
    assert {bits(one.centers) for one in several} == {bits(whole.centers)}


@settings(deadline=None, max_examples=30)
@given(st.lists(FINITE, max_size=30), st.lists(FINITE, max_size=30))
def test_buckets_add_up_to_those_of_the_whole(left, right):
    added = ExponentBuckets.from_tensor(torch.tensor(left)) + ExponentBuckets.from_tensor(torch.tensor(right))
    whole = ExponentBuckets.from_tensor(torch.tensor(left + right))
    there = whole.counts > 0
    assert torch.equal(added.counts, whole.counts)
    assert torch.allclose(added.sums, whole.sums, rtol=1e-14, atol=0)
    for end in ("minimum", "maximum"):
        assert torch.equal(getattr(added, end)[there], getattr(whole, end)[there])


def test_no_order_of_the_values_makes_a_difference():
    x = octaves(least=-20, most=0)
    places = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(2))
    for bits_ in (1, 3, 8):
        here, there = only(x, bits_), only(x[places], bits_)
        assert torch.equal(here.codes[places], there.codes) and bits(here.centers) == bits(there.centers)
        here, there = only(x, bits_, "mean"), only(x[places], bits_, "mean")
        assert torch.equal(here.codes[places], there.codes)
        assert torch.allclose(here.centers, there.centers, rtol=2**-23, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("x", [1, 3, 8])
def test_a_gpu_finds_the_buckets_that_the_cpu_finds(x):
    values = octaves(100_000)
    here, there = only(values, x), only(values.cuda(), x)
    assert all(getattr(there, one.name).is_cuda for one in fields(there) if one.type == "Tensor")
    assert torch.equal(there.codes.cpu(), here.codes) and bits(there.centers) == bits(here.centers)
    here, there = only(values, x, "mean"), only(values.cuda(), x, "mean")
    assert torch.equal(there.codes.cpu(), here.codes)
    assert torch.allclose(there.centers.cpu(), here.centers, rtol=2**-22, atol=0)
