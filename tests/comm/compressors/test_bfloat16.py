"""Promise: bfloat16 tensors have the messages of the same float32 values, and come back as these rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shrinkpoint import _native
from shrinkpoint.comm import CompressorContext, parse
from shrinkpoint.comm.compressors import hadamard, quantizers
from shrinkpoint.comm.compressors.layout import fill_tensor

SPECS = (
    *("q8", "q4", "q3:64", "q4:64:dither", "q5:7", "q4:row", "q2:100000"),
    *("n4:64", "n3:16", "n1:64", "n2:4096", "block4:32", "block8:16", "h64(q4:64)", "h16>2(n3:64)"),
)
SHAPES = ((1,), (63,), (65,), (3, 5000), (7, 11, 13), (300_000,))
CONTEXT = CompressorContext(key=7)


def tensors(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Normal values, large ones, and some that are not finite: bfloat16."""
    generator = torch.Generator().manual_seed(len(shape))
    normal = torch.randn(shape, generator=generator)
    odd = normal.clone().view(-1)
    odd[::400] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])[torch.arange(len(odd[::400])) % 4]
    return [x.bfloat16() for x in (normal, normal * 1e37, normal * 1e-39, odd.view(shape))]


@pytest.fixture(params=[0, 1, 2])
def simd(request):
    widest = _native._use_simd(2)
    used = _native._use_simd(request.param)
    yield used
    _native._use_simd(widest)


@pytest.mark.usefixtures("simd")
def test_the_message_and_what_comes_back_are_those_of_float32_rounded_once():
    for spec in SPECS:
        compressor = parse(spec)
        for shape in SHAPES:
            for tensor in tensors(shape):
                message = compressor.encode(tensor, CONTEXT)
                assert message.equal(compressor.encode(tensor.float(), CONTEXT))
                exact = compressor.decode(message, torch.empty(shape), CONTEXT)
                expected = fill_tensor(torch.empty(shape, dtype=torch.bfloat16), exact)
                found = compressor.decode(message, torch.empty(shape, dtype=torch.bfloat16), CONTEXT)
                assert torch.equal(found.isnan(), expected.isnan())
                numbers = (x.nan_to_num(1.0, torch.inf, -torch.inf).view(torch.int16) for x in (found, expected))
                assert torch.equal(*numbers)


def test_rounding_keeps_finite_numbers_finite_and_takes_halves_to_even():
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x80000001, 0xFF7FFFFF]
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    message = torch.cat([values, values.new_zeros(64 - len(bits))])  # through a rotation that rotates nothing
    signs = torch.ones(64)
    out = torch.empty(64, dtype=torch.bfloat16)
    _native.rotate_back(
        message.numpy(), signs.numpy(), out.view(torch.int16).numpy(), flags=bytes(1), bfloat16=True, threads=1
    )
    found = [word & 0xFFFF for word in out.view(torch.int16)[: len(bits)].tolist()]
    assert found == [0x3F80, 0x3F82, 0x3F81, 0x7F7F, 0x7F7F, 0x7F7F, 0x7F80, 0x8000, 0xFF7F]


def test_a_view_at_an_odd_place_and_one_that_is_not_contiguous_come_back_the_same():
    compressor, wide = parse("q4:64"), torch.randn(129, 66).bfloat16()
    for tensor in (wide.view(-1)[1:1001], wide[:, 1:33], wide.t()):
        message = compressor.encode(tensor, CONTEXT)
        assert message.equal(compressor.encode(tensor.contiguous().clone(), CONTEXT))
        out = torch.zeros(wide.numel() + 1).bfloat16().as_strided(tensor.size(), tensor.stride(), 1)
        assert compressor.decode(message, out, CONTEXT).equal(compressor.decode(message, tensor.clone(), CONTEXT))


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    tensor = torch.randn(300_001, generator=torch.Generator().manual_seed(3)).bfloat16()
    for spec in ("q8", "q4:64", "q3:100", "n4:64", "block4:32", "h64(q4:64)"):
        compressor, results = parse(spec), []
        for threads in (1, 3):
            for module in (quantizers, hadamard):
                monkeypatch.setattr(module, "native_threads", lambda count, threads=threads: threads)
            message = compressor.encode(tensor, CONTEXT)
            results.append((message, compressor.decode(message, torch.empty_like(tensor), CONTEXT)))
        assert all(one.equal(other) for one, other in zip(*results, strict=True))


def test_buffers_of_half_a_value_or_at_an_odd_address_are_refused():
    message, values = np.zeros(64, np.uint8), np.zeros(130, np.uint8)
    for wrong in (values[:127], values[1:129]):
        with pytest.raises(ValueError, match="values"):
            _native.uniform_encode(wrong, 64, 4, message, bfloat16=True)
        with pytest.raises(ValueError, match=r"values|wire"):
            _native.blockfloat_encode(wrong, message, block=32, bits=4, bfloat16=True)
