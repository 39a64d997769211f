"""What a state dict may hold, and what is known of it by its names."""

from __future__ import annotations

import io
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.multi_rank_training import Run, save
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shrinkpoint import errors
from shrinkpoint.container import FileReader as FileReader
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import directory as directories
from shrinkpoint.tensors.info import Role
from shrinkpoint.train.dcp import Reader, Writer, load, reset_chains

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def anew() -> None:
    reset_chains()


VALUES = {
    "none": None,
    "flag": True,
    "count": 2**70,
    "ratio": float("nan"),
    "text": "ä/%$",
    "data": b"\0" * 400,
    "pair": (1, "two", [3.0, None]),
    "shape": torch.Size([2, 3]),
    "array": np.arange(5, dtype="f4"),
    "number": np.float64(0.1),
    "tensors": (torch.arange(3), torch.ones(2, dtype=torch.bfloat16)),
    "ordered": OrderedDict(b=1, a=2),
    "rng": np.random.RandomState(3).get_state()[1],
}


def test_keys_that_look_alike_are_two(tmp_path: Path) -> None:
    save({"x": torch.ones(2), "value": ({1: torch.zeros(2), "1": torch.ones(2)},)}, tmp_path)
    (value,) = load(tmp_path)["value"]
    assert [key_value.tolist() for key_value in (value[1], value["1"])] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("name", VALUES)
def test_what_is_no_tensor_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    save({"x": torch.ones(2), "value": (VALUES[name],)}, tmp_path)  # torch leaves tuples in one piece
    state = load(tmp_path)
    target: dict[str, Any] = {"x": torch.zeros(2), "value": None}
    dcp.load(target, storage_reader=Reader(tmp_path))
    for found in (state["value"][0], target["value"][0]):
        assert type(found) is type(VALUES[name])
        assert repr(found) == repr(VALUES[name])


class Thing:
    """Something of the user's own."""


@pytest.mark.parametrize("value", [Thing(), {Thing()}, print])
def test_what_cannot_be_stored_is_an_error_that_names_it(value: Any, tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"model": {"x": torch.ones(2)}, "extra": {"odd": value}}, storage_writer=Writer(tmp_path))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, errors.StateError)
    assert "extra.odd" in error.where
    assert not directories.is_checkpoint(tmp_path)


def test_moments_are_found_by_name_in_every_flattening(tmp_path: Path) -> None:
    run = Run(None)
    run.train()
    kinds = {}
    numbered = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    flat = dcp.state_dict.get_state_dict(
        run.model, run.optimizer, options=dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    )
    for name, state in {"nested": run.state(), "flat": {"model": flat[0], "optim": flat[1]}, "plain": numbered}.items():
        save(state, tmp_path / name)
        infos = _infos(tmp_path / name)
        kinds[name] = sorted(info.role.value for info in infos.values())
        assert infos["model.first.weight"].role is Role.PARAMETER
    assert kinds["nested"] == kinds["flat"] == kinds["plain"]
    assert kinds["nested"].count("moment2") == 6
    assert kinds["nested"].count("parameter") == 6


def _infos(folder: Path, name: str = "rank-00000.safetensors") -> dict[str, Any]:
    with LocalStorage(folder).open(name) as source:
        return {info.name: info for head in FileReader(source, name).records for info in head.infos}


def test_moments_serve_as_context_as_they_do_for_a_manager(tmp_path: Path) -> None:
    run = Run(None)
    run.train(5)
    linked = save(run.state(), tmp_path / "a")
    unlinked = save({f"x{i}": x for i, x in enumerate(_tensors(run.state()))}, tmp_path / "b")
    assert linked.stored_bytes < unlinked.stored_bytes


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [x for value in state.values() for x in _tensors(value)]
    return [state] if isinstance(state, torch.Tensor) else []


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


DTYPES += [torch.complex64, torch.float8_e4m3fn]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
def test_tensors_of_any_dtype_and_shape_come_back(kinds: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for index, (dtype, shape) in enumerate(kinds):
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
        state[f"x/{index}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        save(state, Path(folder))
        found = load(folder)
        dcp.load(target := {name: torch.zeros_like(x) for name, x in state.items()}, storage_reader=Reader(folder))
    for name, x in state.items():
        for y in (found[name], target[name]):
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            assert bytes(y.reshape(-1).view(torch.uint8).numpy()) == bytes(x.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("fqn", ["$t", "$d", "~same", "__metadata__", "a/b", "ä", "\ud800", "%", " "])
def test_any_name_will_do(fqn: str, tmp_path: Path) -> None:
    state = {fqn: torch.arange(3), f"{fqn}!": "text"}
    save(state, tmp_path)
    assert load(tmp_path)[fqn].tolist() == [0, 1, 2]
    assert load(tmp_path)[f"{fqn}!"] == "text"


def test_equal_tensors_are_stored_once(tmp_path: Path) -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(1))
    once = save({"a": x}, tmp_path / "a").stored_bytes
    assert save({"a": x, "b": x, "c": x.clone()}, tmp_path / "b").stored_bytes < once + 2000


def test_a_planner_that_gives_something_else_is_found_out(tmp_path: Path) -> None:
    class Odd(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return io.BytesIO(b"") if write_item.index.fqn == "x" else super().resolve_data(write_item)

    with pytest.raises(dcp.api.CheckpointException, match="'x'"):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path), planner=Odd())
