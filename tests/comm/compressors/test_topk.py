"""The largest magnitudes cross, exactly as many as were asked for, and of equals the first."""

from __future__ import annotations

import math

import pytest
import torch
from contracts.compressor import CompressorContract, noise
from helpers.parameters import each_value
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.comm import CompressorContext, TopK, Uniform, parse
from shrinkpoint.comm.compressors.base import NO_CONTEXT
from shrinkpoint.errors import MismatchError


class TestTopK(CompressorContract):
    compressors = (
        TopK(0.5),
        TopK(0.1),
        TopK(0.02),
        TopK(1.0),
        TopK(0.3, "bf16"),
        TopK(0.1, per="tensor"),
        TopK(0.2, Uniform(4, 64)),
        TopK(0.1, per=64),
        TopK(0.1, Uniform(2, 16), 100),
    )


def decoded(compressor: TopK, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
    return compressor.decode(compressor.encode(x, context), torch.full_like(x, 7.0), context)


def chosen(x: Tensor, k: int) -> list[int]:
    """The places of the k largest magnitudes of one sample, as a plain sort finds them."""
    magnitudes = (x.float().view(-1).view(torch.int32) & 0x7FFFFFFF).tolist()
    return sorted(sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))[:k])


FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-45, 3e38, math.inf, -math.inf, math.nan])


@settings(deadline=None, max_examples=100)
@given(st.lists(FEW, min_size=1, max_size=60), st.integers(1, 60), st.sampled_from([1, 3]))
def test_of_each_sample_the_largest_cross_and_of_equals_the_first(values, repeats, rows):
    x = torch.tensor(values).repeat(rows, repeats)
    for share in (0.02, 0.1, 0.5, 0.9):
        compressor, k = TopK(share), math.ceil(x.shape[1] * round(share * 100) / 100)
        wire = compressor.encode(x)
        expected = [row * x.shape[1] + place for row in range(rows) for place in chosen(x[row], k)]
        assert compressor.indices(wire, x.shape).tolist() == expected
        out = compressor.decode(wire, torch.full_like(x, 7.0))
        sent = x.view(-1)[expected].view(rows, -1)
        lost = (~x.isfinite()).sum(1) > sent.shape[1]
        lost |= sent.isnan().all(1)
        assert out[lost].isnan().all()
        flat = out.masked_fill(lost[:, None], 0.0).view(-1)
        assert bits(flat[expected]) == bits(sent.masked_fill(lost[:, None], 0.0))
        flat[expected] = 0
        assert bits(flat) == bytes(4 * x.numel())


@settings(deadline=None, max_examples=25)
@given(st.integers(2049, 9000), st.integers(0, 99), st.sampled_from([1, 3, 40, 10_000]), st.floats(0.001, 1))
def test_long_samples_are_chosen_from_alike(n, seed, kinds, share):
    x = noise((2, n), seed)
    x = x if kinds == 10_000 else (x * kinds / 3).round().clamp_min(0)
    compressor = TopK(share)
    wires = []
    for most in (0, 1, 2):
        _native._use_simd(most)
        wires.append(bits(compressor.encode(x)))
    assert wires[0] == wires[1] == wires[2] == bits(compressor._encode_torch(x))
    k = compressor.indices(torch.frombuffer(bytearray(wires[0]), dtype=torch.uint8), x.shape).numel() // 2
    expected = [row * n + place for row in range(2) for place in chosen(x[row], k)]
    assert compressor.indices(compressor.encode(x), x.shape).tolist() == expected


def test_threads_do_not_change_a_message():
    x, before = noise((7, 70_001)), torch.get_num_threads()
    try:
        wires = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            wires.append(bits(TopK(0.1).encode(x)))
    finally:
        torch.set_num_threads(before)
    assert wires[0] == wires[1]


COUNTS = [
    (10, 0.1, 1),
    (10, 0.9, 9),
    (10, 0.3, 3),
    (7, 0.1, 1),
    (100, 0.07, 7),
    (1000, 0.025, 25),
    (1001, 0.1, 101),
    (5, 1, 5),
    (3, 1e-9, 1),
]


def test_as_many_cross_as_the_share_says():
    for n, share, k in COUNTS:
        assert decoded(TopK(share), torch.arange(1.0, n + 1)).count_nonzero() == k


def test_of_a_tensor_rather_than_a_sample_only_where_that_is_asked_for():
    x = noise((4, 50))
    x[2] *= 100
    assert (decoded(TopK(0.1), x) != 0).sum(1).tolist() == [5, 5, 5, 5]
    assert (decoded(TopK(0.1, per="tensor"), x) != 0).sum(1).tolist() == [0, 0, 20, 0]
    assert (decoded(TopK(0.1), x.view(-1)) != 0).sum() == 20
    assert (decoded(TopK(0.1), x.view(4, 5, 5, 2)) != 0).flatten(1).sum(1).tolist() == [5, 5, 5, 5]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9000), st.sampled_from([1, 7, 64, 4096]), st.sampled_from([1 / 64, 0.1, 1.0]), st.integers(0, 99))
def test_of_each_chunk_the_largest_cross_and_of_a_shorter_last_one_its_share(n, chunk, share, seed):
    x = noise((n,), seed)
    compressor = TopK(share, per=chunk)
    wire = compressor.encode(x)
    assert bits(wire) == bits(compressor._encode_torch(x)) and wire.numel() == compressor.wire_bytes((n,), x.dtype)
    parts = [(start, x[start : start + chunk]) for start in range(0, n, chunk)]
    expected = [start + place for start, part in parts for place in chosen(part, math.ceil(len(part) * share))]
    assert compressor.indices(wire, x.shape).tolist() == expected


