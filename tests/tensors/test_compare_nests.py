"""Promise: the demo's comparison sees every difference, down to a bit, a type or a key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shrinkpoint.tensors.compare import compare_sections, differing_paths

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


def test_sections_count_what_they_compared() -> None:
    model, missing = compare_sections({"model": STATE, "gone": 1}, {"model": dict(STATE)})
    assert (model.tensors, model.values, model.nbytes, model.differences) == (2, 2, 28, ())
    assert missing.differences == ("gone",)
