"""`scheme="fisher"` and nothing else: what the Trainer measures and counts by itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.huggingface import Text, ended, gpt2, made
from helpers.strategies import same
from transformers import Trainer

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning
from shrinkpoint.store import SaveReport
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

pytestmark = pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")
WIDE = partial(gpt2, width=64)


class Padded(Text):
    """The last four labels of sixteen are none."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return item | {"labels": item["labels"].where(torch.arange(16) < 12, torch.tensor(-100))}


def run(folder: Path, scheme: Any = "fisher", kind: type[Trainer] = ShrinkTrainer, **settings: Any) -> Any:
    """The reports of a run, and how it ended."""
    reports: list[SaveReport] = []
    shrink = ShrinkConfig(scheme, on_save=reports.append)
    trainer = made(kind, folder, trainer_model=WIDE(), trainer_shrink=shrink, **({"max_steps": 4} | settings))
    end = ended(trainer)
    return reports, end, trainer


@pytest.mark.parametrize(
    ("settings", "measured_on"),
    [
        ({}, "3 batches of the evaluation dataset"),
        ({"trainer_eval_dataset": {"a": Text(8), "b": Text(8, 8)}}, "1 batches of the evaluation dataset"),
        ({"trainer_eval_dataset": None, "gradient_accumulation_steps": 3}, "the last 8 training batches"),
    ],
)
def test_the_name_alone_keeps_a_measured_rise_and_training_does_not_notice(tmp_path, settings, measured_on):
    reports, end, trainer = run(tmp_path / "run", **settings)
    plain = made(Trainer, tmp_path / "plain", trainer_model=WIDE(), max_steps=4, **settings)
    assert same(end, ended(plain)) and trainer.model.training
    assert [report.measured_on for report in reports][-1] == measured_on
    for report in reports:
        assert report.is_measured and report.loss_increase <= 0.001 and report.loss_report["budget"] == "0.1%"
        assert report.ratio > 8


def test_a_resumed_run_measures_again_and_remembers_what_it_learned(tmp_path):
    run(tmp_path, trainer_eval_dataset=None)
    terms = read_directory_manifest(tmp_path / "checkpoint-4").loss["terms"]
    reports: list[SaveReport] = []
    shrink = ShrinkConfig("fisher", on_save=reports.append)
    again = made(
        ShrinkTrainer, tmp_path, trainer_model=WIDE(), trainer_shrink=shrink, max_steps=6, trainer_eval_dataset=None
    )
    again.train(resume_from_checkpoint=True)
    (report,) = reports
    assert not report.keyframe and report.loss_increase <= 0.001 and report.measured_on == "the last 2 training batches"
    assert report.loss_report["terms"] == pytest.approx(terms, rel=2)
    assert read_directory_manifest(tmp_path / "checkpoint-6").lossy_restores == 1


@pytest.mark.parametrize(
    ("dataset", "settings", "terms"),
    [(Text, {}, 8 * 16), (Padded, {}, 8 * 12), (Padded, {"gradient_accumulation_steps": 2}, 2 * 8 * 12)],
)
def test_labels_that_count_are_the_terms_of_the_prediction(tmp_path, dataset, settings, terms):
    """Without a measurement, which would calibrate it."""
    reports, *_ = run(tmp_path, "fisher(nats=.01)", trainer_train_dataset=dataset(64), **settings)
    assert [report.loss_report["terms"] for report in reports] == [terms, terms]
    assert all("predicted" in str(report) for report in reports)
    given, *_ = run(tmp_path / "given", "fisher(nats=.01, terms=7)", max_steps=2)
    assert given[0].loss_report["terms"] == 7


def test_a_loss_that_cannot_be_measured_is_reported_and_the_checkpoint_is_exact(tmp_path):
    class Broken(ShrinkTrainer):
        def compute_loss(self, model, *args, **kwargs):
            if not model.training:
                raise LookupError("only in training")
            return super().compute_loss(model, *args, **kwargs)

    with pytest.warns(LossWarning, match="could not be measured: LookupError: only in training, so .* is exact"):
        reports, end, _ = run(tmp_path, kind=Broken, trainer_eval_dataset=None, max_steps=2)
    assert reports[0].loss_report["chosen"] is None
    assert same(sp.load(tmp_path / "checkpoint-2")["model"], end["model"])


def test_a_factory_without_an_evaluation_gets_the_same(tmp_path):
    reports, *_ = run(tmp_path, partial(sp.Fisher, budget="5%"), max_steps=2)
    assert reports[0].measured_on == "3 batches of the evaluation dataset" and reports[0].loss_increase <= 0.05
    unmeasured, *_ = run(tmp_path / "b", "fisher(relative_error=.3)", max_steps=2)
    assert not unmeasured[0].is_measured
