"""Promise: verl's workers hand the actor's weights to each rank of a rollout, bit for bit, through a place."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv" / "rollouts" / "bin" / "python"  # `make .venv/.rollouts`

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not PYTHON.exists(), reason="verl is not installed")]


def test_rollouts_have_the_weights_of_the_actor_after_each_step(tmp_path):
    program = ROOT / "tests" / "helpers" / "verl_program.py"
    command = [PYTHON, program, tmp_path / "place"]
    ran = subprocess.run(command, cwd=tmp_path, timeout=900, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("SAID"))[5:])
    whole = ["moving", "still"]
    assert [equal for equal, _, _ in said] == [[True, True]] * 3
    assert [names for _, names, _ in said] == [[whole, whole], [whole, ["moving"]], [whole, ["moving"]]]
    sizes = [metrics[0]["weight_sync/bytes"] for _, _, metrics in said]
    assert max(sizes[1:]) * 10 < sizes[0]  # deltas
    assert [metrics[1] for _, _, metrics in said] == [{}] * 3
