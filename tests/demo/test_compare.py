"""Promise: the demo's comparison sees every difference, down to a bit, a type or a key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shrinkpoint.demo.compare import compare, differences

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
    assert list(differences(STATE, {**STATE, key: value}))


def test_equal_bits_are_equal_even_where_values_are_not() -> None:
    nan = torch.tensor([math.nan, -0.0])
    assert not list(differences({"x": nan, "y": math.nan}, {"x": nan.clone(), "y": math.nan}))
    assert list(differences(torch.tensor(0.0), torch.tensor(-0.0)))


def test_sections_count_what_they_compared() -> None:
    model, missing = compare({"model": STATE, "gone": 1}, {"model": dict(STATE)})
    assert (model.tensors, model.values, model.nbytes, model.differences) == (2, 2, 28, ())
    assert missing.differences == ("gone",)
