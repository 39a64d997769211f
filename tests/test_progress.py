"""Whoever watches hears of long operations, and of nothing when nobody asked; the time left is an estimate."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import torch
from helpers.quadratic_loss import Bowl

import shrinkpoint as sp
from shrinkpoint import watch_progress
from shrinkpoint.progress import Task, TaskProgress, track


def titles(seen: list[TaskProgress]) -> list[str]:
    return list(dict.fromkeys(report.title.partition(" ")[0] for report in seen))


def ends(seen: list[TaskProgress]) -> dict[str, tuple[int, int | None]]:
    return {r.title.partition(" ")[0]: (r.done, r.total) for r in seen if r.is_finished}


def test_a_task_reports_its_begin_each_step_and_its_end_also_when_it_fails() -> None:
    seen: list[TaskProgress] = []
    with watch_progress(seen.append):
        assert list(track([7, 8], "counting")) == [7, 8]
        with pytest.raises(ValueError), Task("failing", 3) as task:
            task.advance()
            raise ValueError
    assert [(r.title, r.done, r.total, r.is_finished) for r in seen] == [
        ("counting", 0, 2, False),
        ("counting", 1, 2, False),
        ("counting", 2, 2, False),
        ("counting", 2, 2, True),
        ("failing", 0, 3, False),
        ("failing", 1, 3, False),
        ("failing", 1, 3, True),
    ]
    assert len({r.key for r in seen}) == 2


def test_the_time_left_is_that_of_the_speed_so_far() -> None:
    assert TaskProgress(1, "x", 25, 100, "", 10.0).seconds_left == 30.0
    assert TaskProgress(1, "x", 0, 100, "", 10.0).seconds_left is None
    assert TaskProgress(1, "x", 25, None, "", 10.0).seconds_left is None
    assert TaskProgress(1, "x", 25, 100, "", 10.0, is_finished=True).seconds_left == 0.0


def test_more_than_was_expected_moves_the_end() -> None:
    seen: list[TaskProgress] = []
    with watch_progress(seen.append), Task("trials", 2) as task:
        for _ in range(3):
            task.advance()
        task.expect(4)
    assert [r.total for r in seen] == [2, 2, 2, 3, 7, 7]


def test_nobody_is_told_outside_of_the_block_nor_of_other_threads() -> None:
    seen: list[TaskProgress] = []
    with watch_progress(seen.append):
        thread = threading.Thread(target=lambda: list(track([1], "elsewhere")))
        thread.start()
        thread.join()
    list(track([1], "later"))
    assert seen == []


def test_a_listener_that_fails_is_warned_of_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fail(report: TaskProgress) -> None:
        calls.append(report)
        raise OSError("the terminal is closed")

    with watch_progress(fail), caplog.at_level(logging.WARNING, "shrinkpoint"):
        assert list(track(range(5), "counting")) == [0, 1, 2, 3, 4]
    assert len(calls) == 1 and "the terminal is closed" in caplog.text


def test_tending_a_store_is_told_of(tmp_path: Path) -> None:
    seen: list[TaskProgress] = []
    with sp.Store(tmp_path) as store, watch_progress(seen.append):
        for step in (1, 2, 3):
            store.save(step, {"w": torch.arange(1000.0) + step})
        stored = sum(manifest.stored_bytes for manifest in store.list())
        store.forget(2)
        store.compact()
        store.verify(deep=True)
        store.prune(dry_run=False)
    assert titles(seen) == ["compacting", "reading", "decoding", "deleting"]
    told = ends(seen)
    assert told["compacting"] == (1, 1) and told["decoding"] == (2, 2)
    assert 0 < told["reading"][0] == told["reading"][1] < 2 * stored and told["deleting"][0] == told["deleting"][1] > 0


@pytest.mark.parametrize("name", ["fisher", "inshrinkerator"])
def test_evaluations_of_a_scheme_are_counted(name: str) -> None:
    bowl, seen, calls = Bowl(), list[TaskProgress](), 0

    def evaluate(state: dict) -> float:
        nonlocal calls
        calls += 1
        return 1 + bowl.rise(state["model"])

    scheme = sp.Fisher(budget="1%", evaluate=evaluate) if name == "fisher" else sp.Inshrinkerator(evaluate=evaluate)
    from shrinkpoint.storage import MemoryStorage

    with watch_progress(seen.append), sp.Store(MemoryStorage()) as store:
        store.save(1, bowl.state, scheme=scheme)
    reports = [r for r in seen if r.title == f"{name}: measuring the loss"]
    assert reports[-1].is_finished and reports[-1].done == calls > 2
    assert any(r.seconds_left is not None and not r.is_finished for r in reports)


def test_an_upload_is_counted_in_bytes(s3: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.storage.object_storage._MAX_HELD_BYTES", 1 << 20)
    seen: list[TaskProgress] = []
    with watch_progress(seen.append):
        report = sp.save({"w": torch.randn(3_000_000)}, f"s3://checkpoints/progress-{os.getpid()}.safetensors")
    uploads = [r for r in seen if r.title.startswith("uploading")]
    assert uploads[-1].is_finished and uploads[-1].unit == "bytes"
    assert uploads[-1].done == uploads[-1].total == report.stored_bytes
