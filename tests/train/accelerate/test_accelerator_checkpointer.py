"""Accelerate: a run goes on as if it had never stopped, from checkpoints that need no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType
from helpers import accelerate_runs
from helpers.accelerate_runs import Loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shrinkpoint import Fisher
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError, StateError
from shrinkpoint.store import directory as folders
from shrinkpoint.train.accelerate import AcceleratorCheckpointer, load_state, record_gradients, save_state

pytestmark = pytest.mark.usefixtures("no_accelerator")


def loop(*args: object, **settings: object) -> Loop:
    accelerate_runs.forget()
    return Loop(*args, **settings)


def test_a_run_that_stopped_in_an_epoch_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = loop(tmp_path)
    shrink = AcceleratorCheckpointer(first.accelerator, background=True)
    for stop in (None, 4):
        first.epoch(stop=stop)
        shrink.save_state()
    saved = first.state()
    shrink.wait()
    first.epoch(skip=4).epoch()
    second = loop(tmp_path, seed=9)
    load_state(second.accelerator)
    assert second.state() == saved
    second.epoch(skip=4).epoch()
    assert second.state() == first.state()


@pytest.mark.parametrize("background", [False, True])
def test_the_limit_holds_and_nothing_goes_before_the_new_one_is_whole(tmp_path: Path, background: bool) -> None:
    run = loop(tmp_path, limit=2)
    places = tmp_path / "checkpoints"
    with AcceleratorCheckpointer(run.accelerator, background=background) as shrink:
        for number in range(5):
            shrink.save_state()
            run.steps(1)
            whole = sorted(path.name for path in places.iterdir() if folders.is_checkpoint(path))
            assert len(whole) >= min(number + (not background), 2)
        shrink.wait()
    assert sorted(path.name for path in places.iterdir()) == ["checkpoint_3", "checkpoint_4"]
    for path in places.iterdir():
        folders.verify_directory(path, deep=True)


def test_numbers_go_on_behind_the_newest_after_a_load(tmp_path: Path) -> None:
    run = loop(tmp_path)
    for _ in range(3):
        save_state(run.accelerator)
    resumed_loop = loop(tmp_path)
    with pytest.raises(PolicyError, match=r"checkpoint_0.*a checkpoint that exists"):
        save_state(resumed_loop.accelerator)
    load_state(resumed_loop.accelerator, tmp_path / "checkpoints/checkpoint_1")
    save_state(resumed_loop.accelerator)
    assert load_state(resumed_loop.accelerator).directory.name == "checkpoint_3"


def test_a_directory_may_be_saved_into_again(tmp_path: Path) -> None:
    run = loop()
    with AcceleratorCheckpointer(run.accelerator) as shrink:
        for _ in range(3):
            shrink.save_state(tmp_path / "last")
            saved = run.state()
            run.steps(1)
    resumed_loop = loop(seed=2)
    load_state(resumed_loop.accelerator, tmp_path / "last")
    assert resumed_loop.state() == saved
    for call in (save_state, load_state):
        with pytest.raises(PolicyError, match="no directory"):
            call(resumed_loop.accelerator)


def test_what_accelerate_itself_has_saved_is_loaded_as_well(tmp_path: Path) -> None:
    run = loop(tmp_path, limit=2)
    for _ in range(2):
        run.accelerator.save_state()
    run.steps(1).accelerator.save_state()
    saved = run.state()
    resumed_loop = loop(tmp_path, limit=2, seed=2)
    resumed = load_state(resumed_loop.accelerator)
    assert resumed.directory.name == "checkpoint_2" and resumed.manifest is None
    assert resumed_loop.state()[:-1] == saved[:-1]
    save_state(resumed_loop.accelerator)
    remaining = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert remaining == ["checkpoint_2", "checkpoint_3"]


def test_hooks_are_called_and_may_take_models_out(tmp_path: Path) -> None:
    run, calls = loop(), []

    def save(models: list, weights: list, folder: str) -> None:
        calls.append((models[0] is run.accelerator._models[0], sorted(weights[0])[0], folder))
        Path(folder, "mine.txt").write_text("config")
        weights.pop()

    def load(models: list, folder: str) -> None:
        calls.append((models.pop() is run.accelerator._models[0], Path(folder, "mine.txt").read_text(), folder))

    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(load)
    save_state(run.accelerator, tmp_path / "a")
    weights = run.state()[0]
    run.steps(1)
    moved = run.state()[0]
    load_state(run.accelerator, tmp_path / "a")
    assert calls == [(True, "0.bias", str(tmp_path / "a")), (True, "config", str(tmp_path / "a"))]
    assert run.state()[0] == moved != weights


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    class Stubborn(accelerate_runs.Counter):
        def state_dict(self) -> dict:
            return {"a": [1, bytearray(2)]}

    run = loop(tmp_path)
    run.accelerator.register_for_checkpointing(Stubborn())
    with pytest.raises(StateError, match=r"Stubborn, object 1 of register_for_checkpointing, state\['a'\]\[1\]"):
        save_state(run.accelerator)
    assert not any(folders.is_checkpoint(path) for path in (tmp_path / "checkpoints").iterdir())


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run = loop()
    save_state(run.accelerator, tmp_path / "a")
    run.steps(2)
    other, before = nn.Linear(3, 3), run.state()
    run.accelerator.register_for_checkpointing(accelerate_runs.Counter())
    with pytest.raises(MismatchError, match="objects"):
        load_state(run.accelerator, tmp_path / "a")
    run.accelerator._custom_objects.pop()
    model, run.accelerator._models[0] = run.accelerator._models[0], other
    with pytest.raises(MismatchError, match="model"):
        load_state(run.accelerator, tmp_path / "a")
    run.accelerator._models[0] = model
    run.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(MismatchError, match="scaler"):
        load_state(run.accelerator, tmp_path / "a")
    run.accelerator.scaler = None
    assert run.state() == before
    with pytest.raises(NotFoundError):
        load_state(run.accelerator, tmp_path / "b")


class Refusing(accelerate_runs.Counter):
    """Takes the state of its own kind alone."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("kind")


