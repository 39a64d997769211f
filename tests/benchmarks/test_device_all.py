"""Promise: the command that measures a GPU runs whole on a CPU, and a part that fails costs its own rows alone."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.paths import REPOSITORY

FIGURES = {
    "machine": "value",
    "tests": "number",
    "saves": "durable, s",
    "training": "rise on unseen text, %",
    "messages": "encode, kernels",
    "dcp": "durable, s",
    "throughput": "tokens/s",
    "replicas": "step, ms",
    "sync": "pause, ms",
    "sanitizer": "seconds",
}
"""A figure that each part has measured."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))  # parts import each other by their file names
    return importlib.import_module("device_all")


def run_parts(program: ModuleType, out: Path, *names: str) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """The rows of these parts, measured on toys on the CPU, and what the command prints."""
    command = [sys.executable, program.__file__, "--out", str(out), "--quick", "--device", "cpu", "--only", *names]
    command += ["--seconds", "3600"]  # of a busy machine
    done = subprocess.run(command, capture_output=True, text=True, cwd=out)
    assert done.returncode == 0, done.stderr[-4000:]
    parts = {part["name"]: part["rows"] for part in json.loads((out / "results.json").read_text())["parts"]}
    assert list(parts) == [*names]
    for name, rows in parts.items():
        assert [row for row in rows if "error" in row] == [], (out / "log.txt").read_text()[-4000:]
        assert any(FIGURES[name] in row for row in rows), name
    return parts, done.stdout


def test_messages_have_their_figures_on_a_cpu(program: ModuleType, tmp_path: Path) -> None:
    parts, printed = run_parts(program, tmp_path, "machine", "messages")
    q4 = next(row for row in parts["messages"] if row["message"] == "q4:64")
    assert (q4["bits a value"], q4["encode, kernels"] > 0, q4["as by torch operations"]) == (4.5, True, True)
    assert all(row.get("as by torch operations", True) for row in parts["messages"])
    segment = next(row for row in parts["messages"] if row["message"] == "q4:64, 8 ranks")
    assert segment["encode, kernels"] > 0 and segment["decode, host ms"] > 0
    assert "| q4:64 |" in (tmp_path / "results.md").read_text() and "| q4:64 |" in printed


@pytest.mark.nightly
def test_every_part_has_its_figures_on_a_cpu(program: ModuleType, tmp_path: Path) -> None:
    assert [part.name for part in program.PARTS] == [*FIGURES]
    parts, _ = run_parts(program, tmp_path, *FIGURES)
    assert {row["method"] for row in parts["saves"]} >= {"copy", "torch.save", "fisher, at once", "lossless"}
    assert all(row["stall, s"] <= row["durable, s"] for row in parts["saves"] if "stall, s" in row)
    assert all(row["equal to the CPU's"] for row in parts["training"] if "equal to the CPU's" in row)
    assert all(row["equal"] for row in parts["sync"] if "equal" in row)
    (skipped,) = (row["number"] for row in parts["tests"] if row["tests"] in ("skipped", "passed") and row["number"])
    assert skipped > 1


def test_a_part_that_fails_or_hangs_keeps_its_rows_and_the_next_one_runs(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "faulty.py").write_text(
        "import os, time\n"
        "def raises(job):\n    job.add(number=1)\n    raise ValueError('a fault of this part')\n"
        "def dies(job):\n    job.add(number=2)\n    os._exit(7)\n"
        "def hangs(job):\n    time.sleep(600)\n"
        "def works(job):\n"
        "    with job.attempt(name='first'):\n        1 / 0\n"
        "    job.add(name='second', number=3)\n"
    )
    names = {"raises": 60, "dies": 60, "hangs": 2, "works": 60}
    parts = [program.Part(name, name, f"faulty:{name}", seconds) for name, seconds in names.items()]
    limit = sum(names.values())  # so that the part that hangs gets no more than it asks for
    run = program.Run(tmp_path, "cpu", True, limit, {})
    run.run(parts)
    rows = {part["name"]: part["rows"] for part in json.loads((tmp_path / "results.json").read_text())["parts"]}
    assert rows["raises"] == [{"number": 1}, {"error": "ValueError: a fault of this part"}]
    assert rows["dies"][0] == {"number": 2} and "ended with 7" in rows["dies"][1]["error"]
    assert "ended by its limit" in rows["hangs"][-1]["error"]
    assert rows["works"] == [
        {"name": "first", "error": "ZeroDivisionError: division by zero"},
        {"name": "second", "number": 3},
    ]
    assert "| ended by its limit" in (tmp_path / "results.md").read_text()


def test_a_failed_test_is_a_row_with_its_error_and_a_warning_is_none(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import device_checks
    from device_job import Job

    monkeypatch.setattr(device_checks, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\nfilterwarnings = error\n")
    (tmp_path / "tests" / "test_side_streams.py").write_text(
        "import pytest, warnings\npytestmark = pytest.mark.gpu\n"
        "def test_warns():\n    warnings.warn('a warning')\n"
        "def test_skips():\n    pytest.skip('none here')\n"
        "@pytest.mark.parametrize('x', ['a name'])\ndef test_fails(x):\n    assert 1 == 2\n"
        "@pytest.fixture\ndef broken():\n    raise OSError('no device')\n"
        "def test_breaks(broken):\n    pass\n"
    )
    (tmp_path / "tests" / "test_link.py").write_text("import no_such_module  # mark.gpu\n")
    job = Job("tests", torch.device("cpu"), True, tmp_path / "rows", tmp_path, tmp_path, time.monotonic() + 600)
    device_checks.tests(job)
    rows = {row["tests"]: row for row in map(json.loads, job.rows.read_text().splitlines())}
    assert {kind: rows[kind]["number"] for kind in ("passed", "failed", "skipped", "error")} == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "error": 1,
    }
    errors = {name: row["error"] for name, row in rows.items() if "error" in row and name != "error"}
    assert errors == {
        "tests/test_side_streams.py::test_fails[a name]": "assert 1 == 2",
        "tests/test_side_streams.py::test_breaks": "OSError: no device",
        "tests/test_link.py": "failed",
    }
    assert (tmp_path / "junit.xml").exists()


def test_what_does_not_fit_into_the_time_is_a_row(program: ModuleType, tmp_path: Path) -> None:
    run = program.Run(tmp_path, "cpu", True, 0.0, {})
    run.run(program.PARTS)
    assert [part["rows"] for part in run.parts] == [[{"note": "not run: out of time"}]] * len(program.PARTS)


def test_a_wheel_in_dist_is_found_without_network(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library can be imported it is taken; else the newest wheel that this Python can use; else the tree."""
    assert program.find_library(tmp_path)[1] == "importable"
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        assert "-c" in command or {"--no-index", "--no-deps", "--target"} <= {*command}
        return subprocess.CompletedProcess(command, 1, "", "error: no such thing")

    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "shrinkpoint-0.1.0-cp312-abi3-linux.whl").touch()
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program.subprocess, "run", run)
    _, source = program.find_library(tmp_path / "library")
    assert source.startswith("not installed: shrinkpoint-0.1.0-cp312-abi3-linux.whl: error: no such thing")
    assert [Path(word).name for word in asked[1:]] == ["shrinkpoint-0.1.0-cp312-abi3-linux.whl", tmp_path.name]
