"""A loop asks whether to save; several ranks get one answer, in the same step."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from helpers import accelerate_runs
from helpers.huggingface import made
from helpers.lightning_runs import QUIET, Small, points, trainer
from helpers.processes import ranks
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from transformers import TrainerCallback

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError
from shrinkpoint.store import Keep
from shrinkpoint.train import (
    AnySavePolicy,
    BestMetricPolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    PreemptionCheckpointingPolicy,
    SaveSchedule,
    SpecificStepsPolicy,
)
from shrinkpoint.train.accelerate import AcceleratorCheckpointer
from shrinkpoint.train.dcp import Manager, reset_chains
from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback
from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

STATE = {"w": torch.ones(3)}
pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that `time.monotonic` returns, as its only item."""
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def decided(schedule: SaveSchedule, steps: range, **options: Any) -> list[int]:
    return [step for step in steps if schedule.should_save(step, **options)]


def test_steps_are_saved_at_an_interval_or_where_they_are_named():
    assert decided(SaveSchedule(FixedIntervalPolicy(4)), range(1, 13)) == [4, 8, 12]
    assert decided(SaveSchedule(SpecificStepsPolicy([3, 5])), range(9)) == [3, 5]
    both = AnySavePolicy([FixedIntervalPolicy(4), SpecificStepsPolicy([3])])
    assert decided(SaveSchedule(both), range(1, 9)) == [3, 4, 8]


def test_seconds_are_counted_from_the_last_save_and_none_is_begun_beside_another(clock):
    schedule = SaveSchedule(ContinuousCheckpointingPolicy(minimum_interval_secs=60))
    answers = []
    for step in range(12):
        clock[0] += 25
        answers.append(schedule.should_save(step, is_saving_in_progress=step in (2, 3)))
    assert [step for step, answer in enumerate(answers) if answer] == [4, 7, 10]
    schedule.note_saved(12)  # the loop saved by itself
    clock[0] += 59
    assert not schedule.should_save(13)
    clock[0] += 1
    assert schedule.should_save(14)


def test_a_better_metric_is_saved_and_nan_is_none():
    schedule = SaveSchedule(BestMetricPolicy("loss"))
    losses = [3.0, 2.0, 2.5, float("nan"), 2.0, 1.0]
    answers = [schedule.should_save(step, metrics={"loss": loss, "other": 0}) for step, loss in enumerate(losses)]
    assert answers == [True, True, False, False, False, True]
    assert not schedule.should_save(9)  # no metric
    highest = SaveSchedule(BestMetricPolicy("score", mode="max"))
    assert [highest.should_save(step, metrics={"score": torch.tensor(score)}) for step, score in ((1, 1.0), (2, 0.5))]
    assert not highest.should_save(3, metrics={"score": 1.0}) and highest.should_save(4, metrics={"score": 1.5})


def test_no_step_is_saved_twice():
    schedule = SaveSchedule(FixedIntervalPolicy(1))
    assert schedule.should_save(5) and not schedule.should_save(5)
    schedule.note_saved(6)
    assert not schedule.should_save(6) and schedule.should_save(7)


def test_a_policy_of_ones_own_is_asked_with_what_there_is(clock):
    @dataclass
    class Own:
        context: Any = None

        def should_save(self, step: int, previous_steps: Any, *, context: DecisionContext) -> bool:
            self.context = (list(previous_steps), context)
            return True

    schedule = SaveSchedule(own := Own())
    schedule.should_save(3, metrics={"a": 1})
    clock[0] += 7
    schedule.should_save(4, is_saving_in_progress=True)
    expected = DecisionContext(seconds=7.0, is_saving_in_progress=True, previous_metrics=({"a": 1.0},))
    assert own.context == ([3], expected)


