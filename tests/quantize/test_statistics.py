"""A quantile is within alpha of the exact one, and shards that are counted apart are counted as one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import PolicyError, StateError
from shrinkpoint.quantize.statistics import MIN_MAGNITUDE, LogHistogram, max_bucket

MOST = float(torch.finfo(torch.float32).max)
ALPHAS = [1e-1, 1e-2, 1e-3]
EDGES = [0.0, -0.0, 1e-30, -1e-30, 1e-45, -1e-40, 1.1754944e-38, 1.0, -1.0, MOST, -MOST, 1e30, -1e-20]

sizes = st.floats(-100, 38.5).map(lambda e: min(10.0**e, MOST))
values = st.one_of(
    st.floats(-MOST, MOST, width=32, allow_nan=False), sizes, sizes.map(lambda x: -x), st.sampled_from(EDGES)
)
arrays = st.lists(values, min_size=1, max_size=60)


def near(found: float, exact: float, alpha: float) -> bool:
    """Within alpha of the exact value, which counts as `MIN_MAGNITUDE` where it is below; zero is exact."""
    if exact == 0:
        return found == 0
    exact = math.copysign(max(abs(exact), MIN_MAGNITUDE), exact)
    return abs(found - exact) <= alpha * abs(exact)


def ladder(alpha: float) -> torch.Tensor:
    """Values all over the range, and as near to the edges of buckets as float32 has them."""
    gamma = (1 + alpha) / (1 - alpha)
    steps = np.linspace(math.log(MIN_MAGNITUDE) / math.log(gamma), math.log(MOST) / math.log(gamma), 3000)
    edges = np.exp(np.floor(steps)[1:-1] * math.log(gamma)).astype(np.float32)
    near_edges = [np.nextafter(edges, np.float32(towards)) for towards in (0, MOST)]
    return torch.from_numpy(np.concatenate([edges, *near_edges]))


@settings(deadline=None, max_examples=75)
@given(st.sampled_from(ALPHAS), arrays, st.sampled_from([torch.float32, torch.float64]))
@example(1e-3, EDGES, torch.float32)
@example(1e-3, [1e-60, -1e-60, 1e-300], torch.float64)
def test_every_rank_is_within_alpha_of_the_exact_value(alpha, xs, dtype):
    x = torch.tensor(xs, dtype=dtype)
    sketch, exact = LogHistogram.from_tensor(x, alpha), x.to(torch.float64).sort().values.tolist()
    for rank, value in enumerate(exact):
        assert near(sketch.value_at_rank(rank), value, alpha), (rank, value)


@pytest.mark.parametrize(("alpha", "sign"), each_value([*ALPHAS, 1e-4, 0.5], [1, -1]))
def test_each_bucket_of_the_whole_range_stands_within_alpha_of_its_values(alpha, sign):
    x = torch.cat([ladder(alpha), torch.tensor([MIN_MAGNITUDE, MOST, 1.0, math.nextafter(1, 0)])])
    ids = LogHistogram.bucket_ids(sign * x, alpha)
    assert ids.abs().min() >= 1 and ids.abs().max() <= max_bucket(alpha)
    keys, key_of_value = ids.long().unique(return_inverse=True)
    counts = torch.zeros(2 * max_bucket(alpha) + 1, dtype=torch.int64)
    counts[keys + max_bucket(alpha)] = 1
    histogram = LogHistogram(alpha, counts)
    stands, _ = histogram.buckets()
    for value, rank in zip((sign * x).tolist(), key_of_value.tolist(), strict=True):
        assert near(float(stands[rank]), value, alpha)
    for rank in range(0, len(keys), len(keys) // 16 or 1):
        assert histogram.value_at_rank(rank) == float(stands[rank])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_value_next_to_the_edge_of_a_bucket_is_further_off_than_alpha(alpha):
    """The margin for float32 logarithms, where it is needed: at the edges of the sketch's own buckets."""
    centers, _ = LogHistogram(alpha, torch.ones(2 * max_bucket(alpha) + 1, dtype=torch.int64)).buckets()
    centers = centers[centers > 0]
    edges = (centers[1:] + centers[:-1]) / 2
    edges = edges[(edges > 1.01 * MIN_MAGNITUDE) & (edges < MOST / 1.01)]
    x = (edges[:, None] * (1 + torch.linspace(-3e-5, 3e-5, 61, dtype=torch.float64))).to(torch.float32)
    stands = centers[LogHistogram.bucket_ids(x, alpha).long() - 1]
    error = (stands - x.double()).abs() / x.double()
    assert error.max() <= alpha
    assert error.max() > alpha - 3e-5  # the edges are where they are thought to be


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALPHAS), arrays, st.floats(0, 1))
def test_the_rank_of_a_quantile_is_that_of_numpys_lower_method(alpha, xs, q):
    x = torch.tensor(xs, dtype=torch.float64)
    exact = float(np.quantile(x.numpy(), q, method="lower"))
    assert near(LogHistogram.from_tensor(x, alpha).quantile(q), exact, alpha)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALPHAS), arrays, arrays, st.randoms(use_true_random=False))
def test_the_merged_sketch_is_the_whole_one_in_any_order(alpha, one, other, random):
    whole = [*one, *other]
    random.shuffle(whole)
    parts = [LogHistogram.from_tensor(torch.tensor(xs), alpha) for xs in (one, other)]
    assert torch.equal((parts[0] + parts[1]).counts, LogHistogram.from_tensor(torch.tensor(whole), alpha).counts)
    assert torch.equal((parts[0] + LogHistogram.from_tensor(torch.empty(0), alpha)).counts, parts[0].counts)


