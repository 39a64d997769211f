"""Promise: every integration restores what an optimizer keeps to its parameter and in its dtype, or refuses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from helpers import accelerate_runs
from helpers.lightning_runs import QUIET
from helpers.master_weights import LAYERS, Layers, MasterAdam, groups, plain_values, slots_by_name
from helpers.parameters import each_value
from lightning import Fabric
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Adafactor, Trainer, TrainerCallback, TrainingArguments

from shrinkpoint.errors import MismatchError
from shrinkpoint.train import CheckpointManager, dcp
from shrinkpoint.train.accelerate import load_state, save_state
from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback
from shrinkpoint.train.transformers import ShrinkCallback, ShrinkTrainer

pytestmark = [pytest.mark.filterwarnings(line) for line in (*QUIET, "ignore:torch.distributed is disabled:UserWarning")]
ROWS = [{"x": torch.full((4,), row / 8), "labels": row} for row in range(8)]
Run = tuple[nn.Module, Any, Any]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    accelerate_runs.forget()


def build(order: tuple[str, ...], kind: str) -> Run:
    model = Layers(order, torch.bfloat16)
    if kind == "adafactor":
        optimizer: Any = Adafactor(groups(model, order), scale_parameter=False, relative_step=False)
    else:
        optimizer = MasterAdam(groups(model, order))
    return model, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)


def loop(run: Run) -> None:
    model, optimizer, scheduler = run
    optimizer.zero_grad()
    for row in ROWS[:2]:
        model(row["x"])["loss"].backward()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()


class Managed:
    """A loop of one's own with `CheckpointManager`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> Any:
        return CheckpointManager(self.folder)

    def save(self, run: Run) -> None:
        loop(run)
        self.make().save(2, **dict(zip(("model", "optimizer", "scheduler"), run, strict=True)))

    def restore(self, run: Run) -> None:
        self.make().restore(**dict(zip(("model", "optimizer", "scheduler"), run, strict=True)))


class Sharded(Managed):
    def make(self) -> Any:
        return dcp.Manager(self.folder)


class Accelerated(Managed):
    def prepare(self, run: Run) -> Accelerator:
        accelerate_runs.forget()
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(*run)
        return accelerator

    def save(self, run: Run) -> None:
        accelerator = self.prepare(run)
        loop(run)
        save_state(accelerator, self.folder / "2")

    def restore(self, run: Run) -> None:
        load_state(self.prepare(run), self.folder / "2")


class Restored(Exception):
    """Ends a training that has restored everything."""


