"""A delta is decoded into its parent's memory: the state is the same, takes no second state, and errors stay errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.strategies import difference

import shrinkpoint as sp
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.store import layout
from shrinkpoint.store.chain import store_chain
from shrinkpoint.store.decode import iter_chain


def wide_loop(apart: int, count: int = 4) -> list[Any]:
    """States of a model with tensors of their own records, `apart` steps between saves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(300, 300), torch.nn.Conv1d(300, 90, 3, padding=1), torch.nn.Linear(300, 300)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = []
    for _ in range(count):
        for _ in range(apart):
            optimizer.zero_grad()
            model(torch.randn(300, 300)).square().mean().backward()
            optimizer.step()
        half = {name: x.bfloat16() for name, x in model.state_dict().items()}
        frozen, ids = torch.ones(70_000), torch.arange(80_000) + len(states)
        states.append(
            copy.deepcopy(
                {"model": model.state_dict(), "half": half, "optimizer": optimizer.state_dict(), "x": [frozen, ids]}
            )
        )
    return states


@pytest.mark.parametrize(("apart", "threads"), [(1, 3), (7, 1)])
def test_every_checkpoint_of_a_chain_comes_back(tmp_path: Path, apart: int, threads: int) -> None:
    states = wide_loop(apart)
    with sp.Store(tmp_path, threads=threads) as store:
        for step, state in enumerate(states):
            store.save(step, state)
    with sp.Store(tmp_path, threads=threads) as store:
        for step in (3, 1, 2, 0):
            assert difference(states[step], store.load(step)) is None


def test_files_that_are_decoded_one_after_the_other_all_stay_valid(tmp_path: Path) -> None:
    states = wide_loop(1)
    with sp.Store(tmp_path) as store:
        for step, state in enumerate(states):
            store.save(step, state)
        chain = store_chain(store.storage, store.manifest(3))
        contents = [content.reference for _, content in iter_chain(chain)]
        for content, state in zip(contents, states, strict=True):
            weight = next(name for name in content.tensors if name.endswith("0.weight") and "model" in name)
            assert torch.equal(content.tensors[weight], state["model"]["0.weight"])


def test_a_damaged_copy_is_passed_over_and_damage_without_a_copy_is_an_error(tmp_path: Path) -> None:
    states = wide_loop(2)
    with sp.Store(tmp_path) as store:
        for step, state in enumerate(states):
            store.save(step, state)
        link = next(base for base in store.manifest(3).bases if base.step == 2)
    key = tmp_path / layout.step_dir(3) / link.name
    data = bytearray(key.read_bytes())
    data[-len(data) // 3] ^= 1
    key.unlink()
    key.write_bytes(data)
    with sp.Store(tmp_path) as store:
        assert difference(states[3], store.load(3)) is None
    other = tmp_path / layout.step_dir(2) / link.file
    other.write_bytes(data)
    with sp.Store(tmp_path) as store, pytest.raises(ShrinkpointError):
        store.load(3)
