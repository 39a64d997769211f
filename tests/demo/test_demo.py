"""Promise: a run that is killed in the middle of a save goes on and ends bit-identical to one that was not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from shrinkpoint.demo.plan import Plan
from shrinkpoint.demo.run import make_room, run
from shrinkpoint.errors import PolicyError


def tiny(store: Path) -> Plan:
    sizes = {"layers": 2, "width": 64, "context": 32, "batch": 2, "threads": 1}
    return Plan(store=store, steps=24, every=3, kill_at=9, keyframe_every=3, written=0, **sizes)


def test_killed_in_a_save_and_resumed_is_bit_identical_to_never_killed(tmp_path: Path) -> None:
    text = io.StringIO()
    plan = tiny(tmp_path / "demo")
    assert run(plan, Console(file=text, width=120)), text.getvalue()
    record = json.loads(plan.record.read_text())
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
        make_room(tiny(store))
    assert (store / "weights").read_text() == "mine"


def test_a_run_too_short_to_be_killed_is_refused_before_it_starts() -> None:
    with pytest.raises(PolicyError, match="two checkpoints"):
        Plan(steps=15, every=10)
