"""A TRAINING RUN IS KILLED AND GOES ON: the whole path, on real input, checked bit for bit.

`train` is the loop as a user writes it, `text`, `batches` and `model` are what it trains on. `child` runs it in a
process of its own and kills it, `course` is what it told; `plan` and `story` are the plot, `compare` and `measure` look
at what came out, `table` and `run` show it.
"""

import os

# Before torch is loaded, which reads it once: OpenMP threads that spin while they wait starve one another, and whoever
# saves beside them, as soon as the machine has anything else to do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
