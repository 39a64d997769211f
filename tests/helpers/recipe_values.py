"""Values that a forged recipe may have in any field, and the fields of a run."""

from __future__ import annotations

from typing import Any

_NUMBERS: list[Any] = [-1, 0, 1, 2, 255, 256, 4095, 4096, 2**31, 2**32, 2**64, 0.0, 1.5, float("inf")]
_NAMES: list[Any] = ["", "level", "delta", "planes", "none", "base", "tap", "adam"]
_LISTS: list[Any] = [[], [[]], [0], [[0, 0, 1]], [[0, 1, 3]], [[0, 0, 1 << 20]], [[5, -1, 6]], [1.0] * 4]
RECIPE_VALUES: list[Any] = [None, True, False, *_NUMBERS, *_NAMES, *_LISTS, {}, {"tokens": "codes"}]
"""Of every JSON type, at the ends of integer types, and words that recipes have elsewhere."""

RUN_FIELDS = (
    "tokens",
    "predictor",
    "companion",
    "moments",
    "factors",
    "fine",
    "shift",
    "sign",
    "bias",
    "top",
    "parameters",
    "chunk",
    "more",
)
