"""Trainers that save and load by methods of their own keep all their files behind ShrinkTrainer, and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.huggingface import Until, ended, made, steps, whole
from helpers.strategies import same
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.errors import PolicyError
from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer, latest_valid

MODULE = "1_Body/model.safetensors"


class OwnLayout(Trainer):
    """As SentenceTransformerTrainer: a layout of its own, and a loader that takes one argument and needs all of it."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        root = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(root / "1_Body")
        (root / "modules.json").write_text(json.dumps([{"path": "1_Body"}]))
        torch.save(self.args, root / "training_args.bin")

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        (module,) = json.loads(Path(checkpoint_path, "modules.json").read_text())
        loaded = type(self.model).from_pretrained(Path(checkpoint_path, module["path"]))
        self.model.load_state_dict(loaded.state_dict())


class MoreFiles(Trainer):
    """Writes beside what the Trainer writes."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        Path(output_dir or self.args.output_dir, "processor.json").write_text("{}")


class LoadsMore(Trainer):
    """Saves beside the checkpoint what it loads with the weights."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        torch.save(3, Path(output_dir or self.args.output_dir, "head.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.head = torch.load(Path(resume_from_checkpoint, "head.bin"))


class SavesDirectly(Trainer):
    """Overrides `save_model` without the Trainer's."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.model.save_pretrained(output_dir or self.args.output_dir)


class SecondOptimizer(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(5, Path(output_dir, "critic.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.critic = None if checkpoint is None else torch.load(Path(checkpoint, "critic.pt"))


class OwnGenerators(Trainer):
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        Path(output_dir, "environment.json").write_text("{}")


class AfterSave(Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "card.md").write_text("text")


KINDS = [OwnLayout, MoreFiles, LoadsMore, SavesDirectly, SecondOptimizer, OwnGenerators, AfterSave]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request) -> type[Trainer]:
    return request.param


def mixed(kind: type[Trainer]) -> type[ShrinkTrainer]:
    return type("Mixed", (ShrinkTrainer, kind), {})


def files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("background", [False, True])
def test_its_files_are_there_and_it_resumes_as_one_that_was_not_interrupted(tmp_path, kind, background):
    config = {"trainer_shrink": ShrinkConfig(background=background)}
    made(mixed(kind), tmp_path, trainer_callbacks=[Until(4)], **config).train()
    made(kind, tmp_path / "stock", max_steps=2).train()
    replaced = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert files(tmp_path / "checkpoint-2") >= files(tmp_path / "stock" / "checkpoint-2") - replaced
    assert latest_valid(tmp_path) == str(tmp_path / "checkpoint-4")
    trainer = made(mixed(kind), tmp_path, **config)
    assert same(ended(trainer, resume=True), whole())
    assert getattr(trainer, "head", 3) == 3 and getattr(trainer, "critic", 5) == 5
    assert steps(tmp_path) == [2, 4, 6, 8]


def test_converted_back_it_is_what_the_trainer_writes_and_resumes(tmp_path, kind):
    made(mixed(kind), tmp_path / "ours", trainer_callbacks=[Until(4)]).train()
    made(kind, tmp_path / "stock", trainer_callbacks=[Until(4)]).train()
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "ours" / "checkpoint-4"), str(tmp_path / "back-4")])
    assert result.exit_code == 0, result.output
    assert files(tmp_path / "back-4") == files(tmp_path / "stock" / "checkpoint-4")
    assert same(ended(made(kind, tmp_path / "next"), tmp_path / "back-4"), whole())


def test_the_best_model_is_loaded_at_the_end(tmp_path, kind):
    ends = []
    for name, trainer_class in (("stock", kind), ("ours", mixed(kind))):
        settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
        trainer = made(trainer_class, tmp_path / name, metric_for_best_model="loss", **settings)
        trainer.train()
        ends.append(trainer.model.state_dict())
    assert same(*ends)


def test_a_trainer_that_saves_only_adapters_of_its_own_goes_on(tmp_path):
    class OnlyAdapter(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            directory = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            directory.mkdir(parents=True)
            torch.save(1, directory / "projector.bin")

    made(mixed(OnlyAdapter), tmp_path, max_steps=4).train()
    assert files(tmp_path / "checkpoint-4") == {"projector.bin"}


def test_a_scheme_leaves_the_model_of_such_a_trainer_exact(tmp_path):
    made(mixed(OwnLayout), tmp_path, max_steps=4, trainer_shrink=ShrinkConfig(sp.Fisher(relative_error=0.3))).train()
    made(OwnLayout, tmp_path / "stock", max_steps=2).train()
    ours, stock = (path / "checkpoint-2" / MODULE for path in (tmp_path, tmp_path / "stock"))
    assert ours.read_bytes() == stock.read_bytes()


def test_weights_in_its_own_files_are_verified(tmp_path):
    made(mixed(OwnLayout), tmp_path, max_steps=4).train()
    weights = tmp_path / "checkpoint-4" / MODULE
    weights.write_bytes(weights.read_bytes()[:-4])
    assert latest_valid(tmp_path) == str(tmp_path / "checkpoint-2")


def test_a_push_of_every_checkpoint_is_refused_only_where_it_lacks_weights(tmp_path):
    settings = {"push_to_hub": True, "hub_strategy": "every_save", "hub_model_id": "a/b", "hub_token": "x"}

    class Offline(OwnLayout):
        def init_hf_repo(self, token: str | None = None) -> None: ...

    made(mixed(Offline), tmp_path, **settings)
    with pytest.raises(PolicyError, match="hub_strategy"):
        made(type("Plain", (ShrinkTrainer,), {"init_hf_repo": Offline.init_hf_repo}), tmp_path, **settings)


def test_methods_in_front_of_it_and_a_trainer_without_any_change_nothing(tmp_path, caplog):
    class InFront(ShrinkTrainer):
        _save = MoreFiles._save

    class Sequences(ShrinkTrainer, Seq2SeqTrainer): ...

    InFront._save = lambda self, output_dir=None, state_dict=None: (
        ShrinkTrainer._save(self, output_dir, state_dict),
        Path(output_dir, "processor.json").write_text("{}"),
    )
    made(InFront, tmp_path / "a", max_steps=2).train()
    found = files(tmp_path / "a" / "checkpoint-2")
    assert "processor.json" in found and "model.safetensors" not in found
    args = Seq2SeqTrainingArguments(str(tmp_path / "b"), max_steps=2, save_steps=2, report_to="none", use_cpu=True)
    trainer = made(Trainer, tmp_path)
    Sequences(model=trainer.model, args=args, train_dataset=trainer.train_dataset).train()
    assert "model.safetensors" not in files(tmp_path / "b" / "checkpoint-2")
    assert "methods of its own" not in caplog.text
