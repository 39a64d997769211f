"""The benchmark behind `shrinkpoint-lab bench`: every scheme on the same checkpoints.

`series` reads checkpoints, a `System` turns each into bytes and back, `measure` compares what came back with the
original, `result` shows it.
"""

from shrinkpoint_lab.bench.measure import Distortion, measure
from shrinkpoint_lab.bench.result import BenchResult, ResultRow
from shrinkpoint_lab.bench.series import FileSeries, QualityFunction, Series, SeriesEntry, StoreSeries, open_series
from shrinkpoint_lab.bench.systems import SYSTEMS, RoundTrip, StoreSystem, System, make_system

__all__ = [
    "SYSTEMS",
    "BenchResult",
    "Distortion",
    "FileSeries",
    "QualityFunction",
    "ResultRow",
    "RoundTrip",
    "Series",
    "SeriesEntry",
    "StoreSeries",
    "StoreSystem",
    "System",
    "make_system",
    "measure",
    "open_series",
]
