"""Chains whose values have gains: what a save writes, every way of reading gives, and writing it again leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adam_states import adam, normal
from helpers.small_training import Silent
from helpers.strategies import bits
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.store.chain import store_chain
from shrinkpoint.store.partial_reader import PartialReader

SHAPES = {"a.weight": (96, 64), "b.weight": (64, 96), "b.bias": (64,)}
STEPS = 5


def weights_at(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights that drift, each in a direction of its own, and shake."""
    return {
        name: sum(by * normal(*shape, seed=seed) for by, seed in ((1, i), (0.03 * step, 50 + i), (0.01, 99 * step))).to(
            dtype
        )
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def gains(store: sp.Store) -> list[float]:
    assert store.reference is not None
    return [x.gain for x in store.reference.quantized.values() if isinstance(x, LatticeTensor) and x.origin is not None]


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> tuple[Path, dict[int, dict[str, Tensor]]]:
    """A store, and what its checkpoints decoded to when they were written."""
    place, expected = tmp_path_factory.mktemp("gains"), {}
    with Silent(), sp.Store(place) as store:
        scheme = sp.Fisher(relative_error=0.3)
        for step in range(STEPS):
            report = store.save(step, adam(weights_at(step)), scheme=scheme)
            assert report.keyframe is (step == 0)
            assert store.reference is not None
            expected[step] = {n: store.reference.tensors[f"model/{n}"].clone() for n in SHAPES}
            assert bool(gains(store)) is (step > 0)
        assert max(gains(store)) > 1.05
        assert report.loss_report["tried"][-1]["hold"] > 0.5
    return place, expected


def test_every_checkpoint_loads_as_it_was_written(chain):
    place, expected = chain
    with sp.Store(place) as store:
        assert store.verify(deep=True) == []
        for step, model in expected.items():
            loaded = store.load(step)["model"]
            assert all(bits(loaded[name]) == bits(x) for name, x in model.items())


def test_a_part_of_a_tensor_is_read_from_a_chain_with_gains(chain):
    place, expected = chain
    with sp.Store(place) as store:
        places = [place / file.keys[0] for file in store_chain(store.storage, store.manifest(STEPS - 1))]
        with PartialReader(places) as reader:
            box = reader.read("model/a.weight", (10, 3), (7, 50))
            assert bits(box) == bits(expected[STEPS - 1]["a.weight"][10:17, 3:53].contiguous())
            whole = reader.read("model/b.weight", (0, 0), SHAPES["b.weight"])
            assert bits(whole) == bits(expected[STEPS - 1]["b.weight"])


def test_a_chain_that_is_written_again_has_the_same_values(chain, tmp_path):
    _, expected = chain
    with sp.Store(tmp_path) as store:
        scheme = sp.Fisher(relative_error=0.3)
        with Silent():
            for step in range(STEPS):
                store.save(step, adam(weights_at(step)), scheme=scheme)
        for kept, prune in (([0, 2, 4], sp.Keep(every=2)), ([4], sp.Keep(last=1))):  # without a parent, the keyframe
            store.prune(prune, dry_run=False, compact=True)
            assert store.steps() == kept
            for step in kept:
                loaded = sp.Store(tmp_path).load(step)["model"]
                assert all(bits(loaded[name]) == bits(x) for name, x in expected[step].items())
            assert store.verify(deep=True) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_have_gains_as_well(dtype, tmp_path):
    with Silent(), sp.Store(tmp_path) as store:
        scheme, expected = sp.Fisher(relative_error=0.3), {}
        for step in range(4):
            store.save(step, adam(weights_at(step, dtype)), scheme=scheme)
            assert store.reference is not None
            expected[step] = {n: store.reference.tensors[f"model/{n}"].clone() for n in SHAPES}
        assert max(gains(store)) > 1.05
    for step, model in expected.items():
        loaded = sp.Store(tmp_path).load(step)["model"]
        assert all(bits(loaded[name]) == bits(x) for name, x in model.items())


def test_after_a_restore_and_without_a_parent_a_new_origin_begins(tmp_path):
    with Silent(), sp.Store(tmp_path, keyframe_every=4) as store:
        scheme = sp.Fisher(relative_error=0.3)
        for step in range(6):
            if step == 2:
                scheme.resume(store.manifest(1).loss, 1)
            store.save(step, adam(weights_at(step)), scheme=scheme, lossy_restores=int(step > 1))
            assert bool(gains(store)) is (step in (1, 3, 5)), step


class Part:
    """An object of a training loop that has a state."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state


@pytest.mark.parametrize("background", [False, True])
def test_a_manager_begins_a_new_origin_at_a_keyframe(background):
    model, optimizer, storage = Part(), Part(), sp.storage.MemoryStorage()
    scheme, sizes = sp.Fisher(relative_error=0.3), []
    with Silent(), sp.CheckpointManager(storage, scheme=scheme, keyframe_every=4, background=background) as manager:
        for step in range(9):
            state = adam(weights_at(step))
            model.state, optimizer.state = state["model"], state["optimizer"]
            report = manager.save(step, model=model, optimizer=optimizer)
            assert report.keyframe is (step % 4 == 0)
            sizes.append(report.stored_bytes)
            manager.wait()
            assert bool(gains(manager.store)) is (step % 4 > 0)
    assert max(sizes[4], sizes[8]) < 1.05 * sizes[0]


def test_what_has_not_moved_since_it_was_restored_keeps_its_value_through_keyframes(tmp_path):
    """A backbone that was trained, and then frozen: its values are points with a gain."""
    with Silent(), sp.Store(tmp_path, keyframe_every=5) as store:
        scheme = sp.Fisher(relative_error=0.3)
        for step in range(3):
            store.save(step, adam(weights_at(step)), scheme=scheme)
        frozen = store.load(2)["model"]
        scheme.resume(store.manifest(2).loss, 1)
        for step in range(3, 8):
            now = {**weights_at(step), "a.weight": frozen["a.weight"]}
            report = store.save(step, adam(now), scheme=scheme, lossy_restores=1)
            assert report.keyframe is (step == 5)
            assert bits(sp.Store(tmp_path).load(step)["model"]["a.weight"]) == bits(frozen["a.weight"])


def test_codes_of_the_origin_are_held_once():
    store, scheme = sp.Store(sp.storage.MemoryStorage()), sp.Fisher(relative_error=0.3)
    origins = []
    with Silent():
        for step in range(4):
            store.save(step, adam(weights_at(step)), scheme=scheme)
            assert store.reference is not None
            held = store.reference.quantized["model/a.weight"]
            assert isinstance(held, LatticeTensor)
            origins.append(held.first_codes.data_ptr())
    assert len({*origins}) == 1
