"""A training process is killed while it saves: what was there before still loads, and training goes on from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lit import QUIET, every, points, small, trainer
from patience import PATIENCE

from shrinkpoint.store.folder import check, is_checkpoint, read_manifest
from shrinkpoint.train.lightning import ShrinkIO, newest

pytestmark = [pytest.mark.nightly, *(pytest.mark.filterwarnings(line) for line in QUIET)]

PROGRAM = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from lit import every, points, small, trainer
from shrinkpoint.train.lightning import ShrinkIO

root = Path(sys.argv[1])
model = small(width=40_000)  # a save takes about as long as a step
run = trainer(root, ShrinkIO(background=sys.argv[2] == "True"), epochs=1000, callbacks=[
    every(root / "all", save_top_k=1, every_n_train_steps=1, filename="{step}")
])
run.fit(model, points(1))
"""


@pytest.mark.parametrize("background", [False, True])
def test_a_killed_run_goes_on_from_a_whole_checkpoint(tmp_path, background):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    cut_off = 0
    for count in range(6):
        root = tmp_path / str(count)
        command = [sys.executable, "-c", PROGRAM, str(root), str(background)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and newest_step(root) < 3 + count and child.poll() is None:
                time.sleep(0.01)
            time.sleep(0.037 * count)
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        cut_off += any(not is_checkpoint(path) for path in (root / "all").glob("*.ckpt"))
        found = newest(root / "all")
        assert found is not None
        step = check(found, deep=True).step
        run = trainer(root, ShrinkIO(), epochs=step + 1, callbacks=[every(root / "all", save_top_k=1)])
        run.fit(small(width=40_000), points(1), ckpt_path=found)
        assert run.global_step == step + 1
    assert cut_off  # 9 of 12, when this was written


def newest_step(root: Path) -> int:
    manifests = [*(root / "all").glob("*/shrinkpoint.json")] if root.exists() else []
    try:
        return max((read_manifest(path.parent).step for path in manifests), default=0)
    except KeyError:  # deleted meanwhile
        return 0
