"""WHAT MATTERS IN A STATE: how important each value is, and quantiles of importance without sorting."""

from shrinkpoint.statistics.importance import magnitude, sensitivity
from shrinkpoint.statistics.sketch import LogHistogram

__all__ = ["LogHistogram", "magnitude", "sensitivity"]
