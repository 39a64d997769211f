"""Tensors as one array of numbers, taps outermost, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.run import Run
from reference.tokens import hint

from shrinkpoint.codec.coder import (
    NUMBER_FORMATS,
    CoderConfig,
    CodingContext,
    matrix_shapes,
    num_numbers,
    num_taps,
    pack_float32,
    pack_tensors,
    tap,
    tap_context,
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


@pytest.mark.parametrize("predictor", ["tap", "base"])
def test_a_hint_is_how_the_tap_before_differs_from_what_it_was_predicted_from(predictor):
    """Stored bytes depend on it."""
    run, size = Run("delta", 32, 23), 30
    values, parent = np.random.default_rng(0).standard_normal((2, 4 * size)).astype("f4").view("u4")
    taps, parents = values.reshape(4, size), parent.reshape(4, size)
    known, config = CodingContext(base=parent.view("u1")), CoderConfig("delta", predictor=predictor)
    for index in (1, 2, 3):
        found = tap_context(NUMBER_FORMATS["F32"], values.view("u1"), known, config, index, 4)
        base, others = parents[index], parents[index - 1]
        if predictor == "tap":
            base, others = taps[index - 1], taps[index - 2] if index > 1 else None
        expected = None
        if others is not None:
            expected = [hint(run, a, b) for a, b in zip(taps[index - 1].tolist(), others.tolist(), strict=True)]
        assert found.base.view("u4").tolist() == base.tolist()
        assert (None if found.hint is None else found.hint.tolist()) == expected


def test_moments_of_any_width_become_32_bit_floats_in_the_same_order():
    x = {"m": torch.arange(8, dtype=torch.bfloat16).reshape(2, 2, 2)}
    assert pack_float32(["m"], x, 2).view("f4").tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
