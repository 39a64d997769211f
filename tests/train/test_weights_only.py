"""A run whose older checkpoints keep weights only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.strategies import difference
from torch import nn

from shrinkpoint.errors import MismatchError, NotFoundError
from shrinkpoint.store import Keep, Store
from shrinkpoint.train import CheckpointManager

STEPS = 9
KEEP = Keep(last=5, moments_last=2)


class Run:
    """A training loop of a few steps, and the weights of each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(20, 30)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.weights: dict[int, torch.Tensor] = {}

    def train(self, manager: CheckpointManager, steps: range) -> None:
        for step in steps:
            self.model(torch.randn(4, 20)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.weights[step] = self.model.weight.detach().clone()
            manager.save(step, model=self.model, optimizer=self.optimizer, extra={"epoch": step})
        manager.wait()


@pytest.fixture(params=[False, True], ids=["in the loop", "background"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    run = Run()
    with CheckpointManager(tmp_path, keep=KEEP, keyframe_every=3, background=request.param) as manager:
        manager.store.chain_limit.keep = None  # so small states would not be in chains
        run.train(manager, range(STEPS))
    return run


def test_chains_that_have_ended_lose_their_moments(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path)
    weights_only = {manifest.step: manifest.weights_only for manifest in store.list()}
    assert weights_only == {3: True, 4: True, 5: True, 6: False, 7: False, 8: False}
    for step in store.steps():
        state = store.load(step)
        assert torch.equal(state["model"]["weight"], run.weights[step])
        assert bool(state["optimizer"]["state"]) is not weights_only[step]
        assert state["extra"] == {"epoch": step}
    assert store.verify(deep=True) == []


def test_an_optimizer_is_not_restored_from_weights_only(run: Run, tmp_path: Path) -> None:
    manager, other = CheckpointManager(tmp_path), Run()
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    for objects in ({"optimizer": other.optimizer}, {"model": other.model, "more": [other.optimizer]}):
        with pytest.raises(MismatchError, match=r"step 5: weights only.*one of 6, 7, 8 has.*leave the optimizer out"):
            manager.restore(5, strict=False, **objects)
    with pytest.raises(MismatchError, match="step 5: weights only"):
        manager.restore(5, model=other.model, optimizer=other.optimizer, only=["weight"])
    assert difference(dict(other.model.state_dict()), before) is None


@pytest.mark.parametrize("only", [None, ["weight"]])
def test_weights_are_restored_from_weights_only(run: Run, tmp_path: Path, only: list[str] | None) -> None:
    other = Run()
    with CheckpointManager(tmp_path) as manager:
        result = manager.restore(5, model=other.model, only=only)
        assert result is not None and result.manifest is not None and result.manifest.weights_only
        assert torch.equal(other.model.weight, run.weights[5])
        other.train(manager, range(20, 22))  # fine-tuning: a delta against weights has moments of its own
    state = Store(tmp_path).load(21)
    assert torch.equal(state["model"]["weight"], other.weights[21])
    assert state["optimizer"]["state"]
    assert Store(tmp_path).verify(deep=True) == []


def test_a_restore_of_the_newest_passes_over_weights_only_and_says_why(run: Run, tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for step in (6, 7, 8):
            store.forget(step)
    other, manager = Run(), CheckpointManager(tmp_path)
    with pytest.raises(NotFoundError, match="step 5: weights only"):
        manager.restore(model=other.model, optimizer=other.optimizer)
    result = manager.restore(model=other.model)
    assert result is not None and result.step == 5
    assert torch.equal(other.model.weight, run.weights[5])


def test_training_goes_on_from_a_restored_run_under_the_same_rules(run: Run, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=KEEP, keyframe_every=3) as manager:
        assert manager.restore(model=run.model, optimizer=run.optimizer) is not None
        run.train(manager, range(STEPS, STEPS + 6))
    store = Store(tmp_path)
    assert [manifest.step for manifest in store.list() if not manifest.weights_only][-2:] == [13, 14]
    for step in store.steps():
        assert torch.equal(store.load(step)["model"]["weight"], run.weights[step])
    assert store.verify(deep=True) == []
