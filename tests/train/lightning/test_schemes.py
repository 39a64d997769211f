"""Schemes that measure and record, in Lightning's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.lightning_runs import QUIET, Small, every, names, points, small, trainer
from helpers.strategies import same
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import nn
from torchmetrics import MeanMetric

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.train import GradientRecorder
from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback, Validation

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning"),
]
WIDTH = 256


def fit(root: Path, *plugins: Any, callbacks: Any = (), epochs: int = 3, **options: Any) -> pl.Trainer:
    run = trainer(root, *plugins, epochs=epochs, callbacks=[*callbacks, every(root / "all")], **options)
    torch.manual_seed(1)
    run.fit(small(width=WIDTH), points(), points(6, seed=1))
    return run


class Collecting(Small):
    """Keeps what its validation steps find in each way that Lightning's pages show."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.outputs, self.mean, self.count = [], MeanMetric(), 0
        self.seen: list[tuple[Any, ...]] = []

    def validation_step(self, batch, index):
        loss = super().validation_step(batch, index)
        self.outputs.append(loss)
        self.mean.update(loss)
        self.count += 1
        return loss

    def on_validation_epoch_end(self) -> None:
        self.seen.append((torch.stack(self.outputs).mean().item(), self.mean.compute().item(), self.count))
        self.outputs.clear()  # and the metric goes on for ever


def test_what_a_module_collects_in_validation_is_not_what_a_scheme_measured(tmp_path):
    run = trainer(tmp_path / "plain")
    torch.manual_seed(1)
    plain = Collecting(width=WIDTH)
    run.fit(plain, points(), points(6, seed=1))
    torch.manual_seed(1)
    watched = Collecting(width=WIDTH)
    scheme = sp.Fisher(nats=0.05, evaluate=Validation(batches=2))
    run = trainer(tmp_path, ShrinkIO(scheme), callbacks=[ShrinkIOCallback(), every(tmp_path / "all")])
    run.fit(watched, points(), points(6, seed=1))
    assert watched.seen == plain.seen and len(plain.seen) == 4
    losses = [read_directory_manifest(tmp_path / "all" / name).loss for name in names(tmp_path / "all")]
    assert losses and all(
        loss["interval"][0] <= loss["rise"] <= loss["interval"][1] for loss in losses if "interval" in loss
    )
    assert any("interval" in loss for loss in losses)


def test_a_module_of_another_run_is_not_taken_for_the_one_that_is_saved(tmp_path):
    plugin = ShrinkIO(sp.Fisher(relative_error=0.1))
    fit(tmp_path / "first", plugin, callbacks=[ShrinkIOCallback()], epochs=1)
    fit(tmp_path / "second", plugin, epochs=1)  # without the callback
    report = plugin.wait()
    assert report is not None and report.path.startswith(str(tmp_path / "second")) and report.weights_ratio > 3
    plugin = ShrinkIO(sp.Fisher(nats=0.05, evaluate=Validation(batches=2)))
    fit(tmp_path / "third", plugin, callbacks=[ShrinkIOCallback()], epochs=1)
    with pytest.raises(PolicyError, match=r"another module.*ShrinkIOCallback"):
        fit(tmp_path / "fourth", plugin, epochs=1)


def test_averaged_weights_are_quantized_and_not_taken_for_the_module(tmp_path):
    plugin = ShrinkIO(sp.Fisher(relative_error=0.2))
    fit(tmp_path / "mean", plugin, callbacks=[ShrinkIOCallback(), EMAWeightAveraging(decay=0.9)], epochs=1)
    report = plugin.wait()
    assert report is not None and report.weights_ratio > 3
    plugin = ShrinkIO(sp.Fisher(nats=0.05, evaluate=Validation(batches=2)))
    with pytest.raises(PolicyError, match="averaged"):
        fit(tmp_path / "asked", plugin, callbacks=[ShrinkIOCallback(), EMAWeightAveraging(decay=0.9)], epochs=1)


def test_what_a_tuner_saves_and_restores_loses_nothing(tmp_path):
    module = small(width=WIDTH)
    module.lr = 0.01
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    plugin = ShrinkIO(sp.Fisher(relative_error=0.3), background=True)
    Tuner(trainer(tmp_path, plugin)).lr_find(module, points(40), num_training=8, update_attr=False)
    assert same(dict(module.state_dict()), weights) and not [*tmp_path.iterdir()]


def test_a_group_of_replicas_is_refused_and_not_waited_for(tmp_path):
    scheme = sp.Inshrinkerator(threshold=0.05, evaluate=Validation(batches=2), group=object())
    with pytest.raises(PolicyError, match="group"):
        ShrinkIO(scheme)


def test_a_scheme_that_evaluates_wants_the_callback(tmp_path):
    with pytest.raises(PolicyError, match=r"Add ShrinkIOCallback\(\) to the Trainer's callbacks"):
        fit(tmp_path, ShrinkIO(sp.Fisher(evaluate=Validation())))
    with pytest.raises(PolicyError, match=r"Pass Trainer\(plugins=\[ShrinkIO"):
        fit(tmp_path, callbacks=[ShrinkIOCallback()])


