"""Promise: torchtitan's options mean what they mean there, and a save that fails costs no run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

pytest.importorskip("torchtitan")

import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from shrinkpoint import Fisher
from shrinkpoint.errors import MismatchError, NoSpaceError, NotFoundError, PolicyError, StateError
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.train.dcp import Writer, load
from shrinkpoint.train.torchtitan import TitanCheckpointManager

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate"),
]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Progress:
    """What a Trainer keeps of itself, and a loader."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Run:
    def __init__(self, root, seed=0, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=[self.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=self.optimizers, training_steps=20)
        self.progress, self.schedulers = Progress(), schedulers
        options = {"enable": True, "interval": 1, "last_save_model_only": False, **options}
        config = TitanCheckpointManager.Config(**options)
        self.manager = config.build(
            dataloader=Progress(),
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=str(root),
        )

    def loss(self, model=None):
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
        return (model or self.model)(batch).square().mean(1)

    def train(self, steps, **options):
        for _ in range(steps):
            self.loss().mean().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.progress.step += 1
            self.manager.save(self.progress.step, **options)
        return self

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def steps(root):
    return sorted(int(path.name.removeprefix("step-")) for path in (root / "checkpoint").iterdir())


def failing(error):
    def write(*_, **__):
        raise error

    return write


NO_SPACE = NoSpaceError("disk", found="no space", do="delete something")


def test_options_are_text_and_numbers_of_the_command_line():
    @dataclass
    class Config:
        checkpoint: BaseCheckpointManager.Config = field(default_factory=TitanCheckpointManager.Config)

    arguments = ["--checkpoint.scheme", "fisher(relative_error=.3)", "--checkpoint.keyframe-every", "5"]
    config = tyro.cli(Config, args=arguments, default=Config()).checkpoint
    assert isinstance(config, TitanCheckpointManager.Config)
    assert (config.scheme, config.keyframe_every, config.threads) == ("fisher(relative_error=.3)", 5, None)


@pytest.mark.parametrize("options", [{"scheme": "fish"}, {"keyframe_every": 0}, {"threads": 0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(PolicyError):
        TitanCheckpointManager.Config(**options)


def test_url_is_refused(tmp_path):
    with pytest.raises(PolicyError, match=r"checkpoint\.folder: the URL s3://bucket/run"):
        Run(tmp_path, folder="s3://bucket/run")


def test_nothing_is_saved_unless_asked_for(tmp_path):
    Run(tmp_path, enable=False).train(1)
    Run(tmp_path, load_only=True).train(1, last_step=True)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_resumed_run_is_the_same(tmp_path, mode):
    run = Run(tmp_path, async_mode=mode).train(3)
    run.manager.close()
    again = Run(tmp_path, seed=1, async_mode=mode)
    assert again.manager.load()
    assert again.progress.step == 3 and same(again.weights(), run.weights())
    again.train(2).manager.close(), run.train(2).manager.close()
    assert same(again.weights(), run.weights())
    assert read_directory_manifest(tmp_path / "checkpoint" / "step-4").depth > 0


def test_excluded_state_stays(tmp_path):
    Run(tmp_path).train(2)
    again = Run(tmp_path, exclude_from_loading=["train_state"])
    again.manager.load(1)
    assert again.progress.step == 0


def test_latest_complete_checkpoints_are_kept(tmp_path):
    run = Run(tmp_path, keep_latest_k=2).train(2)
    for name in ("step-1", "step-9"):  # a save that was killed, and one of another program
        (tmp_path / "checkpoint" / name / "bases").mkdir(parents=True, exist_ok=True)
    (tmp_path / "checkpoint" / "step-9" / "bases").rmdir()
    (tmp_path / "checkpoint" / "step-3" / "bases").mkdir(parents=True)
    run.train(3, last_step=True)
    assert steps(tmp_path) == [4, 5, 9]


def test_a_process_that_saves_leaves_the_same_files(tmp_path):
    options = StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False)  # torchtitan's own need a GPU
    files = {}
    for mode in ("disabled", "async_with_pinned_mem"):
        run = Run(tmp_path / mode, keep_latest_k=3, async_mode=mode)
        run.manager.stager = DefaultStager(options) if run.manager.async_mode != "disabled" else None
        for _ in range(7):
            run.train(1).manager.maybe_wait_for_staging()
        run.manager.close()
        assert Run(tmp_path / mode).manager.load()
        stats = [path.stat() for path in tmp_path.glob(f"{mode}/**/*.safetensors")]
        files[mode] = sorted({status.st_ino: status.st_size for status in stats}.values())
    sent, own = files["async_with_pinned_mem"], files["disabled"]
    assert len(sent) == len(own) == 3 and sum(sent) == pytest.approx(sum(own), rel=0.01)


def test_damaged_checkpoint_is_skipped(tmp_path):
    Run(tmp_path).train(3)
    [payload] = (tmp_path / "checkpoint" / "step-3").glob("rank-*")
    payload.write_bytes(payload.read_bytes()[:-9])
    again = Run(tmp_path)
    assert again.manager.load() and again.progress.step == 2


def test_missing_step_is_an_error(tmp_path):
    Run(tmp_path).train(1)
    with pytest.raises(FileNotFoundError):
        Run(tmp_path).manager.load(7)


def test_model_of_the_last_step_starts_another_run(tmp_path):
    run = Run(tmp_path / "a", last_save_model_only=True, export_dtype="bfloat16").train(1, last_step=True)
    first = tmp_path / "a" / "checkpoint" / "step-1"
    saved = load(first)
    assert {value.dtype for value in saved.values()} == {torch.bfloat16} and len(saved) == 4
    again = Run(tmp_path / "b", seed=1, initial_load_path=str(first))
    assert again.manager.load() and again.progress.step == 0
    assert same(again.weights(), [weight.bfloat16().float() for weight in run.weights()])
    with pytest.raises(MismatchError, match=r"step-1: missing key .*dataloader.*set load_step"):
        Run(tmp_path / "a").manager.load()


def test_run_in_place_of_its_checkpoint_is_named(tmp_path):
    Run(tmp_path / "a").train(2)
    with pytest.raises(NotFoundError, match=r"Name one in it, such as .*a/checkpoint/step-2"):
        Run(tmp_path / "b", initial_load_path=str(tmp_path / "a" / "checkpoint")).manager.load()


def test_other_shape_is_a_mismatch(tmp_path):
    Run(tmp_path).train(1)
    run = Run(tmp_path)
    run.model[2] = nn.Linear(96, 9)
    run.manager.states["model"] = ModelWrapper(run.model)
    with pytest.raises(MismatchError, match=r"step-1: size mismatch between saved torch.Size\(\[8"):
        run.manager.load()


def test_checkpoints_of_torchtitan_are_refused_and_never_deleted(tmp_path):
    run = Run(tmp_path, keep_latest_k=2).train(2)
    other = tmp_path / "checkpoint" / "step-0"
    dcp.save(run.model.state_dict(), checkpoint_id=other)
    run.train(3)
    assert steps(tmp_path) == [0, 4, 5]
    assert Run(tmp_path).manager.load()
    other.rename(other.with_name("step-6"))
    with pytest.raises(MismatchError, match="step-6: a checkpoint of torchtitan's own manager"):
        Run(tmp_path).manager.load()
    with pytest.raises(NotFoundError):
        Run(tmp_path / "b", initial_load_path=str(other.with_name("step-6"))).manager.load()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_failed_save_does_not_end_a_run(tmp_path, mode, monkeypatch, caplog):
    run, write_data = Run(tmp_path, async_mode=mode).train(1), Writer.write_data
    with caplog.at_level(logging.WARNING, "shrinkpoint"), monkeypatch.context() as patch:
        run.manager.maybe_wait_for_saving()
        patch.setattr(Writer, "write_data", failing(NO_SPACE))
        run.train(1).manager.maybe_wait_for_saving()
        patch.setattr(Writer, "write_data", write_data)
        patch.setattr(Writer, "finish", failing(NO_SPACE))  # once the payloads are there
        run.train(1).manager.maybe_wait_for_saving()
    assert "the checkpoint is not saved, the run goes on: disk: no space" in caplog.text
    run.train(1).manager.close()
    assert [path.parent.name for path in sorted(tmp_path.rglob("shrinkpoint.json"))] == ["step-1", "step-4"]
    assert steps(tmp_path) == [1, 4] and len([*tmp_path.rglob("rank-*")]) == 2


def test_error_that_would_come_again_ends_a_run(tmp_path, monkeypatch):
    run = Run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write_data", failing(NO_SPACE))
        with pytest.raises(NoSpaceError):
            run.train(1, last_step=True)
        patch.setattr(Writer, "write_data", failing(StateError("state", found="a lock", do="leave it out")))
        with pytest.raises(StateError):
            run.train(1)


def test_measured_scheme_can_be_set(tmp_path):
    run = Run(tmp_path)
    run.manager.scheme = Fisher(budget="1%", evaluate=run.loss)
    run.train(2)
    manifest = read_directory_manifest(tmp_path / "checkpoint" / "step-2")
    assert manifest.scheme == "fisher" and manifest.loss is not None


def test_measured_scheme_saves_exported_weights_exactly(tmp_path, caplog):
    run = Run(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    run.manager.scheme = Fisher(budget="1%", evaluate=run.loss)
    run.train(1, last_step=True)
    saved = load(tmp_path / "checkpoint" / "step-1")
    assert same(saved.values(), [weight.bfloat16() for weight in run.weights()])
    assert "weights in export_dtype are saved exactly" in caplog.text


def test_measured_scheme_needs_a_model_that_waits(tmp_path):
    run = Run(tmp_path, async_mode="async")
    run.manager.scheme = Fisher(budget="1%", evaluate=run.loss)
    with pytest.raises(PolicyError, match=r"checkpoint\.async_mode"):
        run.train(1)