class Stop(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise Restored


class HuggingFace(Managed):
    def trainer(self, run: Run) -> Trainer:
        return ShrinkTrainer(run[0], self.arguments(), train_dataset=ROWS, optimizers=run[1:])

    def arguments(self, **settings: Any) -> TrainingArguments:
        settings |= {"save_steps": 2, "max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        return TrainingArguments(str(self.folder), per_device_train_batch_size=2, **settings)

    def save(self, run: Run) -> None:
        self.trainer(run).train()

    def restore(self, run: Run) -> None:
        trainer = self.trainer(run)
        trainer.add_callback(Stop())
        with pytest.raises(Restored):
            trainer.train(resume_from_checkpoint=True)


class CalledBack(HuggingFace):
    def trainer(self, run: Run) -> Trainer:
        arguments = self.arguments(save_only_model=True)
        return Trainer(run[0], arguments, train_dataset=ROWS, optimizers=run[1:], callbacks=[ShrinkCallback()])


class Module(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers, self.optimizer, self.scheduler = run

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layers(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [self.scheduler]


class Lightning(Managed):
    def fit(self, run: Run, path: Path | None = None) -> pl.Trainer:
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, default_root_dir=self.folder, plugins=[ShrinkIO()],
            callbacks=self.callbacks(), enable_checkpointing=False, **quiet,
        )  # fmt: skip
        trainer.fit(Module(run), DataLoader(ROWS, batch_size=8), ckpt_path=path)
        return trainer

    def callbacks(self) -> list[Any]:
        return [ShrinkIOCallback()]

    def save(self, run: Run) -> None:
        self.fit(run).save_checkpoint(self.folder / "last.ckpt")

    def restore(self, run: Run) -> None:
        self.fit(run, self.folder / "last.ckpt")


class LightningAlone(Lightning):
    def callbacks(self) -> list[Any]:
        return []


class Fabricated(Managed):
    def parts(self, run: Run) -> tuple[Fabric, dict[str, Any]]:
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[ShrinkIO()])
        model, optimizer = fabric.setup(*run[:2])
        return fabric, {"model": model, "optimizer": optimizer}

    def save(self, run: Run) -> None:
        loop(run)
        fabric, parts = self.parts(run)
        fabric.save(self.folder / "last.ckpt", parts)

    def restore(self, run: Run) -> None:
        fabric, parts = self.parts(run)
        fabric.load(self.folder / "last.ckpt", parts)


BY_NAME = [Managed, Sharded, Accelerated, HuggingFace, CalledBack, Lightning]
ALL = [*BY_NAME, LightningAlone, Fabricated]


@pytest.mark.parametrize(("integration", "kind"), each_value(ALL, ["masters", "adafactor"]))
def test_slots_come_back_in_the_dtypes_that_were_saved(tmp_path: Path, integration: Any, kind: str) -> None:
    run, other = build(LAYERS, kind), build(LAYERS, kind)
    integration(tmp_path).save(run)
    integration(tmp_path).restore(other)
    assert plain_values(slots_by_name(*run[:2])) == plain_values(slots_by_name(*other[:2]))


@pytest.mark.parametrize("integration", [Managed, Sharded])
def test_texts_and_bounded_deques_come_back(tmp_path: Path, integration: Any) -> None:
    """torch's own part makes them anew of their items, so that a text becomes that of a generator.

    Accelerate calls that part before a save, too.
    """
    run, other = build(LAYERS, "masters"), build(LAYERS, "masters")
    loop(run)
    for state in run[1].state.values():
        state |= {"mode": "fp8", "nest": [{"text": "a"}], "recent": deque([1.0, 2.0], maxlen=2)}
    integration(tmp_path).save(run)
    integration(tmp_path).restore(other)
    for state in other[1].state.values():
        assert (state["mode"], state["nest"]) == ("fp8", [{"text": "a"}])
        assert state["recent"] == deque([1.0, 2.0]) and state["recent"].maxlen == 2


@pytest.mark.parametrize("integration", BY_NAME)
def test_slots_and_rates_follow_layers_that_are_declared_in_another_order(tmp_path: Path, integration: Any) -> None:
    run, other = build(LAYERS, "masters"), build(("c", "a", "b"), "masters")
    integration(tmp_path).save(run)
    integration(tmp_path).restore(other)
    assert plain_values(slots_by_name(*run[:2])) == plain_values(slots_by_name(*other[:2]))
    assert [run[2].base_lrs[index] for index in (2, 0, 1)] == other[2].base_lrs
    loop(run)
    loop(other)
    assert plain_values(slots_by_name(*run[:2])) == plain_values(slots_by_name(*other[:2]))


@pytest.mark.parametrize("integration", BY_NAME)
def test_an_optimizer_over_another_layer_is_refused(tmp_path: Path, integration: Any) -> None:
    run, other = build(LAYERS, "masters"), build(LAYERS, "masters")
    for one, layer in ((run, "a"), (other, "b")):
        del one[1].param_groups[1:], one[2].base_lrs[1:], one[2].lr_lambdas[1:]
        one[1].param_groups[0]["params"] = list(one[0][layer].parameters())
    integration(tmp_path).save(run)
    with pytest.raises(MismatchError, match=r"b\.weight"):
        integration(tmp_path).restore(other)


@pytest.mark.parametrize("integration", [one for one in BY_NAME if one is not CalledBack])  # stock weights there
def test_a_compiled_layer_has_the_name_of_the_plain_one(tmp_path: Path, integration: Any) -> None:
    run, other = build(LAYERS, "masters"), build(LAYERS, "masters")
    integration(tmp_path).save(run)
    weights = [other[0][name].weight for name in LAYERS]
    other[0]["a"] = torch.compile(other[0]["a"], backend="eager")
    integration(tmp_path).restore(other)
    for name, weight in zip(LAYERS, weights, strict=True):
        assert torch.equal(run[0][name].weight, weight)
        assert plain_values(run[1].state[run[0][name].weight]) == plain_values(other[1].state[weight])


def test_accelerate_returns_and_logs_keys_that_only_one_side_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = build(("a", "b"), "masters"), build(("b", "c"), "masters")
    Accelerated(tmp_path).save(run)
    with pytest.raises(MismatchError):
        Accelerated(tmp_path).restore(other)
    result = load_state(Accelerated(tmp_path).prepare(other), tmp_path / "2", strict=False)
    assert result.missing_keys[:2] == ("c.weight", "c.bias") and result.unexpected_keys[:2] == ("a.weight", "a.bias")
    assert "c.weight" in caplog.text and "a.weight" in caplog.text
    kept = [plain_values(one[1].state[one[0]["b"].weight]) for one in (run, other)]
    assert kept[0] == kept[1] and not other[1].state.get(other[0]["c"].weight)
