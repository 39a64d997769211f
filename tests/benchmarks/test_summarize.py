"""Promise: a run takes the place of an earlier one of its settings and processor, and of no other."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.paths import REPOSITORY


@pytest.fixture
def summarize(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("summarize")


def test_a_run_on_another_processor_stands_beside_the_earlier_one(summarize: ModuleType, tmp_path: Path) -> None:
    earlier = {"machine": {"cpu": "Xeon"}, "runs": [{"settings": {"seed": 0}, "on": 57.5}]}  # its processor above it
    ledger = tmp_path / "study.jsonl"
    _write(ledger, _record(0, "EPYC", 55.3), _record(0, "EPYC", 55.4))
    both = summarize.summary(ledger, earlier, "abc")
    assert [run["on"] for run in both["runs"]] == [57.5, 55.4]
    _write(ledger, _record(0, "Xeon", 57.6), _record(1, "Xeon", 56.6))
    again = summarize.summary(ledger, both | {"machine": {"cpu": "Xeon"}}, "abc")
    assert [(run.get("cpu"), run["on"]) for run in again["runs"]] == [("Xeon", 57.6), ("EPYC", 55.4), ("Xeon", 56.6)]


def test_a_run_says_the_errors_of_its_messages(summarize: ModuleType) -> None:
    links = {"0 forward": {"relative_error": 0.1234567, "messages": 3}, "0 backward": {"relative_error": None}}
    row = summarize.row(_record(0, "EPYC", 55.3) | {"links": links})
    assert row["relative error of messages"] == {"0 forward": 0.12346, "0 backward": None}


def _record(seed: int, cpu: str, on: float) -> dict[str, Any]:
    return {
        "settings": {"seed": seed},
        "version": "0123456789ab",
        "on": on,
        "machine": {"cpu": cpu},
        "at": "2026-11-25",
    }


def _write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
