"""Promise: a run that is killed in the middle of a save goes on and ends bit-identical to one that was not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from shrinkpoint.demo import scenario
from shrinkpoint.demo.run import remove_previous_store, run_demo
from shrinkpoint.demo.scenario import (
    DemoOptions,
    DemoResult,
    KillResult,
    TrainingLog,
    TrainingProcess,
    kill_during_save,
)
from shrinkpoint.errors import PolicyError


def tiny(store: Path) -> DemoOptions:
    sizes = {"layers": 2, "width": 64, "context": 32, "batch": 2, "threads": 1}
    return DemoOptions(store=store, steps=24, every=3, kill_at=9, keyframe_every=3, written=0, **sizes)


def test_killed_in_a_save_and_resumed_is_bit_identical_to_never_killed(tmp_path: Path) -> None:
    text = io.StringIO()
    plan = tiny(tmp_path / "demo")
    assert run_demo(plan, Console(file=text, width=120)), text.getvalue()
    record = json.loads(plan.record_path.read_text())
    assert record["passed"] and record["killed"]["step"] >= 9 and record["killed"]["left"]
    assert record["resumed at"] == record["killed"]["step"] - plan.every + 1  # the checkpoint before the broken one
    assert {section["name"] for section in record["live"]} == {"model", "optimizer", "scheduler", "data order", "RNG"}
    assert all(section["tensors"] + section["values"] for section in record["live"] + record["stored"])
    assert "PASS" in text.getvalue() and "shrinkpoint list" in text.getvalue()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.json"]  # nothing else is left


def test_a_directory_that_is_not_a_demo_is_left_alone(tmp_path: Path) -> None:
    store = tmp_path / "precious"
    store.mkdir()
    (store / "weights").write_text("mine")
    with pytest.raises(PolicyError, match="not an earlier demo's"):
        remove_previous_store(tiny(store))
    assert (store / "weights").read_text() == "mine"


def test_a_run_too_short_to_be_killed_is_refused_before_it_starts() -> None:
    with pytest.raises(PolicyError, match="two checkpoints"):
        DemoOptions(steps=15, every=10)


def test_where_two_courses_part_is_told_by_process_and_step() -> None:
    whole, killed, resumed = (
        TrainingLog(losses=dict.fromkeys(steps, 1.0)) for steps in (range(9), range(6), range(4, 9))
    )
    told = DemoResult(DemoOptions(), KillResult(5, {}, 1), whole, resumed, killed, [], [], [], None)  # type: ignore[arg-type]
    assert told.divergence is None
    resumed.losses[7] = 2.0
    assert "step 7 of the resumed" in str(told.divergence)
    killed.losses[3] = 2.0
    assert "step 3 of the killed" in str(told.divergence) and "training itself" in str(told.divergence)


def test_kills_that_come_too_late_begin_again_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that every save of a run is over before anybody looks."""
    looks = 0

    def late(child: TrainingProcess, store: Path, since: int, written: int = 0) -> dict[str, int]:
        nonlocal looks
        looks += 1
        if looks > 1:
            return kill_during_save(child, store, since, written)
        child.wait()
        return {}

    monkeypatch.setattr(scenario, "kill_during_save", late)
    plan = tiny(tmp_path / "demo")
    assert run_demo(plan, Console(file=io.StringIO()))
    record = json.loads(plan.record_path.read_text())
    assert record["killed"]["attempts"] >= 2 and record["killed"]["left"] and record["parting"] is None
