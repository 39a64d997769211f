"""Identity loses nothing; Cast sends sixteen bits a value, each the nearest."""

from __future__ import annotations

import pytest
import torch
from contracts.compressor import FLOATS, CompressorContract, noise
from helpers.strategies import bits

from shrinkpoint.comm.compressors.base import Cast, Identity
from shrinkpoint.errors import PolicyError


class TestExact(CompressorContract):
    compressors = (Identity(),)
    native = False
    exact = True


def test_a_nan_keeps_its_payload():
    x = torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    out = Identity().decode(Identity().encode(x), torch.empty_like(x))
    assert bits(out) == bits(x)


def test_a_message_has_the_bytes_of_the_dtype():
    for dtype in FLOATS:
        assert Identity().wire_bytes((3, 5), dtype) == 15 * dtype.itemsize


class TestCast(CompressorContract):
    compressors = (Cast("bf16"), Cast("fp16"))
    native = False

    def test_finite_values_stay_finite_in_narrow_dtypes(self):
        x = torch.tensor([torch.finfo(torch.float16).max], dtype=torch.float16)
        for compressor in self.compressors:
            assert self.round_trip(compressor, x).isfinite().all()


def test_values_are_the_nearest_of_the_dtype():
    x = noise((100,))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        out = Cast(name).decode(Cast(name).encode(x), torch.empty_like(x))
        assert torch.equal(out, x.to(dtype).to(torch.float32))


def test_values_of_the_same_dtype_are_kept():
    x = noise((100,)).to(torch.bfloat16)
    assert torch.equal(Cast("bf16").decode(Cast("bf16").encode(x), torch.empty_like(x)), x)


def test_infinities_stay_infinite_and_what_is_too_large_for_fp16_becomes_so():
    x = torch.tensor([torch.inf, -torch.inf, 65504.0, -65504.0, 70000.0])
    out = Cast("fp16").decode(Cast("fp16").encode(x), torch.empty_like(x))
    assert out.tolist() == [torch.inf, -torch.inf, 65504.0, -65504.0, torch.inf]


def test_another_dtype_is_refused():
    with pytest.raises(PolicyError, match="dtype: 'fp8'; expected 'bf16' or 'fp16'"):
        Cast("fp8")
