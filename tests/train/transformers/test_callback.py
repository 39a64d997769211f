"""Only a callback beside the stock Trainer: weights stay its own, the rest is small and comes back bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.huggingface import WEIGHTS, Until, ended, made, steps, whole
from helpers.strategies import same
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

from shrinkpoint.errors import NotFoundError, PolicyError, StateError, StorageError
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.train.transformers import ShrinkCallback, ShrinkTrainer, latest_valid


def called(folder: Path, *callbacks: ShrinkCallback, **settings) -> Trainer:
    return made(Trainer, folder, save_only_model=True, trainer_callbacks=[*callbacks], **settings)


def test_a_callback_saves_what_the_trainer_then_need_not(tmp_path):
    trainer = called(tmp_path, ShrinkCallback())
    assert same(ended(trainer), whole())
    for step in steps(tmp_path):
        folder = tmp_path / f"checkpoint-{step}"
        assert verify_directory(folder, deep=True).depth == step // 2 - 1
        assert {path.name for path in folder.iterdir()} & {*WEIGHTS} == {"model.safetensors"}
    assert same(GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-8").state_dict(), trainer.model.state_dict())


@pytest.mark.parametrize("background", [False, True])
def test_with_a_callback_a_resumed_run_ends_as_the_one_that_was_not_interrupted(tmp_path, background):
    called(tmp_path, ShrinkCallback(background=background)).train()
    for step in (2, 6):
        trainer = called(tmp_path, ShrinkCallback(background=background))
        assert same(ended(trainer, tmp_path / f"checkpoint-{step}"), whole())


@pytest.mark.parametrize("kind", [Trainer, ShrinkTrainer])
def test_a_state_that_cannot_be_stored_is_refused_when_training_starts(tmp_path, kind):
    class Odd(kind):
        def create_optimizer(self, *arguments, **settings):
            optimizer = super().create_optimizer(*arguments, **settings)
            optimizer.param_groups[0]["owner"] = self.model
            return optimizer

    callbacks = [ShrinkCallback()] if kind is Trainer else []
    trainer = made(Odd, tmp_path, trainer_callbacks=callbacks, save_only_model=kind is Trainer)
    with pytest.raises(StateError, match=r"optimizer.*owner"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_callback_refuses_a_checkpoint_without_its_part_and_newest_finds_another(tmp_path):
    called(tmp_path, ShrinkCallback(), save_total_limit=2).train()
    assert steps(tmp_path) == [6, 8]
    (tmp_path / "checkpoint-8" / "shrinkpoint.json").unlink()
    with pytest.raises(NotFoundError, match="optimizer"):
        called(tmp_path, ShrinkCallback(), max_steps=9).train(resume_from_checkpoint=True)
    assert latest_valid(tmp_path) == str(tmp_path / "checkpoint-6")
    assert latest_valid(tmp_path, optimizer=False) == str(tmp_path / "checkpoint-8")
    path = tmp_path / "checkpoint-6" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(NotFoundError, match="none of them valid"):
        latest_valid(tmp_path)


def test_a_scale_of_the_loss_that_was_not_saved_starts_afresh_and_it_is_said_aloud(tmp_path, caplog):
    class Scaled(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    called(tmp_path, ShrinkCallback(), max_steps=4).train()
    trainer = made(Scaled, tmp_path, save_only_model=True, trainer_callbacks=[ShrinkCallback()])
    trainer.train(resume_from_checkpoint=True)
    assert "holds no scaler" in caplog.text and trainer.optimizer.state_dict()["state"][0]["step"] == 8


def test_an_error_of_the_training_before_is_not_one_of_the_next(tmp_path):
    class Ends(TrainerCallback):
        def on_save(self, args, state, control, **_):
            raise RuntimeError("the end")

    blocked = tmp_path / "first" / "checkpoint-2" / "shrinkpoint.json"
    blocked.mkdir(parents=True)
    callback = ShrinkCallback(background=True)
    trainer = called(tmp_path / "first", callback)
    trainer.add_callback(Ends())
    with pytest.raises(RuntimeError, match="the end"):
        trainer.train()
    called(tmp_path / "second", callback, max_steps=2).train()
    assert latest_valid(tmp_path / "second") == str(tmp_path / "second" / "checkpoint-2")


@pytest.mark.parametrize("background", [False, True])
def test_the_optimizer_of_an_earlier_run_stays_until_its_successor_is_complete(tmp_path, background):
    folder = tmp_path / "checkpoint-2"
    (folder / "shrinkpoint.json").mkdir(parents=True)
    stale = [folder / name for name in ("optimizer.pt", "rng_state.pth")]
    for path in stale:
        path.write_bytes(b"of an earlier run")
    callback = ShrinkCallback(background=background)
    with pytest.raises(StorageError):
        called(tmp_path, callback, max_steps=2).train()
    assert all(path.is_file() for path in stale)
    (folder / "shrinkpoint.json").rmdir()
    called(tmp_path, ShrinkCallback(background=background), max_steps=2).train()
    assert not any(path.exists() for path in stale)


class Ends(TrainerCallback):
    """Ends a run after the Trainer's part of a save, as a kill there does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args, state, control, **_):
        if state.global_step == self.step:
            raise RuntimeError("the end")


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_ended_in_its_first_save_starts_anew_and_later_ones_go_on(tmp_path, background):
    def trainer(*before: TrainerCallback) -> Trainer:
        return called(tmp_path, *before, ShrinkCallback(background=background), save_total_limit=2)

    with pytest.raises(RuntimeError, match="the end"):
        trainer(Ends(2)).train()
    assert steps(tmp_path) == [2] and latest_valid(tmp_path) is None
    assert latest_valid(tmp_path, optimizer=False) == str(tmp_path / "checkpoint-2")
    with pytest.raises(RuntimeError, match="the end"):
        trainer(Ends(6)).train(resume_from_checkpoint=latest_valid(tmp_path))
    assert latest_valid(tmp_path) == str(tmp_path / "checkpoint-4")
    assert same(ended(trainer(), latest_valid(tmp_path)), whole())
    assert not [*tmp_path.rglob("optimizer-is-incomplete.txt")]


