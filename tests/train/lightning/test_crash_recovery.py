"""A training process is killed while it saves: what was there before still loads, and training goes on from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.lightning_runs import QUIET, every, points, small, trainer
from helpers.paths import TESTS
from helpers.timeouts import PATIENCE

from shrinkpoint.store.directory import is_checkpoint, read_directory_manifest, verify_directory
from shrinkpoint.train.lightning import ShrinkIO, latest_valid

pytestmark = [pytest.mark.nightly, *(pytest.mark.filterwarnings(line) for line in QUIET)]

PROGRAM = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from helpers.lightning_runs import every, points, small, trainer
from shrinkpoint.train.lightning import ShrinkIO

root = Path(sys.argv[1])
model = small(width=40_000)  # a save takes about as long as a step
run = trainer(root, ShrinkIO(background=sys.argv[2] == "True"), epochs=1000, callbacks=[
    every(root / "all", save_top_k=1, every_n_train_steps=1, filename="{step}")
])
run.fit(model, points(1))
"""


def test_a_killed_run_goes_on_from_a_whole_checkpoint(tmp_path):
    """Six runs, of which every other one saves in the background."""
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    cut_off = 0
    for count in range(6):
        root = tmp_path / str(count)
        command = [sys.executable, "-c", PROGRAM, str(root), str(count % 2 == 1)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and newest_step(root) < 3 + count and child.poll() is None:
                time.sleep(0.01)
            time.sleep(0.037 * count)
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        cut_off += any(not is_checkpoint(path) for path in (root / "all").glob("*.ckpt"))
        latest = latest_valid(root / "all")
        assert latest is not None
        step = verify_directory(latest, deep=True).step
        run = trainer(root, ShrinkIO(), epochs=step + 1, callbacks=[every(root / "all", save_top_k=1)])
        run.fit(small(width=40_000), points(1), ckpt_path=latest)
        assert run.global_step == step + 1
    assert cut_off  # 9 of 12, when this was written


def newest_step(root: Path) -> int:
    manifests = [*(root / "all").glob("*/shrinkpoint.json")] if root.exists() else []
    try:
        return max((read_directory_manifest(path.parent).step for path in manifests), default=0)
    except KeyError:  # deleted meanwhile
        return 0
