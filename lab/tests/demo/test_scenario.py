"""Promise: a run that is killed in the middle of a save goes on and ends bit-identical to one that was not."""

from __future__ import annotations

import html
import io
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.forked_training import ForkedTraining
from rich.console import Console

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import Store
from shrinkpoint_lab.demo import processes, scenario
from shrinkpoint_lab.demo.digests import compare_sections, state_digests
from shrinkpoint_lab.demo.processes import TrainingProcess, kill_during_save
from shrinkpoint_lab.demo.run import remove_previous_store, run_demo
from shrinkpoint_lab.demo.scenario import DemoOptions, Scenario, check_store

RICH = "https://www.textualize.io"
"""An address in a comment of every picture of rich."""


def tiny(store: Path, disturb: tuple[str, int] | None = None) -> DemoOptions:
    sizes = {"layers": 2, "width": 64, "context": 32, "batch": 2, "threads": 1}
    course = {"steps": 24, "every": 3, "kill_at": 9, "keyframe_every": 3, "written": 0}
    return DemoOptions(store=store, disturb=disturb, **course, **sizes)


class FinishedDemo(NamedTuple):
    """A demo that passed, what it printed, and what it recorded."""

    options: DemoOptions
    text: str
    record: dict[str, Any]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> FinishedDemo:
    """A demo whose first kill comes too late: as on a machine so busy that every save of a run is over by then.

    The first two trainings are forked, one that is never killed and one that is over before it is. The third, which is
    killed, and all after it are started as a user's are.
    """
    attempts, first_ones = 0, iter((ForkedTraining, ForkedTraining))

    def start(*arguments: Any, **settings: Any) -> Any:
        return next(first_ones, subprocess.Popen)(*arguments, **settings)

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
        patch.setattr(processes, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
        picture = options.store.with_name("demo.svg")
        assert run_demo(options, Console(file=text, width=80), picture), text.getvalue()
    return FinishedDemo(options, text.getvalue(), json.loads(options.record_path.read_text()))


def test_killed_in_a_save_and_resumed_is_bit_identical_to_never_killed(demo: FinishedDemo) -> None:
    options, text, record = demo
    assert record["passed"] and record["killed"]["step"] >= 9 and record["killed"]["files"]
    assert record["resumed at"] == record["killed"]["step"] - options.every + 1  # the checkpoint before the broken one
    assert {section["name"] for section in record["live"]} == {"model", "optimizer", "scheduler", "extra", "rng"}
    assert all(section["tensors"] + section["values"] for section in record["live"] + record["stored"])
    rows = {line.split()[0]: line.split() for line in text.partition("Killed in")[0].splitlines() if line.split()}
    plain, lossless, lossy = (rows[name] for name in ("torch.save", "lossless", 'Fisher(budget="1%")'))
    assert plain[-2:] == lossless[-2:] == ["the", "same"] and lossy[-1].endswith("%")
    ratios = [float(line[3].removesuffix("x")) for line in (plain, lossless, lossy)]
    assert ratios[0] == 1.0 < ratios[1] < ratios[2]
    assert f"Killed in the save of step {record['killed']['step']}, resumed at step {record['resumed at']}." in text
    assert "PASS" in text and "shrinkpoint list" in text and record["findings"] == [] and record["cause"] is None
    assert record["losses"]["resumed"].items() <= record["losses"]["never killed"].items()
    assert [check["step"] for check in record["checkpoints"]] == [*range(3, 25, 3)]
    names = sorted(path.name for path in options.store.parent.iterdir())
    assert names == ["demo", "demo.json", "demo.svg"]  # nothing else is left


def test_the_picture_shows_what_was_printed_and_fetches_nothing(demo: FinishedDemo) -> None:
    picture = demo.options.store.with_name("demo.svg").read_text()
    assert re.findall(r"https?://[^ \"]+", picture.replace("http://www.w3.org/2000/svg", "")) == [RICH]
    drawn = html.unescape(" ".join(re.findall(r"<text [^>]*>([^<]*)</text>", picture)))
    kill, table = demo.record["killed"]["step"], demo.text.partition("The checkpoint of")[2].partition("Fisher eval")[0]
    for word in (*table.split(), *f"Killed in the save of step {kill} PASS: never killed resumed 24/24".split()):
        assert word in drawn.split(), word


def test_kills_that_come_too_late_begin_again_from_the_start(demo: FinishedDemo) -> None:
    record = demo.record
    assert record["killed"]["attempts"] >= 2 and record["killed"]["files"]


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


def finished(options: DemoOptions) -> tuple[bool, str, dict[str, Any]]:
    text = io.StringIO()
    passed = run_demo(options, Console(file=text, width=80))
    return passed, " ".join(text.getvalue().split()), json.loads(options.record_path.read_text())


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=ForkedTraining, PIPE=subprocess.PIPE))


