"""A training loop is saved, found again, and told what did not fit or did not load."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faulty_storage import FaultyStorage
from helpers.strategies import difference, same
from torch import nn

from shrinkpoint.errors import (
    FormatError,
    LockedError,
    MismatchError,
    NotFoundError,
    PolicyError,
    StateError,
    StorageError,
)
from shrinkpoint.schemes import Fisher
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.store import Keep
from shrinkpoint.train import CheckpointManager


class Loop:
    """A model with all that belongs to it, after a few steps."""

    def __init__(self, width: int = 5, steps: int = 2) -> None:
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def copy(self) -> Any:
        return {
            name: {key: _copied(value) for key, value in part.state_dict().items()} for name, part in self.parts.items()
        }


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("background", [False, True])
def test_everything_comes_back(tmp_path: Path, background: bool) -> None:
    loop, extra = Loop(), {"epoch": 3, "order": torch.randperm(5), "name": ("run", None)}
    with CheckpointManager(tmp_path, background=background) as manager:
        returned = manager.save(7, **loop.parts, extra=extra, metrics={"val_loss": torch.tensor(1.5)})
        report = manager.wait()
        assert report is not None and report.keyframe and manager.stall_seconds > 0
        assert returned is not None and str(returned) == str(report)
    saved, other = loop.copy(), Loop(steps=0)
    at = CheckpointManager(tmp_path).restore(**other.parts)
    assert at is not None
    assert (at.step, at.metrics, at.skipped) == (7, {"val_loss": 1.5}, ())
    assert difference(at.extra, extra) is None
    assert difference(saved, other.copy()) is None
    assert at.report.raw_bytes == report.raw_bytes


@pytest.mark.parametrize("background", [False, True])
def test_a_manifest_says_how_long_writing_took_and_the_loop_waited(tmp_path: Path, background: bool) -> None:
    loop, scheme = Loop(width=2000), Fisher(relative_error=0.3)
    with CheckpointManager(tmp_path, scheme=scheme, background=background) as manager:
        for step in (1, 2):
            loop.step()
            manager.save(step, **loop.parts)
            report = manager.wait()
            stall, stats = manager.stall_seconds, manager.store.manifest(step).stats
            assert report is not None and stats["seconds"] == pytest.approx(report.seconds, abs=1e-6)
            assert 0 < stats["stall"] <= stall + 1e-6
            assert stats.get("retention") == (None if report.retention is None else round(report.retention, 6))
    assert "retention" in stats


def test_an_empty_store_restores_nothing(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "none").restore(**Loop().parts) is None


def test_training_on_after_a_restore_does_not_spoil_the_next_delta(tmp_path: Path) -> None:
    loop = Loop()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, **loop.parts)
    with CheckpointManager(tmp_path) as manager:
        manager.restore(**loop.parts)
        loop.step()  # the optimizer steps in the very tensors that restore gave it
        report = manager.save(2, **loop.parts)
        assert report is not None and not report.keyframe
    saved, other = loop.copy(), Loop(steps=0)
    assert CheckpointManager(tmp_path).restore(**other.parts) is not None
    assert same(saved, other.copy())


def test_a_damaged_newest_checkpoint_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, **loop.parts)
        first = loop.copy()
        loop.step()
        manager.save(2, **loop.parts)
    flip(tmp_path / "step-000000002" / "rank-00000.safetensors")
    manager = CheckpointManager(tmp_path)
    at = manager.restore(**loop.parts)
    assert at is not None and at.step == 1
    assert [skip.step for skip in at.skipped] == [2]
    assert "rank-00000" in at.skipped[0].reason
    assert f"step 2 is passed over: {at.skipped[0].reason}" in caplog.messages
    assert same(first, loop.copy())
    with pytest.raises(FormatError):
        manager.restore(2, **loop.parts)
    with pytest.raises(NotFoundError):
        manager.restore(3, **loop.parts)


def test_when_nothing_loads_that_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, **Loop().parts)
    flip(tmp_path / "step-000000001" / "manifest.json", 20)
    with pytest.raises(NotFoundError, match="step 1"):
        CheckpointManager(tmp_path).restore(**Loop().parts)


def _frozen_batchnorm(loop: Loop) -> None:
    loop.model[1] = nn.Identity()


def _other_groups(loop: Loop) -> None:
    first, *rest = loop.model.parameters()
    loop.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_frozen_batchnorm, "that the model lacks"),
        (_other_groups, "groups of"),
        (lambda loop: loop.__init__(width=6), "Build the model with the settings"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path, change: Any, message: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, **Loop().parts)
    other = Loop()
    change(other)
    before, generator = other.copy(), torch.get_rng_state()
    with pytest.raises(MismatchError, match=message):
        CheckpointManager(tmp_path).restore(**other.parts)
    assert same(before, other.copy())
    assert torch.equal(generator, torch.get_rng_state())


def test_what_was_not_saved_cannot_be_restored_unless_asked_leniently(tmp_path: Path) -> None:
    loop = Loop()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=loop.model)
    with pytest.raises(MismatchError, match="optimizer"):
        CheckpointManager(tmp_path).restore(**loop.parts)
    before = loop.copy()["optimizer"]
    assert CheckpointManager(tmp_path).restore(**loop.parts, strict=False) is not None
    assert same(before, loop.copy()["optimizer"])


def test_several_models_and_other_objects(tmp_path: Path) -> None:
    one, two, three = Loop(), Loop(), Loop()
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            1, model={"g": one.model, "d": two.model}, optimizer=[one.optimizer, two.optimizer], ema=three.model
        )
    saved = [loop.copy()["model"] for loop in (one, two, three)]
    others = [Loop(), Loop(), Loop()]
    CheckpointManager(tmp_path).restore(
        model={"g": others[0].model, "d": others[1].model},
        optimizer=(others[0].optimizer, others[1].optimizer),
        ema=others[2].model,
    )
    assert same(saved, [loop.copy()["model"] for loop in others])
    with pytest.raises(MismatchError, match="'g', 'd'"):
        CheckpointManager(tmp_path).restore(model={"g": others[0].model})


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, partial(torch.compile, backend="eager")], ids=["parallel", "compiled"]
)
def test_wrapped_and_compiled_modules_are_saved_as_they_are(tmp_path: Path, wrap: Any) -> None:
    inner = nn.Linear(2, 2)
    wrapped = wrap(inner)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=wrapped)
        weight = inner.weight.detach().clone()
        nn.init.zeros_(inner.weight)
        manager.restore(model=wrapped)
    assert torch.equal(inner.weight, weight)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": -1}, PolicyError),
        ({"model": 3}, PolicyError),
        ({"model": torch.nn.Linear(2, 2).state_dict()}, PolicyError),
        ({"optimizer": torch.optim.AdamW}, PolicyError),
        ({"extra": bytearray(2)}, StateError),
        ({"metrics": {"loss": "low"}}, PolicyError),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_wrong_request_is_refused_by_the_call_itself(
    tmp_path: Path, background: bool, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with CheckpointManager(tmp_path, background=background) as manager:
        with pytest.raises(error):
            manager.save(**{"step": 1, **arguments})
        manager.save(1, extra=1)
    assert CheckpointManager(tmp_path).store.steps() == [1]


def test_unknown_schemes_and_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="'lossless'"):
        CheckpointManager(tmp_path, scheme="magic")
    with pytest.raises(PolicyError, match="what restore returns"):
        CheckpointManager(tmp_path).restore(extra={})


def test_two_managers_of_one_process_do_not_mix_either(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, extra=1)
        with pytest.raises(LockedError, match=r"this process is saving here already.*Close\(\) the manager"):
            CheckpointManager(tmp_path).save(2, extra=2)


def test_a_failing_store_leaves_what_was_there(tmp_path: Path) -> None:
    loop, storage = Loop(), FaultyStorage(LocalStorage(tmp_path))
    manager = CheckpointManager(storage)
    manager.save(1, **loop.parts)
    saved, began = loop.copy(), storage.calls
    loop.step()
    manager.save(2, **loop.parts)
    for call in range(1, storage.calls - began + 1):
        storage.fail_at = storage.calls + call
        loop.step()
        try:
            manager.save(2 + call, **loop.parts)
        except StorageError:
            storage.fail_at = 0
        assert manager.restore(1, **Loop().parts) is not None
    manager.save(1000, **loop.parts)
    saved = loop.copy()
    manager.close()
    assert CheckpointManager(tmp_path).restore(**loop.parts).step == 1000
    assert same(saved, loop.copy())


def test_a_manager_can_be_used_again_after_close() -> None:
    manager = CheckpointManager(MemoryStorage())
    for step in range(3):
        manager.save(step, extra=step)
        manager.close()
        manager.close()
    assert manager.restore().extra == 2


def test_the_best_and_the_latest_are_found_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    keep = Keep(last=9, best=1, metric="score", mode="max")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        assert (manager.latest_step(), manager.best_step()) == (None, None)
        for step, score in enumerate([0.1, 0.7, 0.7, math.nan, 0.2]):
            model.weight.data.fill_(step)
            manager.save(step, model=model, metrics={"score": score, "val_loss": score})
        assert (manager.latest_step(), manager.best_step(), manager.best_step("val_loss")) == (4, 2, 0)
        assert manager.best_step("val_loss", "max") == 2 and manager.best_step("other") is None
        for name, step in (("best", 2), ("latest", 4)):
            restored = manager.restore(name, model=model)
            assert restored is not None and restored.step == step and (model.weight == step).all()
        manager.restore("best", model=model)
        manager.save(3, model=model, metrics={"score": 0.3})
        assert (manager.latest_step(), manager.best_step()) == (3, 2)


def test_what_is_no_step_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, metrics={"loss": 1.0})
        with pytest.raises(PolicyError, match="'latest' or 'best'"):
            manager.restore("newest", model=model)
        with pytest.raises(NotFoundError, match="no best checkpoint"):
            manager.restore("best", model=model)
        with pytest.raises(PolicyError, match="mode"):
            manager.best_step("loss", "lowest")


@pytest.mark.parametrize("background", [False, True])
def test_a_pickled_or_copied_manager_saves_when_the_first_one_has_ended(tmp_path, background):
    model = nn.Linear(64, 64)
    manager = CheckpointManager(tmp_path / "run", background=background, mirror=tmp_path / "mirror")
    manager.save(1, model=model)
    manager.flush()
    copies = pickle.loads(pickle.dumps(manager)), copy.deepcopy(manager)
    for other in copies:
        with pytest.raises(LockedError):
            other.save(2, model=model)
    manager.close()
    for step, other in zip((2, 3), copies, strict=True):
        other.save(step, model=model)
        other.flush()
        assert manager.restore(model=model).step == other.mirror.restore().step == step
        other.close()


def test_a_model_and_an_optimizer_that_are_exchanged_are_refused(tmp_path):
    loop = Loop()
    with CheckpointManager(tmp_path) as manager:
        for parts, expected in (
            ({"model": loop.optimizer}, "model: .*AdamW; expected a module"),
            ({"model": {"a": loop.model, "b": loop.optimizer}}, "model: .*AdamW; expected a module"),
            ({"optimizer": [loop.model]}, "optimizer: .*Sequential; expected an optimizer. Pass it as model="),
        ):
            for call in (partial(manager.save, 1), manager.restore):
                with pytest.raises(PolicyError, match=expected):
                    call(**parts)
        assert manager.store.steps() == []
