"""`ShrinkIO("fisher")` and nothing else: what is measured and counted with a Trainer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.lightning_runs import QUIET, Small, every, points, trainer
from helpers.strategies import same
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from shrinkpoint.errors import LossWarning, UnmeasuredLossWarning
from shrinkpoint.store import SaveReport
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning"),
]


class LogsOnly(Small):
    """Returns no loss from its validation."""

    def validation_step(self, batch, index):
        super().validation_step(batch, index)


class Manual(Small):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def validation_step(self, batch, index):
        pass

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def fit(root: Path, kind: type[pl.LightningModule] = Small, scheme: Any = "fisher", **options: Any) -> Any:
    """The trainer, the module, and the reports; `scheme=None` is a run without this package."""
    reports: list[SaveReport] = []
    plugins = [] if scheme is None else [ShrinkIO(scheme, on_save=reports.append)]
    callbacks = [every(root / "all")] if scheme is None else [ShrinkIOCallback(), every(root / "all")]
    callbacks = options.pop("callbacks", callbacks)
    loaders = options.pop("loaders", (points(4, shuffle=True), points(6, seed=1)))
    run = trainer(root, *plugins, epochs=2, callbacks=callbacks, **options)
    torch.manual_seed(1)
    module = kind(width=256)
    run.fit(module, *loaders)
    return run, module, reports


@pytest.mark.parametrize(
    ("kind", "loaders", "measured_on"),
    [
        (Small, (points(4, shuffle=True), points(6, seed=1)), "6 validation batches"),
        (LogsOnly, (points(4, shuffle=True), points(6, seed=1)), "the last 8 training batches"),
        (Small, (points(4, shuffle=True),), "the last 8 training batches"),
    ],
)
def test_the_name_alone_keeps_a_measured_rise_and_training_does_not_notice(tmp_path, kind, loaders, measured_on):
    run, module, reports = fit(tmp_path / "ours", kind, loaders=loaders)
    plain_run, plain, _ = fit(tmp_path / "plain", kind, None, loaders=loaders)
    assert same(module.state_dict(), plain.state_dict()) and module.losses == plain.losses
    assert run.callback_metrics.keys() == plain_run.callback_metrics.keys()
    assert len(reports) == 2 and reports[-1].measured_on == measured_on
    for report in reports:
        assert report.loss_increase <= 0.001 and report.loss_report["budget"] == "0.1%" and report.ratio > 2


def test_batches_of_all_accumulated_steps_are_the_terms_of_the_prediction(tmp_path):
    _, _, reports = fit(tmp_path, scheme="fisher(nats=.01)", accumulate_grad_batches=2)
    assert [report.loss_report["terms"] for report in reports] == [16.0, 16.0]


@pytest.mark.parametrize(
    ("kind", "callbacks", "reason"),
    [
        (Manual, None, "training_step: manual optimization"),
        (Small, (), "it is not known which model is saved: add ShrinkIOCallback"),
    ],
)
def test_a_loss_that_cannot_be_measured_is_reported_and_the_checkpoint_is_exact(tmp_path, kind, callbacks, reason):
    more = {} if callbacks is None else {"callbacks": [every(tmp_path / "all")]}
    with pytest.warns(LossWarning, match=f"could not be measured: .*{reason}"):
        _, _, reports = fit(tmp_path, kind, **more)
    assert all(report.loss_report["chosen"] is None for report in reports)


def test_averages_of_weights_are_not_measured_and_the_warning_says_so(tmp_path):
    averages = [EMAWeightAveraging(), ShrinkIOCallback(), every(tmp_path / "all")]
    with pytest.warns(LossWarning, match=r"not the module's own.* is exact.*: take a scheme that does not evaluate"):
        _, _, reports = fit(tmp_path / "a", callbacks=averages)
    assert all(report.loss_report["chosen"] is None for report in reports)
    averages = [EMAWeightAveraging(), ShrinkIOCallback(), every(tmp_path / "more")]
    with pytest.warns(UnmeasuredLossWarning):
        assert fit(tmp_path / "b", scheme="fisher(relative_error=0.3)", callbacks=averages)[2][-1].ratio > 2


def test_a_resumed_run_goes_on_with_deltas(tmp_path):
    _, _, reports = fit(tmp_path)
    newest = reports[-1].path
    plugin = ShrinkIO("fisher")
    again = trainer(tmp_path, plugin, epochs=3, callbacks=[ShrinkIOCallback(), every(tmp_path / "all")])
    again.fit(Small(width=256), points(4), points(6, seed=1), ckpt_path=newest, weights_only=True)
    report = plugin.wait()
    assert not report.keyframe and report.loss_increase <= 0.001
    assert read_directory_manifest(report.path).lossy_restores == 1


def test_a_loop_of_fabric_may_show_its_batches_itself(tmp_path):
    plugin = ShrinkIO("fisher(nats=.01)")
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = torch.randn(8, 64)
        plugin.note_batch(x, batches_per_step=2)
        model(x).square().mean().backward()
        optimizer.step()
    plugin.save_checkpoint({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    assert plugin.wait().loss_report["terms"] == 16.0
    assert repr(pickle.loads(pickle.dumps(ShrinkIO("fisher")))) == repr(ShrinkIO("fisher"))
