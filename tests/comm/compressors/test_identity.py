"""Nothing is lost."""

from __future__ import annotations

import torch
from contracts.compressor import FLOATS, CompressorContract
from helpers.strategies import bits

from shrinkpoint.comm.compressors.base import Identity


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
