"""WHAT MATTERS IN A STATE: how important each value is, quantiles without sorting, intervals of means."""

from shrinkpoint.statistics.importance import magnitude, sensitivity
from shrinkpoint.statistics.interval import paired
from shrinkpoint.statistics.sketch import LogHistogram

__all__ = ["LogHistogram", "magnitude", "paired", "sensitivity"]