@pytest.mark.parametrize("kind", ["shape", "optimizer", "own"])
def test_a_registered_object_that_does_not_fit_changes_nothing(tmp_path: Path, kind: str) -> None:
    def registered(*, is_other: bool) -> object:
        if kind == "own":
            return Refusing() if is_other else accelerate_runs.Counter()
        module = nn.Linear(5 if is_other and kind == "shape" else 4, 4)
        if kind == "shape":
            return module
        return (torch.optim.SGD if is_other else torch.optim.AdamW)(module.parameters(), lr=0.1)

    run = loop()
    run.accelerator.register_for_checkpointing(registered(is_other=False))
    save_state(run.accelerator, tmp_path / "a")
    run.steps(2)
    run.accelerator._custom_objects[-1] = registered(is_other=True)
    model = run.accelerator._models[0]
    before, weights = run.state(), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MismatchError, match=r"object \d of register_for_checkpointing"):
        load_state(run.accelerator, tmp_path / "a")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert kind == "own" or run.state() == before  # of objects of one's own, one before may have been loaded


def test_another_kind_of_optimizer_or_scheduler_is_refused_unless_asked_leniently(tmp_path: Path) -> None:
    run = loop()
    save_state(run.accelerator, tmp_path / "a")
    state = run.state()
    for name, other in (
        ("_optimizers", torch.optim.SGD(run.accelerator._models[0].parameters(), lr=0.1)),
        ("_schedulers", torch.optim.lr_scheduler.ReduceLROnPlateau(run.accelerator._optimizers[0].optimizer)),
    ):
        objects = list(getattr(run.accelerator, name))
        setattr(run.accelerator, name, [run.accelerator.prepare(other)])
        with pytest.raises(MismatchError, match="another kind"):
            load_state(run.accelerator, tmp_path / "a")
        setattr(run.accelerator, name, objects)
    assert run.state() == state


def test_several_models_a_scaler_and_what_is_tied_come_back(tmp_path: Path) -> None:
    run = loop()
    second = run.accelerator.prepare(nn.Linear(4, 4))
    tied = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    third, optimizer = run.accelerator.prepare(tied, torch.optim.SGD(tied.parameters(), lr=0.1, momentum=0.9))
    third["a"](torch.ones(4)).sum().backward()
    optimizer.step()
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weights = [x.clone() for model in (second, third) for x in model.parameters()]
    save_state(run.accelerator, tmp_path / "a")
    for x in [*second.parameters(), *third.parameters()]:
        x.data.zero_()
    optimizer.state.clear()
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    load_state(run.accelerator, tmp_path / "a")
    loaded = [x for model in (second, third) for x in model.parameters()]
    assert all(torch.equal(x, y) for x, y in zip(loaded, weights, strict=True))
    assert third["a"].weight is third["b"].weight and len(optimizer.state) == 2
    assert run.accelerator.scaler.get_scale() == 8.0


