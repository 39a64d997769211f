"""Tensors as one array of numbers, taps outermost, and back."""

from __future__ import annotations

import torch
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.codec.coder import (
    matrix_shapes,
    num_numbers,
    num_taps,
    pack_float32,
    pack_tensors,
    tap,
    taps_innermost,
)
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.info import TensorInfo


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    st.sampled_from([(), (3,), (2, 3), (1, 2, 2)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8]),
)
def test_scatter_undoes_gather(sides, kernel, dtype):
    source = {str(i): torch.randint(0, 99, (*side, *kernel)).to(dtype) for i, side in enumerate(sides)}
    infos = [TensorInfo(name, tuple(x.shape), dtype_name(dtype)) for name, x in source.items()]
    for taps in {1, num_taps(infos[0])}:
        values = pack_tensors(infos, source, taps)
        stream = taps_innermost(values, dtype.itemsize, taps)
        assert stream.tobytes() == b"".join(bits(source[info.name]) for info in infos)
        assert sum(rows * columns for rows, columns in matrix_shapes(infos, taps)) * taps == sum(
            map(num_numbers, infos)
        )


def test_a_tap_is_one_position_of_every_kernel():
    a, b = torch.arange(24.0).reshape(2, 2, 2, 3), torch.arange(100.0, 106.0).reshape(1, 1, 2, 3)
    infos = [TensorInfo("a", (2, 2, 2, 3), "F32"), TensorInfo("b", (1, 1, 2, 3), "F32")]
    second = tap(pack_tensors(infos, {"a": a, "b": b}, 6), 1, 6)
    assert second.view("f4").tolist() == [1, 7, 13, 19, 101]


def test_moments_of_any_width_become_32_bit_floats_in_the_same_order():
    x = {"m": torch.arange(8, dtype=torch.bfloat16).reshape(2, 2, 2)}
    assert pack_float32(["m"], x, 2).view("f4").tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
