"""`save_state(accelerator, scheme="fisher")`: what is measured and counted with an Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers import accelerate_runs
from helpers.accelerate_runs import Loop
from helpers.huggingface import Text, gpt2
from torch import nn
from torch.utils.data import DataLoader

from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.train.accelerate import AcceleratorCheckpointer, load_state, save_state

pytestmark = [
    pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning"),
    pytest.mark.usefixtures("no_accelerator"),
]


def loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_training_does_not_notice_and_a_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    ends = []
    for saves in (True, False):
        accelerate_runs.forget()
        run = Loop(tmp_path if saves else None)
        for number, (inputs, labels) in enumerate(run.loader):
            run.batch(inputs, labels)
            if saves and number % 4 == 3:
                before = run.state()
                report = save_state(run.accelerator, scheme="fisher", loss=loss)
                assert run.state() == before and run.model.training
        ends.append(run.epoch().state())
    assert ends[0] == ends[1]
    assert report.measured_on == "8 batches of the training dataset" and report.loss_increase <= 0.001
    assert not report.keyframe and report.loss_report["budget"] == "0.1%"
    accelerate_runs.forget()
    again = Loop(tmp_path, seed=3)
    assert load_state(again.accelerator, scheme="fisher", loss=loss).manifest.is_lossy
    again.epoch()
    report = save_state(again.accelerator)
    assert not report.keyframe and report.loss_increase <= 0.001


def test_examples_of_all_accumulated_batches_are_the_terms(tmp_path: Path) -> None:
    run = Loop().epoch()
    report = save_state(run.accelerator, tmp_path / "a", scheme="fisher(nats=.01)")
    assert report.loss_report["terms"] == 2 * 4.0


def test_a_model_that_returns_its_loss_needs_nothing_else(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = gpt2(width=64)
    parts = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(Text(48), batch_size=4)
    )
    model, optimizer, loader = parts
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    with AcceleratorCheckpointer(accelerator, scheme="fisher") as checkpointer:
        report = checkpointer.save_state(tmp_path / "a")
    assert report.loss_increase <= 0.001 and report.measured_on == "8 batches of the training dataset"


def test_a_loss_that_cannot_be_measured_is_reported_and_the_checkpoint_is_exact(tmp_path: Path) -> None:
    run = Loop().epoch()
    with pytest.warns(LossWarning, match=r"returns no loss for a batch.* so this checkpoint is exact"):
        report = save_state(run.accelerator, tmp_path / "a", scheme="fisher")
    assert report.loss_report["chosen"] is None
    run.accelerator.prepare_model(torch.nn.Linear(4, 4))
    with pytest.warns(LossWarning, match=r"loss= gets the list of the 2 prepared models, and a batch"):
        save_state(run.accelerator, tmp_path / "b", scheme="fisher")
    with pytest.raises(PolicyError, match="loss"):
        AcceleratorCheckpointer(run.accelerator, scheme="fisher", loss=3)
