"""Promise: after a SIGKILL at any moment every committed checkpoint is there, bit for bit, and no litter stays."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from helpers.paths import REPOSITORY

BENCHMARK = REPOSITORY / "benchmarks" / "crash_recovery.py"


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_twenty_kills_lose_no_committed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))  # by path, so that the killed process finds it too
    crash_recovery = importlib.import_module("crash_recovery")
    kills = list(crash_recovery.campaign(tmp_path, kills=20))
    assert [problem for one in kills for problem in one.problems] == []
    summary = crash_recovery.summary(kills)
    assert summary["in an unfinished save or deletion"] and summary["  of these with weights only"]