def test_loss_is_asked_for_and_measured_on_the_bare_model(tmp_path: Path) -> None:
    run = loop(tmp_path)
    inputs, labels, seen = torch.randn(32, 16), torch.randint(0, 4, (32,)), []

    @torch.no_grad()
    def evaluate(model: nn.Module) -> torch.Tensor:
        seen.append(type(model))
        return nn.functional.cross_entropy(model.eval()(inputs), labels)

    recorder = record_gradients(run.accelerator, squares=True)
    run.epoch()
    assert recorder.step == 4 and sorted(recorder.mean) == sorted(name for name, _ in run.model.named_parameters())
    before = run.state()
    report = save_state(run.accelerator, scheme=Fisher(nats=0.05, evaluate=evaluate, gradients=recorder))
    assert run.state() == before and set(seen) == {nn.Sequential} and run.model.training
    assert report.stored_bytes < report.raw_bytes / 4
    resumed_loop = loop(tmp_path, seed=3)
    manifest = load_state(resumed_loop.accelerator).manifest
    assert manifest.is_lossy and manifest.scheme == "fisher"
    assert abs(float(evaluate(resumed_loop.model) - evaluate(run.model))) < 0.2
    report = save_state(resumed_loop.accelerator, scheme="lossless")  # settings may come after a load
    assert not report.keyframe
    assert load_state(resumed_loop.accelerator).manifest.lossy_restores == 1


def test_settings_do_not_change_between_saves(tmp_path: Path) -> None:
    run = loop(tmp_path)
    save_state(run.accelerator, keyframe_every=3)
    save_state(run.accelerator, keyframe_every=3)
    save_state(run.accelerator)
    with pytest.raises(PolicyError, match="keyframe_every"):
        save_state(run.accelerator, keyframe_every=4)


def test_an_engine_that_keeps_its_state_is_refused(tmp_path: Path) -> None:
    run = loop(tmp_path)
    run.accelerator.state._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    for call in (save_state, load_state):
        with pytest.raises(PolicyError, match="DEEPSPEED"):
            call(run.accelerator)


@pytest.mark.parametrize("seedable", [False, True])
def test_batches_come_in_the_same_order_after_an_epoch(tmp_path: Path, seedable: bool) -> None:
    def made(seed: int) -> tuple[Accelerator, DataLoader]:
        accelerate_runs.forget()
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
        torch.manual_seed(seed)
        order = None if seedable else torch.Generator().manual_seed(seed)
        loader = DataLoader(TensorDataset(torch.arange(24)), batch_size=4, shuffle=True, generator=order)
        return accelerator, accelerator.prepare(loader)

    def epoch(loader: DataLoader) -> list:
        return [batch.tolist() for (batch,) in loader]

    accelerator, loader = made(0)
    first = epoch(loader)
    save_state(accelerator, tmp_path / "between")
    next(within := iter(loader))
    save_state(accelerator, tmp_path / "within")
    del within
    load_state(accelerator, tmp_path / "between")
    second = epoch(loader)
    other, loader = made(1)
    assert epoch(loader) != first
    load_state(other, tmp_path / "between")
    assert epoch(loader) == second != first
    if seedable:
        load_state(other, tmp_path / "within")
        assert epoch(loader) == second


def test_a_model_less_than_was_saved_is_refused(tmp_path: Path) -> None:
    run = loop()
    run.accelerator.prepare(nn.Linear(4, 4))
    save_state(run.accelerator, tmp_path / "a")
    run.accelerator._models.pop()
    before = run.state()
    with pytest.raises(MismatchError, match="2 models in the checkpoint"):
        load_state(run.accelerator, tmp_path / "a")
    assert run.state() == before


def test_a_dataloader_that_cannot_be_stored_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = loop()
    monkeypatch.setattr(run.loader, "use_stateful_dataloader", True, raising=False)
    monkeypatch.setattr(run.loader, "state_dict", lambda: {"place": object()}, raising=False)
    with pytest.raises(StateError, match="dataloader 0, "):
        save_state(run.accelerator, tmp_path / "a")


def test_what_lies_beside_numbered_checkpoints_stays(tmp_path: Path) -> None:
    run = loop(tmp_path, limit=1)
    places = tmp_path / "checkpoints"
    (places / "best").mkdir(parents=True)
    (places / "checkpoint_x").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes.txt").write_text("x")
    (places / "checkpoint_0").symlink_to(tmp_path / "elsewhere")
    run.accelerator.project_configuration.iteration = 1
    for _ in range(3):
        save_state(run.accelerator)
    assert {"best", "checkpoint_x", "checkpoint_3"} <= {path.name for path in places.iterdir()}
    assert not {"checkpoint_1", "checkpoint_2"} & {path.name for path in places.iterdir()}
    assert (tmp_path / "elsewhere" / "notes.txt").read_text() == "x"
