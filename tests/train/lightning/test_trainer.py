"""Lightning's Trainer saves through `ShrinkIO`: all that users of the stock plugin rely on holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.lightning_runs import QUIET, Small, every, names, points, small, trainer
from helpers.strategies import same
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning
from lightning.pytorch.loggers.logger import Logger
from torch import nn

from shrinkpoint.errors import MismatchError, PolicyError, StateError
from shrinkpoint.store.directory import is_checkpoint, read_directory_manifest
from shrinkpoint.train import CheckpointManager
from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback, latest_valid

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Reseeded(pl.Callback):
    """Lightning saves no random generators: each step begins with its own."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)


def fit(root: Path, *plugins: Any, epochs: int = 3, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    run = trainer(root, *plugins, epochs=epochs, callbacks=[Reseeded(), every(root / "all", **options)])
    run.fit(small(), points(), points(2, seed=1), ckpt_path=ckpt_path)
    return run


def alike(one: pl.Trainer, other: pl.Trainer) -> bool:
    pairs = [(run.lightning_module.state_dict(), run.optimizers[0].state_dict()) for run in (one, other)]
    return same(*pairs) and one.lr_scheduler_configs[0].scheduler.state_dict() == (
        other.lr_scheduler_configs[0].scheduler.state_dict()
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> pl.Trainer:
    """A run of four epochs, saved by the stock plugin."""
    return fit(tmp_path_factory.mktemp("stock"), epochs=4)


# going on


def test_a_run_resumed_from_the_last_one_is_the_uninterrupted_one_bit_for_bit(tmp_path, stock):
    fit(tmp_path, ShrinkIO(background=True), epochs=2, save_last=True)
    resumed = fit(tmp_path, ShrinkIO(background=True), epochs=4, ckpt_path="last", save_last=True)
    assert resumed.lightning_module.losses == stock.lightning_module.losses[8:]
    assert alike(resumed, stock) and resumed.current_epoch == 4 and resumed.global_step == 16


def test_what_comes_back_is_what_the_stock_plugin_brings_back(tmp_path, stock):
    """Of the same checkpoint, value by value; also where the generators are not those of the first run."""
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    ours = ShrinkIO()
    found = torch.load(tmp_path / "stock.ckpt", weights_only=True)
    ours.save_checkpoint(found, tmp_path / "ours.ckpt")
    assert same(ours.load_checkpoint(tmp_path / "ours.ckpt"), found)
    after = []
    for name, plugins in (("stock", ()), ("ours", (ShrinkIO(),))):
        torch.manual_seed(7)
        run = trainer(tmp_path, *plugins, epochs=5)
        run.fit(small(), points(shuffle=True), ckpt_path=tmp_path / f"{name}.ckpt")
        after.append(run)
    assert alike(*after) and after[0].lightning_module.losses == after[1].lightning_module.losses


def test_the_middle_of_an_epoch_is_as_good_as_its_end(tmp_path):
    options = {"every_n_train_steps": 3, "filename": "{step}"}
    whole = fit(tmp_path / "a", ShrinkIO(), epochs=3, **options)
    assert "step=9.ckpt" in names(tmp_path / "a/all")
    after = [trainer(tmp_path, ShrinkIO(background=beside), callbacks=[Reseeded()]) for beside in (False, True)]
    for run in after:
        torch.manual_seed(2)
        run.fit(small(), points(), ckpt_path=tmp_path / "a/all/step=9.ckpt")
    assert alike(*after) and after[0].global_step == whole.global_step == 12


def test_the_best_one_is_found_and_tested(tmp_path):
    run = fit(tmp_path, ShrinkIO(background=True), monitor="val_loss", save_top_k=2)
    best = run.checkpoint_callback
    assert len(names(tmp_path / "all")) == 2 and Path(best.best_model_path).is_dir()
    (metrics,) = run.test(ckpt_path="best", dataloaders=points(2, seed=1), verbose=False)
    assert metrics["test_loss"] == pytest.approx(best.best_model_score.item())
    manifests = [read_directory_manifest(tmp_path / "all" / name) for name in names(tmp_path / "all")]
    scores = {manifest.metrics["val_loss"] for manifest in manifests}
    assert scores == {value.item() for value in best.best_k_models.values()}
    assert {manifest.step for manifest in manifests} <= {4, 8, 12} and all(
        manifest.extra == {"lightning": pl.__version__} for manifest in manifests
    )


def test_an_exception_leaves_a_checkpoint(tmp_path):
    class Breaks(Small):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 6:
                raise LookupError("no such batch")

    run = trainer(tmp_path, ShrinkIO(background=True), callbacks=[every(tmp_path / "all", save_on_exception=True)])
    with pytest.raises(LookupError, match="no such batch"):
        run.fit(Breaks(), points())
    assert read_directory_manifest(latest_valid(tmp_path / "all")).step == 6
    fit(tmp_path, ShrinkIO(), epochs=3, ckpt_path=latest_valid(tmp_path / "all"))


# what lies on the disk


def own_bytes(folder: Path) -> int:
    """Of a checkpoint's own payload, without what it stands on."""
    (payload,) = read_directory_manifest(folder).payloads
    return payload.size


def test_a_second_copy_of_the_last_one_costs_next_to_nothing(tmp_path):
    run = trainer(tmp_path, ShrinkIO(), callbacks=[every(tmp_path, save_last=True)])
    run.fit(small(width=4096), points())
    last, first, newest_one = (own_bytes(tmp_path / name) for name in ("last.ckpt", "epoch=0.ckpt", "epoch=2.ckpt"))
    assert 20 * last < newest_one < first
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]


def test_a_link_to_the_last_one_is_a_link(tmp_path):
    fit(tmp_path, ShrinkIO(background=True), epochs=2, save_last="link", save_top_k=1)
    assert names(tmp_path / "all") == ["epoch=1.ckpt", "last.ckpt"] and (tmp_path / "all/last.ckpt").is_symlink()
    run = fit(tmp_path, ShrinkIO(), epochs=3, ckpt_path="last", save_last="link")
    assert run.global_step == 12 and (tmp_path / "all/last.ckpt").readlink() == Path("epoch=2.ckpt")
    target = (tmp_path / "all/epoch=2.ckpt/shrinkpoint.json").read_bytes()
    run.save_checkpoint(tmp_path / "all/last.ckpt")  # in the place of the link, not into what it points to
    assert not (tmp_path / "all/last.ckpt").is_symlink()
    assert (tmp_path / "all/epoch=2.ckpt/shrinkpoint.json").read_bytes() == target


def test_a_run_of_the_stock_plugin_goes_on_with_ours(tmp_path, stock):
    fit(tmp_path, epochs=2, save_last=True)
    assert (tmp_path / "all/last.ckpt").is_file()
    for path in (tmp_path / "all/epoch=1.ckpt", "last"):
        run = fit(
            tmp_path, ShrinkIO(background=True), epochs=4, ckpt_path=path, save_last=True, enable_version_counter=False
        )
        assert alike(run, stock)
    assert names(tmp_path / "all") == [*(f"epoch={i}.ckpt" for i in range(4)), "last.ckpt"]
    assert [(tmp_path / "all" / name).is_dir() for name in names(tmp_path / "all")] == [False, False, True, True, True]


# what cannot be


def test_groups_that_a_callback_adds_to_an_optimizer_are_restored(tmp_path):
    class Backbone(Small):
        backbone = property(lambda self: self.net[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(parameter for parameter in self.parameters() if parameter.requires_grad)

    def tune(epochs: int, **options: Any) -> pl.Trainer:
        callbacks = [ShrinkIOCallback(), BackboneFinetuning(1, backbone_initial_lr=0.01), every(tmp_path / "all")]
        run = trainer(tmp_path, ShrinkIO(), epochs=epochs, callbacks=callbacks)
        run.fit(Backbone(), points(), **options)
        return run

    first = tune(2).optimizers[0].state_dict()
    resumed = tune(2, ckpt_path=latest_valid(tmp_path / "all")).optimizers[0].state_dict()
    assert len(first["param_groups"]) == 2 and same(first, resumed)


def test_a_run_that_prunes_its_model_resumes(tmp_path):
    def prune(epochs: int, **options: Any) -> pl.Trainer:
        callbacks = [ModelPruning("l1_unstructured", amount=0.3), ShrinkIOCallback(), every(tmp_path / "all")]
        run = trainer(tmp_path, ShrinkIO(), epochs=epochs, callbacks=callbacks)
        run.fit(small(), points(), **options)
        return run

    first = prune(1).optimizers[0].state_dict()
    resumed = prune(1, ckpt_path=latest_valid(tmp_path / "all")).optimizers[0].state_dict()
    assert first["state"] and same(first, resumed)


def test_what_cannot_be_stored_is_named_and_nothing_is_left(tmp_path):
    run = trainer(tmp_path, ShrinkIO(background=True), callbacks=[every(tmp_path / "all")])
    with pytest.raises(StateError, match=r"state\['hyper_parameters'\]\['act'\].*save_hyperparameters\(ignore="):
        run.fit(small(act=nn.functional.relu), points())
    assert names(tmp_path / "all") == []


def test_options_and_far_places_are_refused(tmp_path):
    ours = ShrinkIO()
    with pytest.raises(TypeError, match="storage_options"):
        ours.save_checkpoint({}, tmp_path / "one.ckpt", storage_options={"a": 1})
    with pytest.raises(PolicyError, match="a path of a local file system"):
        ours.save_checkpoint({}, "memory://somewhere/one.ckpt")
    with pytest.raises(FileNotFoundError):
        ours.load_checkpoint(tmp_path / "none.ckpt")
    ours.remove_checkpoint(tmp_path / "none.ckpt")
    assert names(tmp_path) == []


# Fabric


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["directory", pytest.param("bucket", marks=pytest.mark.nightly)])
def test_fabric_saves_loads_and_removes(request, tmp_path, kind, background):
    if kind == "bucket":
        request.getfixturevalue("s3")
    root = tmp_path if kind == "directory" else f"s3://checkpoints/fabric-{os.getpid()}-{background}"

    def built(seed: int) -> tuple[Fabric, dict[str, Any]]:
        torch.manual_seed(seed)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[ShrinkIO(background=background)])
        model = nn.Linear(3, 3)
        model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
        return fabric, {"model": model, "optimizer": optimizer, "step": 3, "name": "one"}

    fabric, state = built(0)
    for step in range(3):
        fabric.backward(state["model"](torch.ones(2, 3)).square().sum())
        state["optimizer"].step()
        state["step"] = step
        fabric.save(f"{root}/{step}.ckpt", state)
    fabric.strategy.checkpoint_io.wait()
    other, fresh = built(1)
    rest = other.load(f"{root}/2.ckpt", fresh)
    assert rest == {} and fresh["step"] == 2 and fresh["name"] == "one"
    assert same(fresh["model"].state_dict(), state["model"].state_dict())
    assert same(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert read_directory_manifest(f"{root}/2.ckpt").depth == (2 if kind == "directory" else 0)
    whole = Fabric(accelerator="cpu", devices=1, plugins=[ShrinkIO()]).load(f"{root}/2.ckpt")
    assert {*whole} == {"model", "optimizer", "step", "name"}
    other.strategy.checkpoint_io.remove_checkpoint(f"{root}/1.ckpt")
    assert not is_checkpoint(f"{root}/1.ckpt") and is_checkpoint(f"{root}/2.ckpt")


@pytest.mark.parametrize("background", [False, True])
def test_the_loggers_of_a_trainer_get_the_numbers_of_each_save(tmp_path, background):
    class Memory(Logger):
        def __init__(self) -> None:
            super().__init__()
            self.rows: dict[int, dict[str, float]] = {}

        name, version = "memory", 0

        def log_metrics(self, metrics, step=None):
            self.rows.setdefault(step, {}).update({k: v for k, v in metrics.items() if k.startswith("checkpoint/")})

        def log_hyperparams(self, *_, **__):
            pass

    memory, told = Memory(), []
    run = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=memory,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=3,
        default_root_dir=tmp_path,
        plugins=[ShrinkIO(background=background, on_save=told.append)],
        callbacks=[every(tmp_path), ShrinkIOCallback(log_saves=True)],
    )
    run.fit(small(), points())
    rows = {step: row for step, row in memory.rows.items() if row}
    assert [*rows] == [4, 8, 12] == [report.step for report in told]
    assert [row["checkpoint/depth"] for row in rows.values()] == [0, 1, 2]


def test_moments_have_the_strides_of_their_parameter(tmp_path):
    class Pictures(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten())
            self.net.to(memory_format=torch.channels_last)

    for epochs, path in ((1, None), (2, "last")):
        saver = every(tmp_path, save_last=True)
        run = trainer(tmp_path, ShrinkIO(), epochs=epochs, callbacks=[saver, ShrinkIOCallback()])
        run.fit(Pictures(), points(), ckpt_path=path)
    weight = run.lightning_module.net[1].weight
    assert run.optimizers[0].state[weight]["exp_avg"].stride() == weight.stride() != weight.contiguous().stride()


@pytest.mark.parametrize("kind", ["optimizer", "scheduler"])
def test_an_optimizer_or_scheduler_of_another_kind_is_refused(tmp_path, kind):
    class Changed(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if kind == "optimizer":
                return optimizer
            [optimizer], _ = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 99)]

    saver = every(tmp_path, save_last=True)
    trainer(tmp_path, ShrinkIO(), epochs=1, callbacks=[saver, ShrinkIOCallback()]).fit(small(), points())
    run = trainer(tmp_path, ShrinkIO(), epochs=2, callbacks=[every(tmp_path, save_last=True), ShrinkIOCallback()])
    with pytest.raises(MismatchError, match=f"the state of another kind of {kind}"):
        run.fit(Changed(), points(), ckpt_path="last")


def test_the_store_of_a_checkpoint_manager_is_no_run_without_checkpoints(tmp_path):
    with CheckpointManager(tmp_path / "store") as manager:
        manager.save(1, model=small())
    with pytest.raises(MismatchError, match=r"a checkpoint in a store.*by a CheckpointManager"):
        latest_valid(tmp_path / "store")
    trainer(tmp_path, ShrinkIO(), epochs=1, callbacks=[every(tmp_path / "run")]).fit(small(), points())
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(MismatchError, match="the run of a framework"):
        manager.restore(model=small())
