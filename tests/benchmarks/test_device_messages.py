"""The benchmark of messages on a device runs where there is none, too."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.paths import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"


def test_messages_on_any_device_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    device_messages = importlib.import_module("device_messages")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = ["--device", device, "--numel", "65536", "--repeats", "2", "--out", str(tmp_path / "messages.json")]
    monkeypatch.setattr(sys, "argv", ["device_messages.py", *options])
    device_messages.main()
    rows = {(row["subject"], row["dtype"]): row for row in json.loads((tmp_path / "messages.json").read_text())["rows"]}
    assert {subject for subject, _ in rows} == set(device_messages.subjects())
    assert rows["q4:64", "torch.float32"]["bits"] == 4.5
    assert rows["copy", "torch.bfloat16"]["error"] == 0
    assert all(row["encode"] > 0 and row["decode"] > 0 for row in rows.values())
