"""The Trainer with checkpoints that lose something: what they are measured with, and that nobody notices it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.huggingface import Text, ended, gpt2, made, steps
from helpers.strategies import same
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.train import GradientRecorder
from shrinkpoint.train.transformers import ShrinkCallback, ShrinkConfig, ShrinkTrainer
from shrinkpoint.train.transformers.config import Evaluation

WIDE = partial(gpt2, width=64)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}


class Heard(TrainerCallback):
    """Every event that a callback hears of."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.events.append(name)
        return super().__getattribute__(name)


def trained(kind: type[Trainer], folder: Path, **settings: Any) -> tuple[Trainer, dict[str, Any]]:
    trainer = made(kind, folder, trainer_model=WIDE(), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        return trainer, ended(trainer)


def test_training_does_not_notice_that_it_is_measured(tmp_path):
    plain, measured = Heard(), Heard()
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    _, one = trained(Trainer, tmp_path / "plain", trainer_callbacks=[plain], **settings)
    scheme = partial(sp.Inshrinkerator, threshold=0.02)
    shrink = ShrinkConfig(scheme=scheme, evaluate="eval_loss", gradients=True, background=True)
    _, other = trained(ShrinkTrainer, tmp_path / "run", trainer_callbacks=[measured], trainer_shrink=shrink, **settings)
    assert same(one, other) and "on_prediction_step" in plain.events and plain.events == measured.events
    assert read_directory_manifest(tmp_path / "run" / "checkpoint-4").loss["searches"]


def test_what_is_measured_is_what_the_trainer_evaluates(tmp_path):
    trainer = made(ShrinkTrainer, tmp_path, trainer_compute_metrics=accuracy)
    whole = trainer.evaluate()
    assert Evaluation(trainer, "eval_loss", None)() == pytest.approx(whole["eval_loss"], rel=1e-6)
    assert Evaluation(trainer, "accuracy", None)() == whole["eval_accuracy"]
    first = trainer.evaluate(Text(8, 64))
    assert Evaluation(trainer, "loss", 1)() == pytest.approx(first["eval_loss"], rel=1e-6) != whole["eval_loss"]


def test_the_batches_of_an_evaluation_say_how_far_its_loss_can_be_trusted(tmp_path):
    trainer = made(ShrinkTrainer, tmp_path, trainer_compute_metrics=accuracy)
    reading = Evaluation(trainer, "eval_loss", None).reading()
    assert reading.examples is not None and len(reading.examples) > 1
    assert reading.value == pytest.approx(float(reading.examples.mean()), rel=1e-5)
    assert Evaluation(trainer, "accuracy", None).reading().examples is None
    assert Evaluation(trainer, "eval_loss", 1).reading().examples is None
    assert "prediction_step" not in vars(trainer)
    shrink = ShrinkConfig(scheme=partial(sp.Fisher, budget="90%"), evaluate="eval_loss", batches=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        trained(ShrinkTrainer, tmp_path / "run", trainer_shrink=shrink)
    low, high = read_directory_manifest(sorted((tmp_path / "run").glob("checkpoint-*"))[-1]).loss["interval"]
    assert low <= high


def test_what_a_trainer_collects_in_evaluation_is_not_what_a_scheme_measured(tmp_path):
    class Collects(Trainer):
        """Sums its evaluation up in lists, as trainers of other libraries do."""

        def __init__(self, *args, **kwargs):
            self._losses: dict[str, list[float]] = defaultdict(list)
            super().__init__(*args, **kwargs)

        def compute_loss(self, model, *args, **kwargs):
            outputs = super().compute_loss(model, *args, **kwargs)
            self._losses["train" if model.training else "eval"].append(
                (outputs[0] if type(outputs) is tuple else outputs).item()
            )
            return outputs

        def log(self, logs, *args, **kwargs):
            seen.append({name: self._losses.pop(name) for name in [*self._losses]})
            super().log(logs, *args, **kwargs)

    class Ours(ShrinkTrainer, Collects):
        pass

    settings = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 7}
    seen: list[dict[str, list[float]]] = []
    trained(Collects, tmp_path / "plain", save_strategy="no", **settings)
    plain, seen = seen, []
    trained(Ours, tmp_path, trainer_shrink=ShrinkConfig("fisher", "eval_loss", batches=2), **settings)
    assert seen == plain and len(plain) == 4


def test_of_several_datasets_or_an_endless_one_the_first_batches_are_taken(tmp_path):
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield from Text(24, 64)

    trainer_of_stream = made(ShrinkTrainer, tmp_path, trainer_eval_dataset=Endless())
    two = made(ShrinkTrainer, tmp_path, trainer_eval_dataset={"a": Text(8), "a_b": Text(24, 64)})
    expected_loss = made(ShrinkTrainer, tmp_path, trainer_eval_dataset=Text(16, 64)).evaluate()["eval_loss"]
    assert Evaluation(trainer_of_stream, "eval_loss", 2)() == pytest.approx(expected_loss, rel=1e-6)
    assert Evaluation(two, "eval_a_b_loss", 2)() == pytest.approx(expected_loss, rel=1e-6)
    with pytest.raises(PolicyError, match="eval_a_loss"):
        Evaluation(two, "eval_loss", 2)


def test_whether_more_is_better_is_what_the_arguments_say(tmp_path):
    trainer = made(ShrinkTrainer, tmp_path, metric_for_best_model="perplexity", greater_is_better=False)
    assert (
        not Evaluation(trainer, "perplexity", 1).higher_is_better
        and not Evaluation(trainer, "eval_loss", 1).higher_is_better
    )
    assert Evaluation(trainer, "eval_accuracy", 1).higher_is_better


def test_gradients_are_those_of_whole_steps(tmp_path):
    class Seen(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})

    gradients: list[dict[str, torch.Tensor]] = []
    shrink = ShrinkConfig(scheme=partial(sp.Fisher, relative_error=0.1), gradients=True)
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    trainer, _ = trained(ShrinkTrainer, tmp_path, trainer_callbacks=[Seen()], trainer_shrink=shrink, **settings)
    recorder = trainer._saver.get_recorder()
    assert isinstance(recorder, GradientRecorder) and recorder.step == len(gradients) == 4
    for name, mean in recorder.mean.items():
        expected, square = gradients[0][name], gradients[0][name].square()
        for gradient in gradients[1:]:
            fresh = gradient[name]
            expected, square = expected * 0.9 + fresh * (1 - 0.9), square * 0.9 + fresh.square() * (1 - 0.9)
        assert torch.allclose(mean, expected) and torch.allclose(recorder.square[name], square)
    assert recorder.mean.keys() == {name for name, _ in trainer.model.named_parameters()}


