"""The demo: a training run is killed in the middle of a save, resumed, and compared bit for bit with an unkilled one.

`train` is the loop as a user writes it, and `workload` the data and the model that it trains. `scenario` runs the loop
in `processes` of their own, kills and resumes it; `verdict` finds what differs, and `report` prints it.
"""

import os

# Before torch is loaded, which reads it once: OpenMP threads that spin while they wait slow down other threads, such as
# a background save, as soon as the machine has anything else to do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
