"""Promise: a run that is killed in the middle of a save goes on and ends bit-identical to one that was not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

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


class FinishedDemo(NamedTuple):
    """A demo that passed, what it printed, and what it recorded."""

    options: DemoOptions
    text: str
    record: dict[str, Any]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> FinishedDemo:
    """A demo whose first kill comes too late: as on a machine so busy that every save of a run is over by then."""
    attempts = 0

    def kill_too_late_once(child: TrainingProcess, store: Path, first_step: int, min_bytes: int = 0) -> dict[str, int]:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            return kill_during_save(child, store, first_step, min_bytes)
        child.wait()
        return {}

    options, text = tiny(tmp_path_factory.mktemp("finished") / "demo"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "kill_during_save", kill_too_late_once)
        assert run_demo(options, Console(file=text, width=120)), text.getvalue()
    return FinishedDemo(options, text.getvalue(), json.loads(options.record_path.read_text()))


def test_killed_in_a_save_and_resumed_is_bit_identical_to_never_killed(demo: FinishedDemo) -> None:
    options, text, record = demo
    assert record["passed"] and record["killed"]["step"] >= 9 and record["killed"]["left"]
    assert record["resumed at"] == record["killed"]["step"] - options.every + 1  # the checkpoint before the broken one
    assert {section["name"] for section in record["live"]} == {"model", "optimizer", "scheduler", "data order", "RNG"}
    assert all(section["tensors"] + section["values"] for section in record["live"] + record["stored"])
    assert "PASS" in text and "shrinkpoint list" in text
    names = sorted(path.name for path in options.store.parent.iterdir())
    assert names == ["demo", "demo.json"]  # nothing else is left


def test_kills_that_come_too_late_begin_again_from_the_start(demo: FinishedDemo) -> None:
    record = demo.record
    assert record["killed"]["attempts"] >= 2 and record["killed"]["left"] and record["parting"] is None


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