def test_a_recorder_goes_on_from_the_step_that_is_resumed(tmp_path):
    shrink = ShrinkConfig(scheme=partial(sp.Fisher, relative_error=0.1), gradients=True)
    trained(ShrinkTrainer, tmp_path, max_steps=2, trainer_shrink=shrink)
    trainer = made(ShrinkTrainer, tmp_path, max_steps=4, trainer_model=WIDE(), trainer_shrink=shrink)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        trainer.train(resume_from_checkpoint=True)
    assert trainer._saver.get_recorder().step == 4 and steps(tmp_path) == [2, 4]


def test_the_moments_of_a_callback_may_be_lossy(tmp_path):
    settings = {"max_steps": 4, "save_only_model": True, "trainer_model": WIDE()}
    callback = ShrinkCallback(scheme=sp.Fisher(relative_error=0.1))
    made(Trainer, tmp_path, trainer_callbacks=[callback], **settings).train()
    manifest = read_directory_manifest(tmp_path / "checkpoint-4")
    assert manifest.is_lossy and manifest.raw_bytes > 5 * manifest.stored_bytes
    resumed_trainer = made(Trainer, tmp_path, trainer_callbacks=[ShrinkCallback()], **settings | {"max_steps": 6})
    resumed_trainer.train(resume_from_checkpoint=True)
    assert (
        np.isfinite(resumed_trainer.evaluate()["eval_loss"])
        and not read_directory_manifest(tmp_path / "checkpoint-6").is_lossy
    )
    assert read_directory_manifest(tmp_path / "checkpoint-6").lossy_restores == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": sp.Fisher(ratio=10), "evaluate": "eval_loss"}, "made already"),
        ({"scheme": "lossless", "evaluate": "eval_loss"}, "evaluate"),
        ({"scheme": "excp", "gradients": True}, "gradients"),
        ({"scheme": "inshrinkerator"}, "evaluate"),
        ({"scheme": "smaller"}, "inshrinkerator"),
        ({"batches": 0}, "a whole number from 1"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_before_training(tmp_path, settings, message):
    with pytest.raises(PolicyError, match=message):
        made(ShrinkTrainer, tmp_path, trainer_shrink=ShrinkConfig(**settings))


def test_a_scheme_that_another_process_leads_is_refused_where_the_trainer_saves(tmp_path):
    class Follows(sp.Fisher):
        is_writer = False

    with pytest.raises(PolicyError, match="leads"):
        made(ShrinkTrainer, tmp_path, trainer_shrink=ShrinkConfig(Follows(relative_error=0.1)))
    group = sp.Inshrinkerator(threshold=0.05, evaluate=lambda state: 0.0, group=object())
    with pytest.raises(PolicyError, match="group"):
        ShrinkCallback(scheme=group)


def test_measuring_needs_a_dataset_and_a_metric_that_it_has(tmp_path):
    with pytest.raises(PolicyError, match="eval_dataset"):
        made(ShrinkTrainer, tmp_path, trainer_eval_dataset=None, trainer_shrink=ShrinkConfig("fisher", "eval_loss"))
    trained(ShrinkTrainer, tmp_path, trainer_shrink=ShrinkConfig("fisher", "eval_bleu"))  # goes on, with a warning
    assert "eval_loss" in read_directory_manifest(tmp_path / "checkpoint-6").loss["exact"]
