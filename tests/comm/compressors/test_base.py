"""Identity loses nothing; Cast sends sixteen bits a value, each the nearest."""

from __future__ import annotations

import torch
from contracts.compressor import CompressorContract, noise
from helpers.strategies import bits

from shrinkpoint.comm import Cast, Identity


class TestExact(CompressorContract):
    compressors = (Identity(),)
    native = False
    exact = True


def test_a_nan_keeps_its_payload():
    x = torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    out = Identity().decode(Identity().encode(x), torch.empty_like(x))
    assert bits(out) == bits(x)


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


def test_infinities_stay_infinite_and_what_is_too_large_for_fp16_becomes_so():
    x = torch.tensor([torch.inf, -torch.inf, 65504.0, -65504.0, 70000.0])
    out = Cast("fp16").decode(Cast("fp16").encode(x), torch.empty_like(x))
    assert out.tolist() == [torch.inf, -torch.inf, 65504.0, -65504.0, torch.inf]