def test_chunks_go_across_rows_and_one_as_large_as_the_tensor_is_the_tensor():
    x = noise((6, 50))
    x[2] *= 100
    assert (decoded(TopK(0.1, per=100), x) != 0).sum(1).tolist() == [
        *(decoded(TopK(0.1), x.view(3, 100)) != 0).view(6, 50).sum(1).tolist()
    ]
    assert bits(TopK(0.1, per=300).encode(x)) == bits(TopK(0.1, per="tensor").encode(x))
    assert bits(TopK(0.1, per=10_000).encode(x)) == bits(TopK(0.1, per="tensor").encode(x))


def test_an_index_in_chunks_takes_fewer_than_twelve_bits():
    code = TopK(1 / 64, per=4096)._index_code((1 << 20,))
    assert code.k == 64 * 256 and 8 * code.size / code.k < 8.01
    assert 8 * parse("top1.5625:4096:q2:64").wire_bytes((1 << 20,), torch.float32) / 2**20 < 0.165


def test_values_that_are_not_finite_count_as_largest():
    x = noise((100,))
    x[[3, 50, 99]] = torch.tensor([math.nan, -math.inf, math.inf])
    compressor = TopK(0.03)
    assert compressor.indices(compressor.encode(x), x.shape).tolist() == [3, 50, 99]
    out = decoded(compressor, x)
    assert out[3].isnan() and out[50] == -math.inf and out[99] == math.inf


@pytest.mark.parametrize(
    ("per", "values"), each_value(["sample", "tensor", 64], ["fp32", "bf16", "fp16", Uniform(4, 64)])
)
def test_a_sample_with_more_values_that_are_not_finite_than_are_sent_is_nan_everywhere(values, per):
    for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.float64]:
        for bad in [math.nan, math.inf, -math.inf]:
            compressor = TopK(0.1, values, per)
            x = noise((3, 50, 2)).to(dtype)
            x[1] = bad  # 100 values, of which 10 are sent, or 30 of 300, or 7 of 64
            for out in (decoded(compressor, x), decoded(compressor, x.transpose(1, 2).contiguous().transpose(1, 2))):
                assert out[1].isnan().all()
                assert per != "sample" or not isinstance(values, str) or out[[0, 2]].isfinite().all()
            TestTopK().computes_alike(compressor, x)


def test_a_short_last_chunk_is_lost_alone():
    x = noise((150,))
    x[120:] = math.nan
    out = decoded(TopK(0.02, per=100), x)
    assert out[100:].isnan().all() and out[:100].isfinite().all()
    TestTopK().computes_alike(TopK(0.02, per=100), x)


def test_all_places_are_kept_where_every_value_that_is_not_finite_is_sent():
    x = noise((2, 100))
    x[0, :10] = math.inf
    out = decoded(TopK(0.1), x)
    assert (out[0, :10] == math.inf).all() and (out[0, 10:] == 0).all() and out[1].isfinite().all()


def test_values_are_as_short_as_specified_and_never_longer_than_the_tensor_s():
    head = TopK(0.1).wire_bytes((4, 100), torch.float32) - 40 * 4
    sizes = {
        ("fp32", torch.float32): 4,
        ("fp32", torch.float64): 4,
        ("fp32", torch.bfloat16): 2,
        ("fp32", torch.float16): 2,
        ("bf16", torch.float32): 2,
        ("fp16", torch.float32): 2,
    }
    for (values, dtype), size in sizes.items():
        assert TopK(0.1, values).wire_bytes((4, 100), dtype) == head + 40 * size
    inner = Uniform(4, 64)
    assert TopK(0.1, inner).wire_bytes((4, 100), torch.float32) == head + inner.wire_bytes((40,), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_cross_unharmed(dtype):
    x = (noise((3, 200)) * 100).to(dtype)
    out = decoded(TopK(0.5), x)
    places = out != 0
    assert places.sum() == 300 and bits(out[places]) == bits(x[places])


def test_fp16_makes_inf_of_what_is_beyond_it():
    out = decoded(TopK(0.5, "fp16"), torch.tensor([1e5, -1e5, 65504.0, 0.1, 0.2, 0.3]))
    assert out.tolist() == [math.inf, -math.inf, 65504.0, 0, 0, 0]


def test_a_compressor_for_the_values_is_given_all_of_them_in_a_row_and_the_context():
    x, inner, context = noise((4, 500)), Uniform(3, 16, dither=True), CompressorContext(key=77)
    compressor = TopK(0.2, inner)
    wire, exact = compressor.encode(x, context), decoded(TopK(0.2), x).view(-1)
    places = compressor.indices(wire, x.shape)
    row = exact[places]
    expected = inner.decode(inner.encode(row, context), torch.empty_like(row), context)
    assert bits(compressor.decode(wire, torch.empty_like(x), context).view(-1)[places]) == bits(expected)


def test_indices_that_cannot_be_are_refused_and_the_output_stays():
    x = noise((8, 128))
    for compressor in (TopK(0.1), TopK(0.5), TopK(0.001)):
        wire, out = compressor.encode(x), torch.full_like(x, 7.0)
        wire[: compressor._index_code(x.shape).size] = 0
        wire[: wire.numel() // 9] = 0
        for decode in (compressor.decode, compressor._decode_torch):
            with pytest.raises(MismatchError, match="ascending positions below 1024"):
                decode(wire, out)
        with pytest.raises(MismatchError, match="ascending positions below 1024"):
            compressor.indices(wire, x.shape)
        assert (out == 7).all()
