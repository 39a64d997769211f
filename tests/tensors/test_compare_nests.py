"""Promise: the demo's comparison sees every difference, down to a bit, a type or a key."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from shrinkpoint.tensors.compare import differing_paths

STATE = {"w": torch.arange(6.0).reshape(2, 3), "state": {0: {"step": torch.tensor(3.0)}}, "lr": 1e-3, "on": True}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("w", torch.arange(6.0).reshape(3, 2)),
        ("w", torch.arange(6.0, dtype=torch.float64).reshape(2, 3)),
        ("w", torch.nextafter(torch.arange(6.0), torch.tensor(9.0)).reshape(2, 3)),
        ("w", torch.arange(6.0).reshape(2, 3).tolist()),
        ("state", {"0": {"step": torch.tensor(3.0)}}),
        ("state", {0: {"step": 3.0}}),
        ("lr", math.nextafter(1e-3, 1)),
        ("on", 1),
        ("more", None),
    ],
)
def test_any_difference_is_seen(key: str, value: Any) -> None:
    assert list(differing_paths(STATE, {**STATE, key: value}))


def test_equal_bits_are_equal_even_where_values_are_not() -> None:
    nan = torch.tensor([math.nan, -0.0])
    assert not list(differing_paths({"x": nan, "y": math.nan}, {"x": nan.clone(), "y": math.nan}))
    assert list(differing_paths(torch.tensor(0.0), torch.tensor(-0.0)))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.float32(0.0), np.float32(-0.0)),
        (np.array([1.0, 0.0]), np.array([1.0, -0.0])),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.int64)),
        (np.zeros(2, "<f8"), np.zeros(2, ">f8")),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
    ],
)
def test_values_of_numpy_and_complex_numbers_are_compared_by_their_bits(left: Any, right: Any) -> None:
    assert list(differing_paths([left], [right])) == ["/0"]
    assert not list(differing_paths([left, right], [copy.deepcopy(left), copy.deepcopy(right)]))
    nan = np.full(2, math.nan)
    assert not list(differing_paths([nan, nan[0], complex(nan[0])], [nan.copy(), nan[1], complex(nan[1])]))
