"""Measures how much quantized weights degrade the loss, and weights with the opposite errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from shrinkpoint.schemes.evaluate import Degradation
from shrinkpoint.schemes.fisher.steps import QuantizedWeights


class Measure(Protocol):
    """Measures how much quantized weights degrade the loss."""

    def __call__(self, quantized: QuantizedWeights, *, mirrored: bool = False) -> Degradation:
        """Measure; `mirrored`: weights with the opposite errors."""
        ...


def measure_with(change: Callable[[Mapping[str, Tensor]], Degradation], weights: Mapping[str, Tensor]) -> Measure:
    """The `Measure` of weights that evaluates values with `change`."""

    def measure(quantized: QuantizedWeights, *, mirrored: bool = False) -> Degradation:
        return change(quantized.mirrored_values(weights) if mirrored else quantized.values)

    return measure
