"""Values cross at the places that the other direction's message carried."""

from __future__ import annotations

import math

import pytest
import torch
from contracts.compressor import CompressorContract, noise
from helpers.strategies import bits
from torch import Tensor

from shrinkpoint.comm import Compressor, CompressorContext, RandomK, SameIndices, TopK, Uniform
from shrinkpoint.comm.compressors import sparse
from shrinkpoint.comm.compressors.base import NO_CONTEXT
from shrinkpoint.errors import MismatchError, PolicyError


class TestSameIndices(CompressorContract):
    compressors = (SameIndices(), SameIndices("bf16"), SameIndices(Uniform(4, 64)))
    dense = False
    feeds_back = False  # the indices are the forward message's

    def context(self, x: Tensor, compressor: Compressor) -> CompressorContext:
        return CompressorContext(key=3, indices=torch.arange(x.numel(), device=x.device)[::5])

    def encode_torch(self, compressor: Compressor, x: Tensor, context: CompressorContext) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "gather_values", sparse._gather_values_torch)
            return compressor.encode(x, context)

    def decode_torch(self, compressor: Compressor, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        return compressor.decode(wire, out, context)


@pytest.mark.parametrize("forward", [TopK(0.1), RandomK(0.1), TopK(0.1, per="tensor")])
def test_the_gradient_crosses_where_the_activation_did(forward):
    x, gradient, context = noise((4, 8, 25)), noise((4, 8, 25), seed=2), CompressorContext(key=9)
    wire = forward.encode(x, context)
    mask = forward.decode(wire, torch.empty_like(x), context) != 0
    back = CompressorContext(key=10, indices=forward.indices(wire, x.shape, context))
    message = SameIndices().encode(gradient, back)
    assert message.numel() == 4 * 80 == SameIndices().wire_bytes(x.shape, x.dtype, back)
    out = SameIndices().decode(message, torch.full_like(x, 7.0), back)
    assert bits(out) == bits(torch.where(mask, gradient, torch.zeros(())))
    assert torch.equal(SameIndices().indices(message, x.shape, back), back.indices)


def test_a_value_that_is_not_finite_and_has_no_index_makes_the_first_one_nan():
    places = torch.tensor([2, 5, 7])
    for bad in (math.nan, math.inf, -math.inf):
        for place, first_is_nan in ((5, False), (6, True)):
            x = noise((10,))
            x[place] = bad
            context = CompressorContext(indices=places)
            out = SameIndices().decode(SameIndices().encode(x, context), torch.empty_like(x), context)
            assert bool(out[2].isnan()) == first_is_nan
            assert bits(out[[5, 7]]) == bits(x[[5, 7]]) and (out[[0, 1, 3, 4, 6, 8, 9]] == 0).all()


def test_without_indices_it_says_what_it_needs():
    x = noise((10,))
    for call in (
        lambda: SameIndices().encode(x),
        lambda: SameIndices().wire_bytes(x.shape, x.dtype),
        lambda: SameIndices().decode(torch.empty(4, dtype=torch.uint8), x, NO_CONTEXT),
        lambda: SameIndices().indices(torch.empty(4, dtype=torch.uint8), x.shape),
    ):
        with pytest.raises(PolicyError, match="Put TopK or RandomK on the forward direction of the same boundary"):
            call()


@pytest.mark.parametrize("places", [[0, 10], [-1, 3], [3, 99]])
def test_indices_of_a_tensor_of_another_size_are_refused(places):
    context, out = CompressorContext(indices=torch.tensor(places)), torch.full((10,), 7.0)
    with pytest.raises(MismatchError, match=r"expected positions below 10, for \(10,\)"):
        SameIndices().encode(noise((10,)), context)
    with pytest.raises(MismatchError, match=r"expected positions below 10, for \(10,\)"):
        SameIndices().decode(torch.zeros(8, dtype=torch.uint8), out, context)
    assert (out == 7).all()


def test_no_indices_are_no_bytes():
    context = CompressorContext(indices=torch.empty(0, dtype=torch.int64))
    out = torch.full((3, 4), 7.0)
    assert SameIndices().encode(noise((3, 4)), context).numel() == 0
    assert (SameIndices().decode(torch.empty(0, dtype=torch.uint8), out, context) == 0).all()