def test_what_is_no_policy_or_no_step_is_an_error():
    for make in (
        lambda: SaveSchedule(100),
        lambda: SaveSchedule(FixedIntervalPolicy),
        lambda: FixedIntervalPolicy(0),
        lambda: FixedIntervalPolicy(1.5),
        lambda: SpecificStepsPolicy([-1]),
        lambda: SpecificStepsPolicy(100),
        lambda: ContinuousCheckpointingPolicy(-1),
        lambda: ContinuousCheckpointingPolicy(float("nan")),
        lambda: BestMetricPolicy("loss", mode="least"),
        lambda: AnySavePolicy([FixedIntervalPolicy(3), 3]),
        lambda: SaveSchedule(FixedIntervalPolicy(3)).should_save(-1),
        lambda: SaveSchedule(FixedIntervalPolicy(3)).should_save(1, metrics={"a": "b"}),
    ):
        with pytest.raises(PolicyError) as caught:
            make()
        assert caught.value.where


# ---- the manager -----------------------------------------------------------------------------------------------------


def test_a_manager_knows_what_its_store_has(tmp_path):
    policy = AnySavePolicy([FixedIntervalPolicy(10), BestMetricPolicy("loss")])
    with sp.CheckpointManager(tmp_path, save_decision_policy=policy) as manager:
        for step, loss in ((9, 3.0), (10, 4.0), (11, 2.0), (12, 2.5)):
            if manager.should_save(step, metrics={"loss": loss}):
                manager.save(step, extra=STATE, metrics={"loss": loss})
        assert manager.store.steps() == [9, 10, 11]
    with sp.CheckpointManager(tmp_path, save_decision_policy=policy) as again:
        assert not again.should_save(10)  # it is there
        assert not again.should_save(12, metrics={"loss": 2.0}) and again.should_save(13, metrics={"loss": 1.9})
        again.save(20, extra=STATE)
        assert not again.should_save(20) and not again.reached_preemption


def test_a_save_in_the_background_is_in_progress_until_it_is_written(tmp_path):
    with sp.CheckpointManager(
        tmp_path, background=True, save_decision_policy=ContinuousCheckpointingPolicy()
    ) as manager:
        assert manager.should_save(1)
        manager.save(1, extra=STATE)
        manager.wait()
        assert manager.should_save(2)


def test_a_manager_without_a_policy_says_so(tmp_path):
    with (
        sp.CheckpointManager(tmp_path) as manager,
        pytest.raises(PolicyError, match="save_decision_policy=") as caught,
    ):
        manager.should_save(3)
    assert caught.value.where == "should_save"


def test_a_preempted_loop_saves_once_and_ends(tmp_path):
    policy = AnySavePolicy([FixedIntervalPolicy(10), PreemptionCheckpointingPolicy()])
    before = signal.getsignal(signal.SIGTERM)
    with sp.CheckpointManager(tmp_path, background=True, save_decision_policy=policy) as manager:
        for step in range(1, 100):
            if step == 14:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                manager.save(step, extra=STATE)
            if manager.reached_preemption:
                break
        assert step == 14 and not manager.should_save(15) and manager.should_save(20)
    assert sp.Store(tmp_path).steps() == [10, 14]
    assert signal.getsignal(signal.SIGTERM) is before


RANKS = """
    import json
    import os
    import signal
    import torch.distributed as dist
    import shrinkpoint as sp
    from shrinkpoint.errors import ShrinkpointError
    from shrinkpoint.train import AnySavePolicy, BestMetricPolicy, PreemptionCheckpointingPolicy, SaveSchedule

    class Failing:
        def should_save(self, step, previous_steps, *, context):
            if dist.get_rank() == 1 and step == 3:
                raise KeyError("boom")
            return False

    def of_rank(rank, width, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=width)
        policy = AnySavePolicy([PreemptionCheckpointingPolicy(), BestMetricPolicy("loss")])
        answers, preempted, errors = [], [], []
        with SaveSchedule(policy, group=dist.group.WORLD) as schedule:
            for step in range(8):
                if (rank, step) in ((1, 3), (0, 4)):  # the scheduler is not everywhere at the same time
                    os.kill(os.getpid(), signal.SIGTERM)
                loss = 1.0 if (rank, step) == (0, 5) else 2.0
                answers.append(schedule.should_save(step, metrics={"loss": loss}))
                preempted.append(schedule.reached_preemption)
            try:
                schedule.should_save(100 + rank)
            except ShrinkpointError as error:
                errors.append([type(error).__name__, str(error)])
        schedule = SaveSchedule(Failing(), group=dist.group.WORLD)
        for step in (2, 3):
            try:
                schedule.should_save(step)
            except ShrinkpointError as error:
                errors.append([type(error).__name__, str(error)])
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump({"answers": answers, "preempted": preempted, "errors": errors}, file)
"""