def test_a_callback_says_what_it_cannot_serve(tmp_path):
    with pytest.raises(PolicyError, match="enable_jit_checkpoint"):
        made(Trainer, tmp_path, enable_jit_checkpoint=True, trainer_callbacks=[ShrinkCallback()]).train()


@pytest.mark.parametrize("background", [False, True])
def test_beside_a_trainer_with_default_arguments_its_files_replace_the_trainers(tmp_path, background):
    def trainer(*more: TrainerCallback) -> Trainer:
        callbacks = [ShrinkCallback(background=background), *more]
        return made(Trainer, tmp_path, save_total_limit=1, trainer_callbacks=callbacks)

    first = trainer(Until(4))
    first.train()
    assert steps(tmp_path) == [4] and not first.args.save_only_model
    folder = tmp_path / "checkpoint-4"
    assert {path.name for path in folder.iterdir()} & {*WEIGHTS} == {"model.safetensors"}
    assert latest_valid(tmp_path) == str(folder)
    assert same(ended(trainer(), folder), whole())
    assert not [*tmp_path.rglob("optimizer-is-incomplete.txt")]


def test_a_run_that_ended_before_the_callback_saved_resumes_from_the_trainers_files(tmp_path):
    with pytest.raises(RuntimeError, match="the end"):
        made(Trainer, tmp_path, trainer_callbacks=[Ends(2), ShrinkCallback()]).train()
    assert latest_valid(tmp_path) == str(tmp_path / "checkpoint-2")
    assert same(ended(made(Trainer, tmp_path, trainer_callbacks=[ShrinkCallback()]), latest_valid(tmp_path)), whole())


def test_a_run_resumes_from_another_one_and_from_a_copy_of_any_name(tmp_path):
    called(tmp_path / "old", ShrinkCallback(), Until(4)).train()
    shutil.copytree(tmp_path / "old" / "checkpoint-4", tmp_path / "best")
    called(tmp_path / "new", ShrinkCallback(), Until(4), learning_rate=1e-4).train()  # which has that step, too
    for run, place in (("new", tmp_path / "old" / "checkpoint-4"), ("third", tmp_path / "best")):
        assert same(ended(called(tmp_path / run, ShrinkCallback()), place), whole())


def test_a_part_that_is_missing_is_missing_where_training_resumes(tmp_path):
    called(tmp_path / "old", ShrinkCallback(), Until(2)).train()
    (tmp_path / "old" / "checkpoint-2" / "shrinkpoint.json").unlink()
    with pytest.raises(NotFoundError, match="old/checkpoint-2: no optimizer"):
        called(tmp_path / "new", ShrinkCallback()).train(resume_from_checkpoint=str(tmp_path / "old" / "checkpoint-2"))