@settings(deadline=None, max_examples=40)
@given(arrays, st.integers(0, 2**60 - 1))
def test_a_mask_counts_what_is_under_it(xs, bits):
    x = torch.tensor(xs)
    mask = torch.tensor([bool(bits >> i & 1) for i in range(len(xs))])
    expected = LogHistogram.from_tensor(x[mask])
    assert torch.equal(LogHistogram.from_tensor(x, mask=mask).counts, expected.counts)
    assert torch.equal(LogHistogram.from_bucket_ids(LogHistogram.bucket_ids(x), mask=mask).counts, expected.counts)
    assert expected.count == int(mask.sum())


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALPHAS), arrays)
def test_ids_are_in_the_order_of_the_values_and_carry_their_sign(alpha, xs):
    x = torch.tensor(xs).sort().values
    ids = LogHistogram.bucket_ids(x, alpha)
    assert bool((ids.diff() >= 0).all())
    assert torch.equal(ids.sign().float(), x.sign())


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALPHAS), arrays)
def test_the_magnitudes_of_a_sketch_are_the_sketch_of_the_magnitudes(alpha, xs):
    x = torch.tensor(xs)
    assert torch.equal(
        LogHistogram.from_tensor(x, alpha).magnitudes().counts, LogHistogram.from_tensor(x.abs(), alpha).counts
    )


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALPHAS), arrays)
def test_buckets_are_ascending_and_hold_all_but_the_zeros(alpha, xs):
    x = torch.tensor(xs)
    sketch = LogHistogram.from_tensor(x, alpha)
    stands, counts = sketch.buckets()
    assert (stands.dtype, counts.dtype) == (torch.float64, torch.int64)
    assert bool((stands.diff() > 0).all()) and bool((counts > 0).all())
    assert int(counts.sum()) + sketch.zeros == sketch.count == len(xs)
    exact = [value for value in x.double().sort().values.tolist() if value]
    assert all(near(a, b, alpha) for a, b in zip(stands.repeat_interleave(counts).tolist(), exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_dtype_and_layout_is_the_same_values(dtype):
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = LogHistogram.from_tensor(x.double())
    for same in (x, x.T, x.view(30, 40), x.requires_grad_(), x.reshape(2, 20, 3, 10).transpose(1, 3)):
        assert torch.equal(LogHistogram.from_tensor(same).counts, expected.counts)
    assert torch.equal(
        LogHistogram.from_tensor(x[::2, ::3]).counts, LogHistogram.from_tensor(x[::2, ::3].contiguous()).counts
    )
    assert torch.equal(LogHistogram.bucket_ids(x.T), LogHistogram.bucket_ids(x).T)


def test_more_values_than_fit_into_one_piece_are_all_counted():
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(2))
    sketch, exact = LogHistogram.from_tensor(x), x.double().sort().values
    assert sketch.count == len(x)
    for q in (0, 0.001, 0.3, 0.5, 0.9, 0.9995, 1):
        assert near(sketch.quantile(q), exact[math.floor(q * (len(x) - 1))].item(), 0.01)


def test_one_percent_of_error_takes_fewer_than_five_thousand_buckets():
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(1_000_000, generator=generator) * torch.logspace(-4, 0, 1_000_000)
    gradients = torch.randn(1_000_000, generator=generator) * torch.logspace(-6, -2, 1_000_000)
    for x in (weights, weights * gradients):
        assert len(LogHistogram.from_tensor(x).buckets()[0]) < 5000


def test_nothing_is_counted_where_there_is_nothing():
    for x in (torch.empty(0), torch.empty(3, 0, 2)):
        sketch = LogHistogram.from_tensor(x)
        assert (sketch.count, sketch.zeros, len(sketch.buckets()[0])) == (0, 0, 0)
        assert LogHistogram.bucket_ids(x).shape == x.shape
        with pytest.raises(PolicyError, match="one of 0 values"):
            sketch.quantile(0.5)
    assert LogHistogram.from_tensor(torch.zeros(5)).quantile(0.5) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_name(bad):
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.float16]:
        x = torch.randn(100_000).to(dtype)
        x[77_777] = bad
        with pytest.raises(StateError, match=r"model/head: the value -?(nan|inf)"):
            LogHistogram.from_tensor(x, where="model/head")


def test_values_beyond_float32_and_values_that_are_no_floats_are_refused():
    with pytest.raises(StateError, match="finite in float32"):
        LogHistogram.from_tensor(torch.tensor([1e39], dtype=torch.float64))
    for x in (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.complex64), torch.ones(3) > 0):
        with pytest.raises(StateError, match="real floating-point values"):
            LogHistogram.from_tensor(x)


def test_requests_out_of_range_are_refused():
    sketch = LogHistogram.from_tensor(torch.ones(3))
    for alpha in (0, 1e-5, 0.6, 1, math.nan):
        with pytest.raises(PolicyError, match="alpha"):
            LogHistogram.from_tensor(torch.ones(3), alpha)
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(PolicyError, match="a share from 0 to 1"):
            sketch.quantile(q)
    for rank in (-1, 3):
        with pytest.raises(PolicyError, match="rank"):
            sketch.value_at_rank(rank)
    with pytest.raises(PolicyError, match="the same alpha"):
        sketch + LogHistogram.from_tensor(torch.empty(0), 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_sketch_made_on_a_gpu_stays_there_and_keeps_its_promise(alpha):
    x = torch.cat([ladder(alpha), -ladder(alpha), torch.zeros(7), torch.randn(100_000)])
    sketch, exact = LogHistogram.from_tensor(x.cuda(), alpha), x.double().sort().values
    assert sketch.counts.is_cuda
    for rank in range(0, len(x), 997):
        assert near(sketch.value_at_rank(rank), exact[rank].item(), alpha)
    assert (LogHistogram.from_tensor(x, alpha) + sketch).count == 2 * len(x)