def test_all_ranks_agree_in_the_same_step(tmp_path):
    results = ranks(RANKS, 2, tmp_path)
    for result in results:
        assert [step for step, answer in enumerate(result["answers"]) if answer] == [0, 3, 5]
        assert [step for step, answer in enumerate(result["preempted"]) if answer] == [3, 4, 5, 6, 7]
        (_, first), (_, second) = result["errors"]
        assert "ranks at steps 100, 101" in first and "boom" in second


# ---- frameworks ----


def directories(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


TWICE = AnySavePolicy([FixedIntervalPolicy(3), PreemptionCheckpointingPolicy()])
"""At the multiples of 3, and once when the process is told to end."""


def test_a_trainer_saves_by_a_policy_and_ends_after_sigterm(tmp_path: Path) -> None:
    class Terminated(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    shrink = ShrinkConfig(save_decision_policy=TWICE)
    run = made(ShrinkTrainer, tmp_path, trainer_shrink=shrink, trainer_callbacks=[Terminated()], save_strategy="no")
    run.train()
    assert directories(tmp_path) == ["checkpoint-3", "checkpoint-5"] and run.state.global_step == 5
    assert signal.getsignal(signal.SIGTERM) == before
    again = made(ShrinkTrainer, tmp_path, trainer_shrink=shrink, save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert directories(tmp_path) == ["checkpoint-3", "checkpoint-5", "checkpoint-6"] and again.state.global_step == 8
    with pytest.raises(PolicyError, match="should_save"):
        ShrinkConfig(save_decision_policy=3)  # type: ignore[arg-type]


def test_lightning_saves_by_a_policy_and_ends_after_sigterm(tmp_path: Path) -> None:
    class Terminated(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                os.kill(os.getpid(), signal.SIGTERM)

    plugin = ShrinkIO(keep=Keep(last=2))
    callback = ShrinkIOCallback(save_decision_policy=TWICE)
    run = trainer(tmp_path, plugin, epochs=9, callbacks=[callback, Terminated()], enable_checkpointing=False)
    with pytest.raises(SIGTERMException):  # with which Lightning ends
        run.fit(Small(), points())
    assert directories(tmp_path / "checkpoints") == ["step=6.ckpt", "step=8.ckpt"] and run.global_step == 8


def test_loops_ask_accelerate_and_dcp_when_to_save(tmp_path: Path) -> None:
    accelerate_runs.forget()
    accelerator, model = Accelerator(cpu=True), nn.Linear(8, 8)
    model = accelerator.prepare(model)
    reset_chains()
    with AcceleratorCheckpointer(accelerator, save_decision_policy=TWICE) as checkpointer:
        manager = Manager(tmp_path / "dcp", keep=None, save_decision_policy=FixedIntervalPolicy(2))
        for step in range(1, 9):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.should_save(step):
                checkpointer.save_state(tmp_path / "accelerate" / f"step-{step}", step=step)
            if manager.should_save(step):
                manager.save(step, model=model)
            assert not checkpointer.should_save(step) and not manager.should_save(step)
            if checkpointer.reached_preemption:
                break
    assert directories(tmp_path / "accelerate") == ["step-3", "step-6", "step-7"] and manager.steps() == [2, 4, 6]
    again = Manager(tmp_path / "dcp", keep=None, save_decision_policy=FixedIntervalPolicy(2))
    assert not again.should_save(6) and again.should_save(8)
    again = Manager(tmp_path / "dcp", keep=None, save_decision_policy=FixedIntervalPolicy(2))
    again.restore(4, model=model)
    assert not again.should_save(4) and again.should_save(6)
    with pytest.raises(PolicyError, match="save_decision_policy"):
        Manager(tmp_path).should_save(1)
    accelerate_runs.forget()
