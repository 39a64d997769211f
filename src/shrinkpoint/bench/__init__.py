"""ALL SCHEMES, THE SAME CHECKPOINTS: what each takes, what it loses, how long it takes.

`series` gives checkpoints, a `System` turns each into bytes and back, `measure` holds what came back against what was
given, `table` and `plot` show it.
"""

from shrinkpoint.bench.distortion import Distortion
from shrinkpoint.bench.measure import QualityFunction, measure
from shrinkpoint.bench.result import BenchResult, ResultRow
from shrinkpoint.bench.series import FileSeries, Series, SeriesEntry, StoreSeries, open_series
from shrinkpoint.bench.systems import SYSTEMS, RoundTrip, StoreSystem, System, make_system

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
