"""Promise: the benchmark of local steps counts the bytes of real ranks, which stay equal, and does not repeat a run."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.paths import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
SPARSE = "2/1.0/0.0/ef(top3.125:4096:q2:64, decay=0.95)"


@pytest.fixture
def local_steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("local_steps")


def test_a_method_is_named_or_spelled_out(local_steps: ModuleType) -> None:
    assert local_steps.settings_of("30/0.9/0.5") == local_steps.Local(30, 0.9, 0.5, None)
    assert local_steps.settings_of(SPARSE).compressor == "ef(top3.125:4096:q2:64, decay=0.95)"
    assert local_steps.settings_of("DiLoCo, q4:64") == local_steps.Local(30, 0.7, 0.9, "q4:64")


def test_a_line_compares_bytes_and_losses_of_the_same_seeds(local_steps: ModuleType) -> None:
    base = {"0": _run(2.0, 1e6), "1": _run(2.2, 1e6)}
    words = local_steps.line("some method", {"1": _run(2.211, 1e4)}, base)
    assert "100.0x" in words and "+0.50 %" in words and "NOT EQUAL" not in words
    assert "NOT EQUAL" in local_steps.line("some method", {"0": _run(2.0, 1e4) | {"equal": False}}, base)


def test_two_ranks_train_and_a_run_that_is_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    first = _measure(tmp_path, out, "bf16 hook", SPARSE)
    methods = first["tasks"]["text"]["ranks"]["2"]
    runs = {name: run["7"] for name, run in methods.items()}
    assert all(run["equal"] and run["steps"] == 10 and len(run["curve"]) == 5 for run in runs.values())
    assert runs["bf16 hook"]["loss"] < 6  # of 5.5 untrained, after ten steps
    parameters = first["tasks"]["text"]["parameters"]
    assert runs[SPARSE]["ledger"] * 2 < 2 * parameters * 4 / 20  # of both ranks in the two steps of a round, of float32
    if runs["bf16 hook"]["kernel"] is not None:  # root: counted by the kernel
        assert runs["bf16 hook"]["kernel"] >= 2 * 2 * parameters
        assert runs[SPARSE]["ledger"] < runs[SPARSE]["kernel"] < runs["bf16 hook"]["kernel"] / 10
    methods["bf16 hook"]["7"]["loss"] = 123.0
    out.write_text(json.dumps(first))
    assert _measure(tmp_path, out, "bf16 hook")["tasks"]["text"]["ranks"]["2"]["bf16 hook"]["7"]["loss"] == 123.0


def test_a_step_on_a_link_is_as_long_as_the_slower_ranks(local_steps: ModuleType) -> None:
    link = importlib.import_module("local_steps_link")
    ranks = [{"alone": {"seconds": [1.0, 5.0], "sent": 10}}], [{"alone": {"seconds": [2.0, 2.0], "sent": 30}}]
    row = link.summarize(list(ranks), "alone")
    assert (row["mean"], row["median"], row["steps"], row["sent"]) == (3.0, 3.5, 2, 5.0)
    assert set(link.NAMES) <= set(local_steps.METHODS)


def _run(loss: float, kernel: float) -> dict[str, Any]:
    return {"loss": loss, "kernel": kernel, "ledger": None, "equal": True}


def _measure(data: Path, out: Path, *methods: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / "local_steps.py"), str(data), "--tasks", "text", "--seeds", "7"]
    command += ["--steps", "10", "--out", str(out), "--only", *methods]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(out.read_text())
    return document
