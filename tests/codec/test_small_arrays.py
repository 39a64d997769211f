"""Short arrays of floats inside a record come back, and are never longer than they were."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint import _native
from shrinkpoint.codec.codebook_record import decode_small_array, encode_small_array
from shrinkpoint.codec.coder import NUMBER_FORMATS, CoderConfig
from shrinkpoint.tensors.dtypes import tensor_bytes

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
FAULTS = (ValueError, struct.error, _native.Corrupt, _native.Truncated)


def back(name: str, run: CoderConfig | None, data: bytes, size: int, base: np.ndarray | None) -> bytes:
    out = np.empty(size, np.uint8)
    decode_small_array(NUMBER_FORMATS[name], run, np.frombuffer(data, np.uint8), out, base)
    return out.tobytes()


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=400), st.binary(min_size=400, max_size=400), st.sampled_from([*DTYPES]), st.booleans())
def test_any_bits_come_back_and_take_no_more_than_they_are(data, other, name, based):
    data = data[: len(data) // 4 * 4]
    base = np.frombuffer(other[: len(data)], np.uint8) if based else None
    run, stored = encode_small_array(NUMBER_FORMATS[name], np.frombuffer(data, np.uint8), base)
    assert len(stored) <= len(data)
    assert back(name, run, stored, len(data), base) == data


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_like_its_base_is_a_delta_and_what_is_like_itself_is_levels(name):
    values = (torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 0.02).to(DTYPES[name])
    bits, near = tensor_bytes(values), tensor_bytes(values * (1 + 2**-7))
    alone, alone_data = encode_small_array(NUMBER_FORMATS[name], bits, None)
    under, under_data = encode_small_array(NUMBER_FORMATS[name], bits, near)
    assert alone is not None and alone.tokens == "level"
    assert under is not None and under.tokens == "delta" and under.needs_base
    assert len(under_data) < len(alone_data) < bits.nbytes
    assert back(name, under, under_data, bits.nbytes, near) == bits.tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_a_handful_stays_as_it_is(name):
    bits = tensor_bytes(torch.tensor([1.0, 2.0, -3.0]).to(DTYPES[name]))
    assert encode_small_array(NUMBER_FORMATS[name], bits, bits) == (None, bits.tobytes())
    assert encode_small_array(NUMBER_FORMATS[name], bits[:0], bits[:0]) == (None, b"")


@pytest.mark.parametrize("name", DTYPES)
def test_damaged_bytes_raise_what_a_record_catches(name):
    values = (torch.randn(3000, generator=torch.Generator().manual_seed(2)) * 0.02).to(DTYPES[name])
    bits, near = tensor_bytes(values), tensor_bytes(values * (1 + 2**-7))
    for base in (None, near):
        run, stored = encode_small_array(NUMBER_FORMATS[name], bits, base)
        assert run is not None
        for length in (*range(40), len(stored) // 2, len(stored) - 1):
            with pytest.raises(FAULTS):
                back(name, run, stored[:length], bits.nbytes, base)
        with pytest.raises(FAULTS):
            back(name, run, stored + b"\0", bits.nbytes, base)
        with pytest.raises(FAULTS):
            back(name, None, stored, bits.nbytes, base)
    with pytest.raises(ValueError, match="needs a base"):
        back(name, run, stored, bits.nbytes, None)