@pytest.mark.usefixtures("forked")
def test_a_killed_run_that_had_differed_before_the_kill_is_not_put_down_to_the_store(tmp_path: Path) -> None:
    passed, text, record = finished(tiny(tmp_path / "demo", disturb=("killed", 5)))
    assert not passed and record["cause"] == "training" and len(record["findings"]) == 1
    assert "After step 5 the killed process differs from the one never killed: model/token.weight" in text
    assert "It had restored nothing" in text and "All 8 checkpoints give back, bit for bit" in text
    assert all(not check["names"] and not check["error"] for check in record["checkpoints"])


@pytest.mark.usefixtures("forked")
def test_a_difference_after_the_restore_is_judged_by_training_from_the_checkpoint_again(tmp_path: Path) -> None:
    passed, text, record = finished(tiny(tmp_path / "demo", disturb=("resumed", 24)))
    assert not passed and record["cause"] == "training"
    assert "After step 24 the resumed process differs" in text and "came out as the one never killed" in text


@pytest.mark.usefixtures("forked")
def test_a_checkpoint_that_was_damaged_after_the_kill_is_named_and_the_run_still_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, kill_during_save = tiny(tmp_path / "demo"), Scenario.kill_during_save

    def kill_and_damage(self: Scenario) -> Any:
        kill, logs = kill_during_save(self)
        (newest,) = LocalStorage(options.store).list(f"step-{kill.step - options.every:09d}/rank-")
        path = options.store / newest
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
        return kill, logs

    monkeypatch.setattr(Scenario, "kill_during_save", kill_and_damage)
    passed, text, record = finished(options)
    damaged = record["killed"]["step"] - options.every
    assert passed and record["cause"] == "damage" and record["resumed at"] < damaged
    assert f"The checkpoint of step {damaged} cannot be read" in text and f"It skipped step {damaged}" in text


def test_checkpoints_of_another_state_or_damaged_ones_are_told_apart(tmp_path: Path) -> None:
    states = {step: {"model": {"w": torch.arange(4.0) + step}} for step in (1, 2, 3)}
    with Store(tmp_path, keyframe_every=1) as store:
        for step, state in states.items():
            store.save(step, state)
    live = {step: state_digests(state) for step, state in states.items()}
    assert all(check.is_exact for check in check_store(tmp_path, live))
    live[2] = state_digests({"model": {"w": torch.zeros(4)}})
    (payload,) = LocalStorage(tmp_path).list("step-000000003/rank-")
    (tmp_path / payload).write_bytes((tmp_path / payload).read_bytes()[:-1])
    first, second, third = check_store(tmp_path, live)
    assert first.is_exact and second.names == ("model/w",) and not second.error
    assert payload.split("/")[-1] in third.error and not third.names


def test_a_run_of_another_name_cannot_be_disturbed(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="never killed"):
        tiny(tmp_path / "demo", disturb=("all", 3))


def test_sections_count_what_they_compared() -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "state": {0: {"step": torch.tensor(3.0)}}, "lr": 1e-3, "on": True}
    model, missing = compare_sections({"model": state, "gone": 1}, {"model": dict(state)})
    assert (model.tensors, model.values, model.nbytes, model.differences) == (2, 2, 28, ())
    assert missing.differences == ("gone",)