def test_validation_says_what_it_lacks(tmp_path):
    ours = ShrinkIO(sp.Fisher(evaluate=Validation()))
    run = trainer(tmp_path, ours, callbacks=[ShrinkIOCallback(), every(tmp_path / "all")])
    with pytest.warns(UserWarning, match="`val_dataloader` must be implemented"):
        run.fit(small(), points())
    with pytest.raises(PolicyError, match="expected a whole number from 1"):
        Validation(0)


@pytest.mark.parametrize("batches", [1, 3])
def test_validation_is_the_validation_loop_on_its_first_batches(tmp_path, batches):
    run = trainer(tmp_path, epochs=1, limit_val_batches=batches)
    model = small()
    norms: list[float] = []

    class Asks(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            modes = [module.training for module in pl_module.modules()]
            norms.append(Validation(batches)(pl_module))
            pl_module.train(modes[0])

    run.callbacks.append(Asks())
    run.fit(model, points(), points(6, seed=1))
    assert norms == [pytest.approx(run.callback_metrics["val_loss"].item())] and "log" not in vars(model)


class ByHand(pl.Callback):
    """Its own recorder, fed from the module's own hook."""

    def __init__(self, gradients: GradientRecorder) -> None:
        self.gradients = gradients

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.gradients.after_backward()
        self.gradients.before_zero_grad()


@pytest.mark.parametrize("manual", [False, True])
def test_gradients_are_recorded_once_a_step(tmp_path, manual):
    class Manual(Small):
        automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    torch.manual_seed(0)
    model = Manual(width=WIDTH)
    ours, other = (GradientRecorder(model, save_interval=4, batches=2, squares=True) for _ in range(2))
    scheme = sp.Fisher(relative_error=0.1, gradients=ours)
    accumulate = {} if manual else {"accumulate_grad_batches": 2}
    callbacks = [ShrinkIOCallback(ours), ByHand(other), every(tmp_path / "all")]
    run = trainer(tmp_path, ShrinkIO(scheme), callbacks=callbacks, **accumulate)
    run.fit(model, points(8))
    assert ours.step == other.step == run.global_step == (24 if manual else 12)
    assert ours.mean.keys() == dict(model.named_parameters()).keys() and same(dict(ours.mean), dict(other.mean))
    assert all(read_directory_manifest(tmp_path / "all" / name).is_lossy for name in names(tmp_path / "all"))


def test_recording_counts_on_after_a_restore(tmp_path):
    fit(tmp_path, ShrinkIO(), epochs=2)
    model = small(width=WIDTH)
    gradients = GradientRecorder(model)
    run = trainer(tmp_path, ShrinkIO(), epochs=3, callbacks=[ShrinkIOCallback(gradients)])
    run.fit(model, points(), ckpt_path=tmp_path / "all/epoch=1.ckpt")
    assert gradients.step == 12


def test_inshrinkerator_searches_with_recorded_gradients(tmp_path):
    model = small(width=2048)
    recorder, validation = GradientRecorder(model), Validation(2)
    seen: list[float] = []

    def evaluate(module: Any) -> float:
        seen.append(validation(module))
        return seen[-1]

    scheme = sp.Inshrinkerator(evaluate=evaluate, gradients=recorder, threshold=0.05)
    run = trainer(tmp_path, ShrinkIO(scheme), epochs=2, callbacks=[ShrinkIOCallback(recorder), every(tmp_path / "all")])
    run.fit(model, points(), points(6, seed=1))
    manifest = read_directory_manifest(tmp_path / "all/epoch=1.ckpt")
    assert manifest.scheme == "inshrinkerator" and manifest.is_lossy and len(set(seen)) > 3
    (search,) = manifest.loss["searches"]
    assert "sensitivity" in {trial["settings"]["metric"] for trial in search["trials"]}


def test_fabric_says_which_module_is_watched(tmp_path):
    torch.manual_seed(0)
    seen: list[type] = []

    def evaluate(model: Any) -> float:
        seen.append(type(model))
        return float(model(torch.ones(2, 64)).square().mean())

    ours = ShrinkIO(sp.Fisher(nats=1.0, evaluate=evaluate), model="model")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[ours])
    inner = nn.Linear(64, 64)
    model, optimizer = fabric.setup(inner, torch.optim.Adam(inner.parameters()))
    with pytest.raises(PolicyError, match=r"call watch\(model\)"):
        fabric.save(tmp_path / "0.ckpt", {"model": model})
    ours.watch(model)
    fabric.save(tmp_path / "1.ckpt", {"model": model, "optimizer": optimizer})
    assert set(seen) == {nn.Linear} and read_directory_manifest(tmp_path / "1.ckpt").is_lossy
