"""The Trainer of Hugging Face with small checkpoints: what its users expect stays true."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.huggingface import WEIGHTS, Until, ended, gpt2, lay, made, steps, whole
from helpers.strategies import same
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainerCallback, default_data_collator
from transformers.trainer_jit_checkpoint import CheckpointManager
from transformers.trainer_utils import get_last_checkpoint

import shrinkpoint as sp
from shrinkpoint import Lossless
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.store.directory import is_checkpoint, read_directory_manifest, verify_directory
from shrinkpoint.train.transformers import ShrinkCallback, ShrinkConfig, ShrinkTrainer, latest_valid

# what is on the disk


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return lay(tmp_path / "run", ShrinkTrainer)


def test_a_run_that_saves_is_the_run_that_does_not(tmp_path):
    assert same(ended(made(ShrinkTrainer, tmp_path)), whole())


def test_checkpoints_hold_one_payload_and_the_small_files_of_the_trainer(run):
    assert steps(run) == [2, 4, 6, 8] and get_last_checkpoint(str(run)).endswith("checkpoint-8")
    for step in steps(run):
        folder = run / f"checkpoint-{step}"
        manifest = verify_directory(folder, deep=True)
        assert manifest.step == step and manifest.scheme == "lossless" and manifest.depth == step // 2 - 1
        names = {path.name for path in folder.iterdir()}
        assert not names & {*WEIGHTS}
        assert names >= {"config.json", "generation_config.json", "training_args.bin", "trainer_state.json"}


def test_the_final_save_model_is_that_of_the_stock_trainer(run):
    trainer = made(ShrinkTrainer, run)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    trainer.save_model(str(run / "checkpoint-mine"))
    for folder in (run, run / "checkpoint-mine"):
        assert not is_checkpoint(folder)
        loaded = GPT2LMHeadModel.from_pretrained(folder)
        assert same(loaded.state_dict(), trainer.model.state_dict())


def test_arguments_are_saved_as_the_user_passed_them(tmp_path):
    made(ShrinkTrainer, tmp_path, max_steps=2, save_total_limit=3).train()
    args = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert args.save_total_limit == 3


# going on


def test_a_resume_between_epochs_and_in_accumulation_is_exact(tmp_path):
    settings = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 2, "count": 40}
    plain = ended(made(Trainer, tmp_path / "plain", save_strategy="no", **settings))
    run = tmp_path / "run"
    assert same(ended(made(ShrinkTrainer, run, save_strategy="epoch", **settings)), plain) and len(steps(run)) == 3
    for step in steps(run)[:2]:
        trainer = made(ShrinkTrainer, run, save_strategy="no", **settings)
        assert same(ended(trainer, run / f"checkpoint-{step}"), plain)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"optim": "sgd"}, "optimizer"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "scheduler"),
    ],
)
def test_another_kind_of_optimizer_or_scheduler_is_refused(run, settings, part):
    trainer = made(ShrinkTrainer, run, **settings)
    with pytest.raises(MismatchError, match=f"{part}.*another kind"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_model_of_another_shape_is_refused(run):
    trainer = made(ShrinkTrainer, run, trainer_model=gpt2(64))
    with pytest.raises(MismatchError, match=r"checkpoint-4, model, .*: shape \[128, 32\] .*\[128, 64\]"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_stock_checkpoints_are_resumed_from(tmp_path):
    stock = lay(tmp_path, Trainer)
    expected = ended(made(Trainer, lay(tmp_path / "stock", Trainer)), True)
    assert same(ended(made(ShrinkTrainer, stock), True), expected)
    assert not is_checkpoint(stock / "checkpoint-4") and is_checkpoint(stock / "checkpoint-8")


def test_without_checkpoints_a_resume_is_refused_in_the_trainers_own_words(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        made(ShrinkTrainer, tmp_path).train(resume_from_checkpoint=True)


def test_a_model_that_is_made_for_every_training_is_resumed(run):
    trainer = made(ShrinkTrainer, run, trainer_model=None, trainer_model_init=lambda: gpt2())
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert trainer.state.global_step == 8 and read_directory_manifest(run / "checkpoint-8").depth == 3


@pytest.mark.parametrize("gradients", [False, True])
def test_the_model_of_the_training_before_is_not_held(tmp_path, gradients):
    class Looks(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            gc.collect()
            alive.append(first() is not None)

    shrink = ShrinkConfig(scheme=partial(sp.Fisher, relative_error=0.1), gradients=gradients)
    settings = {"trainer_model_init": lambda: gpt2(), "trainer_model": None, "max_steps": 2, "trainer_shrink": shrink}
    trainer = made(ShrinkTrainer, tmp_path, trainer_callbacks=[Looks()], **settings)
    alive: list[bool] = []
    for _ in range(2):
        first = weakref.ref(trainer.model)
        trainer.train()
    assert alive == [False, False]


def test_a_resume_that_begins_again_with_smaller_batches_has_its_optimizer(run, caplog):
    class Large(ShrinkTrainer):
        def get_batch_samples(self, *args, **kwargs):
            calls.append(None)
            if len(calls) == 1:
                raise RuntimeError("CUDA out of memory.")
            return super().get_batch_samples(*args, **kwargs)

    calls: list[None] = []
    trainer = made(Large, run, auto_find_batch_size=True)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert trainer.optimizer.state_dict()["state"][0]["step"] == 8 and "afresh" not in caplog.text


def test_only_the_model_is_saved_and_resumed_from_where_that_is_asked(tmp_path, caplog):
    first = ended(made(ShrinkTrainer, tmp_path, max_steps=4, save_only_model=True))
    large = lay(tmp_path / "large", ShrinkTrainer)
    small, large = (read_directory_manifest(directory / "checkpoint-4").raw_bytes for directory in (tmp_path, large))
    assert small < 0.4 * large
    trainer = made(ShrinkTrainer, tmp_path, max_steps=4, save_only_model=True)
    with caplog.at_level(logging.WARNING, "shrinkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert "holds no optimizer" in caplog.text
    assert same(trainer.model.state_dict(), first["model"])
    caplog.clear()
    trainer = made(ShrinkTrainer, tmp_path, max_steps=6)  # where no checkpoint has an optimizer, weights are taken
    with caplog.at_level(logging.WARNING, "shrinkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert "holds no optimizer" in caplog.text and trainer.state.global_step == 6


def test_a_model_that_is_no_pretrained_one_and_its_tokenizer_are_served(tmp_path):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = gpt2()

        def forward(self, input_ids, labels):
            return {"loss": self.inner(input_ids, labels=labels).loss}

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "?": 1}, "?")), pad_token="?")
    more = {"trainer_processing_class": tokenizer, "trainer_data_collator": default_data_collator}
    plain = ended(made(Trainer, tmp_path / "plain", trainer_model=Plain(), save_strategy="no", **more))
    made(ShrinkTrainer, tmp_path, trainer_model=Plain(), trainer_callbacks=[Until(4)], **more).train()
    assert (tmp_path / "checkpoint-4" / "tokenizer.json").is_file()
    assert same(ended(made(ShrinkTrainer, tmp_path, trainer_model=Plain(), **more), True), plain)


@pytest.mark.parametrize("kind", [ShrinkTrainer, Trainer])
def test_the_scale_of_the_loss_is_resumed(tmp_path, kind):
    class Scaled(kind):
        """Loss scaling, as with float16, that changes every three steps."""

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def run(folder, resume=None):
        more = {"trainer_callbacks": [ShrinkCallback()], "save_only_model": True} if kind is Trainer else {}
        trainer = made(Scaled, folder, **more)
        return ended(trainer, resume), trainer.accelerator.scaler.state_dict()

    expected, scale = run(tmp_path)
    assert scale["scale"] == 8.0 * 2**2 and scale["_growth_tracker"] == 2
    assert same(run(tmp_path, tmp_path / "checkpoint-4"), (expected, scale))


def test_a_checkpoint_just_in_time_is_one_like_all_others(tmp_path):
    class InTime(TrainerCallback):
        """What `enable_jit_checkpoint` does at the end of a step, once SIGTERM has come."""

        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                control.should_training_stop = True
                CheckpointManager(trainer).execute_jit_checkpoint()

    trainer = made(ShrinkTrainer, tmp_path, save_steps=100, trainer_callbacks=[InTime()])
    trainer.train()
    assert steps(tmp_path) == [3] and not (tmp_path / "checkpoint-3" / "checkpoint-is-incomplete.txt").exists()
    assert same(ended(made(ShrinkTrainer, tmp_path), True), whole())


# retention


class Slow(Lossless):
    """Writes that take longer than training from save to save."""

    def quantize(self, flat, reference):
        time.sleep(0.2)
        return super().quantize(flat, reference)


@pytest.mark.parametrize("kind", [ShrinkTrainer, Trainer])
def test_there_is_a_whole_checkpoint_at_any_time_however_slow_the_disk(tmp_path, kind):
    class Looking(TrainerCallback):
        def on_save(self, args, state, control, **_):
            """Older ones are deleted by now, and a callback that saves has not been asked to."""
            if state.global_step > 2:
                whole = [step for step in steps(tmp_path) if is_checkpoint(tmp_path / f"checkpoint-{step}")]
                seen.append(bool(whole) and latest_valid(tmp_path) is not None)

    seen: list[bool] = []
    if kind is Trainer:
        callback = ShrinkCallback(scheme=Slow(), background=True)
        more = {"save_only_model": True, "save_total_limit": 2, "trainer_callbacks": [Looking(), callback]}
    else:
        shrink = ShrinkConfig(scheme=Slow(), background=True)
        more = {"save_total_limit": 1, "trainer_shrink": shrink, "trainer_callbacks": [Looking()]}
    made(kind, tmp_path, save_steps=1, max_steps=6, **more).train()
    assert seen == [True] * 4


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_model_is_loaded_at_the_end_and_kept(tmp_path, limit):
    class Falling(ShrinkTrainer):
        """A score that says the second checkpoint is the best."""

        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            seen.append({name: x.detach().clone() for name, x in self.model.state_dict().items()})
            return metrics | {"eval_score": float(-abs(self.state.global_step - 4))}

    seen: list[dict] = []
    trainer = made(
        Falling,
        tmp_path,
        save_total_limit=limit,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    assert steps(tmp_path) == ([4] if limit == 1 else [4, 8])
    assert same(dict(trainer.model.state_dict()), seen[1]) and not same(seen[1], seen[3])
    assert read_directory_manifest(tmp_path / "checkpoint-4").metrics["eval_loss"] > 0


def test_a_broken_checkpoint_of_a_later_step_does_not_cost_the_one_that_is_written(run):
    (run / "checkpoint-8" / "shrinkpoint.json").unlink()
    trainer = made(ShrinkTrainer, run, max_steps=7, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)
    assert steps(run) == [7] and latest_valid(run).endswith("checkpoint-7")


# settings


def test_settings_are_an_attribute_of_a_class_or_an_argument(tmp_path):
    class Mine(ShrinkTrainer):
        shrink = ShrinkConfig(keyframe_every=2)

    made(Mine, tmp_path / "one").train()
    assert [read_directory_manifest(tmp_path / "one" / f"checkpoint-{step}").depth for step in (2, 4, 6, 8)] == [
        0,
        1,
        0,
        1,
    ]
    made(Mine, tmp_path / "two", trainer_shrink=ShrinkConfig(keyframe_every=1)).train()
    assert [read_directory_manifest(tmp_path / "two" / f"checkpoint-{step}").depth for step in (2, 4, 6, 8)] == [
        0,
        0,
        0,
        0,
    ]


def test_it_goes_before_other_trainers_as_a_mixin(run):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            calls.append(None)
            return super().compute_loss(*args, **kwargs)

    class Mine(ShrinkTrainer, Doubled):
        pass

    calls: list[None] = []
    assert same(ended(made(Mine, run), run / "checkpoint-6"), whole()) and len(calls) == 2


def test_a_push_of_checkpoints_without_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    with pytest.raises(PolicyError, match="hub_strategy"):
        made(ShrinkTrainer, tmp_path, push_to_hub=True)
    made(ShrinkTrainer, tmp_path, push_to_hub=True, hub_strategy="end")


@pytest.mark.parametrize("background", [False, True])
def test_the_loggers_of_a_trainer_get_the_numbers_of_each_save(tmp_path, background):
    told = []
    settings = ShrinkConfig(background=background, on_save=told.append, log_saves=True)
    trainer = made(ShrinkTrainer, tmp_path, max_steps=6, trainer_shrink=settings)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "checkpoint/bytes" in entry]
    assert [entry["checkpoint/step"] for entry in logged] == [2, 4, 6] == [report.step for report in told]
    assert [entry["checkpoint/bytes"] for entry in logged] == [report.stored_bytes for report in told]
