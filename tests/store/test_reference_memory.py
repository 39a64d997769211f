"""What a store holds between two saves: of tensors on lattices codes and a sample, in memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.strategies import difference
from torch import nn

from shrinkpoint import Fisher, Store
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, RowSample, as_decoded
from shrinkpoint.errors import StorageError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors.flat_state import flatten


class Training:
    """A model large enough for a sample to be a part of it, and Adam."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(400, 600), nn.Tanh(), nn.Linear(600, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> dict[str, Any]:
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 400)).square().mean().backward()
            self.optimizer.step()
        return self.state()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def held_bytes(store: Store) -> int:
    reference = store.reference
    assert reference is not None
    samples = (sample.values.nbytes for sample in reference.originals.values() if isinstance(sample, RowSample))
    return as_decoded(reference.tensors).nbytes + sum(samples)


def test_a_reference_takes_a_third_of_the_state_and_a_sample() -> None:
    """A byte for each value, and of weights another one, for the points with which their lattices began."""
    training, store, scheme = Training(), Store(MemoryStorage()), Fisher(relative_error=0.3)
    for step in range(3):
        state = training.step()
        store.save(step, state, scheme=scheme)
        raw = flatten(state).nbytes
        assert held_bytes(store) <= 0.345 * raw + 2 * 4 * MAX_SAMPLED_VALUES
    store.load()
    assert held_bytes(store) <= 0.345 * raw


def test_a_checkpoint_does_not_change_with_the_state_that_was_saved() -> None:
    training, store, scheme = Training(), Store(MemoryStorage()), Fisher(relative_error=0.3)
    store.save(0, training.step(), scheme=scheme)
    expected = store.load(0, keep=False)
    store.save(1, training.step(), scheme=scheme)
    assert store.reference is not None
    decoded = {name: tensor.clone() for name, tensor in store.reference.tensors.items()}
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.step()
    assert all(torch.equal(store.reference.tensors[name], tensor) for name, tensor in decoded.items())
    assert difference(store.load(0, keep=False), expected) is None


def test_what_is_loaded_may_be_changed_and_the_next_delta_still_loads() -> None:
    training, store, scheme = Training(), Store(MemoryStorage()), Fisher(relative_error=0.3)
    store.save(0, training.step(), scheme=scheme)
    live = store.load()
    for tensor in flatten(live).tensors.values():
        tensor.zero_()
    store.save(1, training.step(), scheme=scheme)
    assert store.manifest(1).depth == 1
    assert store.verify(deep=True) == []
    reference = store.reference
    assert reference is not None
    loaded = flatten(Store(store.storage).load(1)).tensors
    assert all(torch.equal(loaded[name], reference.tensors[name]) for name in loaded)


class FullStorage(MemoryStorage):
    """Refuses new files while it is full."""

    is_full = False

    def create(self, key: str) -> Any:
        if self.is_full:
            raise StorageError(key, found="no space left", expected="room", do="make room")
        return super().create(key)


def test_a_save_that_fails_leaves_the_reference_of_the_next_delta() -> None:
    training, storage, scheme = Training(), FullStorage(), Fisher(relative_error=0.3)
    store = Store(storage)
    store.save(0, training.step(), scheme=scheme)
    storage.is_full = True
    with pytest.raises(StorageError):
        store.save(1, training.step(), scheme=scheme)
    storage.is_full = False
    store.save(2, training.step(), scheme=scheme)
    assert store.manifest(2).bases[-1].step == 0 and store.verify(deep=True) == []
