"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.timeouts import PATIENCE

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_pipeline_learns_and_sends_a_seventh_of_the_bytes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*command, str(EXAMPLES / "pipeline.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", ran.stdout)]
    assert losses[-1] < losses[0] < 5.6
    ratios = [float(found) for found in re.findall(r"([\d.]+) times fewer", ran.stdout)]
    assert ratios == [7.1, 7.1], ran.stdout
