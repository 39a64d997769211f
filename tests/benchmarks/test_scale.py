"""Promise: the benchmark of sizes runs, and says of every figure whether it meets its target."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.paths import REPOSITORY
from helpers.processes import run_forked

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale_report")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc")
def test_a_tiny_model_is_measured_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    scale = importlib.import_module("scale")
    monkeypatch.setattr(scale, "subprocess", SimpleNamespace(run=_run_first_as_is_and_fork_others()))
    options = ["--models", "tiny", "--repeats", "2", "--methods", "fisher", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["scale.py", *options, "--add", "--out", str(tmp_path / "scale.json")])
    other = _row("keyframe", 1, 1.0) | {key: [1.0, 1.0] for key in ("seconds", "processor_seconds", "user_seconds")}
    (tmp_path / "scale.json").write_text(json.dumps({"rows": [other, other | {"model": "tiny"}]}))
    scale.main()
    document = json.loads((tmp_path / "scale.json").read_text())
    assert document["rows"].pop(0) == other
    assert [row for row in document["rows"] if "error" in row] == []
    assert {row["rounds"] for row in document["rows"]} == {2}
    assert all(least <= median for row in document["rows"] for median, least in [row["user_seconds"]])
    assert any("fisher delta, GB/s a core" in figure["name"] for figure in document["figures"])
    assert ">= 1.5" in capsys.readouterr().out


def _run_first_as_is_and_fork_others() -> Any:
    """`subprocess.run`, and after its first call forks of a process that has imported torch: an import costs more."""
    program = f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); runpy.run_path({{!r}}, run_name='__main__')"
    runs = 0

    def run(command: list[str], **settings: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 1:
            return subprocess.run(command, **settings)
        _, script, argument = command
        return subprocess.CompletedProcess(command, 0, run_forked(program.format(script), argument), "")

    return run


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc")
@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")
@pytest.mark.parametrize(
    "method",
    [
        "copy",
        "torch.save",
        "safetensors",
        "lossless",
        "fisher, AVX2",
        "background",
        pytest.param("chain", marks=pytest.mark.nightly),
    ],
)
def test_every_method_has_rows(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    methods, states = importlib.import_module("scale_methods"), importlib.import_module("scale_states")
    states.make_states(tmp_path, "tiny", 2, 1)
    live = states.LiveState(tmp_path, "tiny")
    work = tmp_path / "work"
    work.mkdir()
    meters = [methods.Meter(live, of_memory) for of_memory in (False, True)]
    for meter in meters:
        methods.METHODS[method](meter, live, work, 1)
        shutil.rmtree(work)
        work.mkdir()
    times, memory = (meter.rows for meter in meters)
    assert list(dict.fromkeys(row["operation"] for row in times)) == [row["operation"] for row in memory]
    assert len(times) >= 2
    assert all(row["seconds"] > 0 and row["user_seconds"] <= row["processor_seconds"] for row in times)
    assert not any("seconds" in key for row in memory for key in row)
    assert all(row["beyond_live_states"] >= 0 for row in memory)


def _row(operation: str, threads: int, seconds: float, method: str = "fisher", **more: float) -> dict[str, object]:
    times = {"seconds": seconds, "processor_seconds": seconds, "user_seconds": seconds}
    sizes = {"state_bytes": 10**9, "peak_states": 0.5, "beyond_live_states": 0.5}
    return {"model": "30M", "threads": threads, "method": method, "operation": operation} | times | sizes | more


def test_figures_are_of_the_median_and_of_the_least_of_all_rounds(report: ModuleType) -> None:
    rounds = [
        _row("keyframe", threads, seconds) for threads, slow in ((1, 2.0), (2, 1.0)) for seconds in (slow, 0.4, 9.0)
    ]
    rounds += [_row("keyframe, synced", 2, 1.5, method="torch.save") for _ in range(3)]
    figures = {figure.name: figure for figure in report.figures(report.summarize(rounds))}
    speed = figures["30M, 1 thread: fisher keyframe, GB/s a core"]
    assert speed.values == pytest.approx([0.5, 2.5, 2.5]) and speed.verdict == "at best"
    against = figures["30M, 2 threads: fisher keyframe, seconds / torch.save keyframe, synced"]
    assert against.values[0] == pytest.approx(2 / 3) and against.verdict == "yes"
    assert figures["30M: fisher keyframe, 1 thread / 2"].values[0] == pytest.approx(2)
    assert figures["30M, 1 thread: fisher keyframe, states beyond the live one"].verdict == "no"


def test_a_stall_is_compared_with_a_copy(report: ModuleType) -> None:
    rounds = [
        _row("copy", 1, 0.2, method="copy"),
        _row("lossless, keyframe", 1, 3.0, method="background", stall_seconds=0.22, beyond_live_states=2.1),
    ]
    figures = {figure.name: figure for figure in report.figures(report.summarize(rounds))}
    assert figures["30M, 1 thread: lossless, keyframe, stall / copy"].verdict == "yes"
    assert figures["30M, 1 thread: lossless, keyframe in the background, states beyond the live one"].verdict == "yes"


def test_a_method_that_failed_is_a_row_of_its_own(report: ModuleType) -> None:
    failed = {"model": "30M", "threads": 1, "method": "zipnn", "operation": "", "error": "No module named 'zipnn'"}
    rows = report.summarize([_row("keyframe", 1, 1.0), failed])
    assert any("No module named" in line for line in report.operation_table(rows))
    assert [figure for figure in report.figures(rows) if "zipnn" in figure.name] == []
