"""ALL SCHEMES, THE SAME CHECKPOINTS: what each takes, what it loses, how long it takes.

`series` gives checkpoints, a `System` turns each into bytes and back, `measure` holds what came back against what was
given, `table` and `plot` show it.
"""

from shrinkpoint.harness.distortion import Distortion
from shrinkpoint.harness.measure import Quality, measure
from shrinkpoint.harness.ours import SYSTEMS, Chain, system
from shrinkpoint.harness.outcome import Outcome, Row
from shrinkpoint.harness.series import Checkpoint, Files, Recorded, Series, series
from shrinkpoint.harness.system import Returned, System

__all__ = [
    "SYSTEMS", "Chain", "Checkpoint", "Distortion", "Files", "Outcome", "Quality", "Recorded", "Returned", "Row",
    "Series", "System", "measure", "series", "system",
]  # fmt: skip
