"""States of very many small tensors: what they cost grows as their number does, and no more than a name or two each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import shrinkpoint as sp

FIXED = 8
"""Bytes that a tensor costs in the index (docs/format.md)."""


def randn(count: int, *shape: int) -> torch.Tensor:
    return torch.randn((count, *shape), generator=torch.Generator().manual_seed(count))


def floats(count: int) -> dict[str, Any]:
    return {f"layers.{i}.weight": row.clone() for i, row in enumerate(randn(count, 4))}


def noise(count: int) -> dict[str, Any]:
    bits = torch.randint(0, 256, (count, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return {f"layers.{i}.weight": row.clone() for i, row in enumerate(bits)}


def mixed(count: int) -> dict[str, Any]:
    rows = randn(count // 2, 4)
    return {
        "master": {f"{i}.weight": row.clone() for i, row in enumerate(rows)},
        "model": {f"{i}.weight": row.bfloat16() for i, row in enumerate(rows)},
    }


def unrelated(count: int) -> dict[str, Any]:
    return {
        "master": {f"{i}.weight": row.clone() for i, row in enumerate(randn(count // 2, 4))},
        "model": {f"{i}.weight": row.bfloat16() for i, row in enumerate(randn(count // 2 + 1, 4))},
    }


def zero_headed(count: int) -> dict[str, Any]:
    rows = torch.zeros(count, 80)
    rows[:, 70:] = randn(count, 10)
    return {f"layers.{i}.weight": row.clone() for i, row in enumerate(rows)}


def adam(count: int) -> dict[str, Any]:
    rows = randn(count, 4)
    third = count // 3
    model = {str(i): {"weight": rows[i].clone()} for i in range(third)}  # each in a nest of its own
    state = {
        i: {"step": torch.tensor(3.0), "exp_avg": rows[third + i].clone(), "exp_avg_sq": rows[2 * third + i] ** 2}
        for i in range(third)
    }
    return {"model": model, "optimizer": {"state": state, "param_groups": [{"lr": 1.0, "params": [*range(third)]}]}}


STATES = {
    state_factory.__name__: state_factory for state_factory in (floats, noise, mixed, unrelated, zero_headed, adam)
}


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, native ones too: a measure of work that no other process changes."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("make", STATES.values(), ids=STATES.keys())
def test_twice_as_many_tensors_take_twice_as_many_steps(tmp_path: Path, make: Callable[[int], Any]) -> None:
    work: dict[str, list[int]] = {"save": [], "load": []}
    sp.save(make(30), tmp_path / "warm")
    for count in (1200, 2400, 4800):
        state, path = make(count), tmp_path / str(count)
        work["save"].append(calls(lambda state=state, path=path: sp.save(state, path, threads=1)))
        work["load"].append(calls(lambda path=path: sp.load(path, threads=1)))
    for small, middle, large in work.values():
        assert large - middle < 2.3 * (middle - small) + 2000  # of what grows with the number; its square would be 4


@pytest.mark.parametrize("make", STATES.values(), ids=STATES.keys())
def test_a_small_tensor_costs_some_bytes_beside_its_values(tmp_path: Path, make: Callable[[int], Any]) -> None:
    state = make(3000)
    report = sp.save(state, tmp_path / "a")
    tensors = sp.inspect(tmp_path / "a").tensors
    size = (tmp_path / "a").stat().st_size
    assert size <= 1.001 * report.raw_bytes + FIXED * len(tensors) + 4096


def test_many_tensors_of_noise_share_a_record_and_few_do_not(tmp_path: Path) -> None:
    few, many = noise(100), noise(2000)
    sp.save(few, tmp_path / "few")
    sp.save(many, tmp_path / "many")
    with safe_open(tmp_path / "few", framework="pt") as file:
        assert torch.equal(file.get_tensor("layers.7.weight"), few["layers.7.weight"])
    with safe_open(tmp_path / "many", framework="pt") as file:
        assert len(file.keys()) == 3  # the bytes of all, the marker and the index
    assert all(torch.equal(value, many[name]) for name, value in sp.load(tmp_path / "many").items())


def test_tensors_of_one_record_have_memory_of_their_own(tmp_path: Path) -> None:
    for make in (floats, noise):
        sp.save(make(2000), tmp_path / "a")
        loaded = [*sp.load(tmp_path / "a").values()]
        assert {x.untyped_storage().nbytes() for x in loaded} == {loaded[0].nbytes}
        assert len({x.untyped_storage().data_ptr() for x in loaded}) == 2000
