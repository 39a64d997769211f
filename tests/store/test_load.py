"""`load` takes a state, or a part of it, from wherever it lies, and decodes no more than the part needs."""

from __future__ import annotations

import warnings
from collections import Counter
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.strategies import difference, states
from hypothesis import given, settings
from torch import nn
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.cli.console import ExitCode
from shrinkpoint.errors import CorruptError, NotFoundError, PolicyError, StorageError
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.store import decode
from shrinkpoint.store.partial_reader import PartialReader
from shrinkpoint.sync import Publisher, Subscriber
from shrinkpoint.tensors.names import named_leaves
from shrinkpoint.tensors.nest import iter_tensors
from shrinkpoint.train import Checkpointer, dcp


def trained(storage: Any, saves: int = 3, scheme: str = "lossless") -> list[dict[str, Any]]:
    """A run of Adam in a store; the states as they load."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with sp.Store(storage) as store:
        for step in range(saves):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(16, 60)).square().mean().backward()
                optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": {"epoch": step}}
            store.save(step, state, scheme=scheme)
        return [store.load(step) for step in range(saves)]


@pytest.mark.parametrize("scheme", ["lossless", "fisher(relative_error=.3)", "excp", "lc-checkpoint"])
def test_a_part_has_the_bits_that_the_whole_has(tmp_path, scheme):
    states = trained(tmp_path / "run", scheme=scheme)
    for step, state in enumerate(states):
        assert difference(sp.load(tmp_path / "run", step=step), state) is None
        model, second = state["model"], state["optimizer"]["state"][1]["exp_avg_sq"]
        biases = {name: tensor for name, tensor in model.items() if "bias" in name}
        for only, expected in (
            ("model.*", {"model": model}),
            ("model", {"model": model}),
            ("model/2.weight", {"model": {"2.weight": model["2.weight"]}}),
            (["extra*", "*.bias"], {"model": biases, "extra": state["extra"]}),
            ("optimizer.state.1.exp_avg_sq", {"optimizer": {"state": {1: {"exp_avg_sq": second}}}}),
            ("*", state),
        ):
            part = sp.load(tmp_path / "run", step=step, only=only)
            assert difference(named_leaves(part), named_leaves(expected)) is None, only
    assert difference(sp.load(tmp_path / "run"), states[-1]) is None


@settings(max_examples=30)
@given(states())
def test_any_leaf_of_any_nest_can_be_loaded_alone(state):
    storage = MemoryStorage()
    with sp.Store(storage) as store:
        store.save(1, state)
    leaves = named_leaves(store.load(1))
    for name in [*leaves][:5]:
        if "%" in name:  # a name that several leaves may have, or that is not what the keys say
            continue
        part = named_leaves(sp.load(storage, only=escape(name)))
        assert [*part.values()], name
        assert any(difference(value, leaves[name]) is None for value in part.values())


def test_only_what_a_part_needs_is_decoded(tmp_path, monkeypatch):
    trained(tmp_path / "run", scheme="fisher(relative_error=.3)")
    decoded, original = Counter[str](), decode.decode_records

    def counted(reader: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(reader, *args, **kwargs)
        decoded.update(result.reference.tensors)
        return result

    monkeypatch.setattr("shrinkpoint.store.decode.decode_records", counted)
    sp.load(tmp_path / "run", only="extra")
    assert not decoded
    sp.load(tmp_path / "run", step=0, only="model.0.weight")
    assert "model/0.weight" in decoded and all(name.startswith("model/") for name in decoded)
    decoded.clear()
    sp.load(tmp_path / "run", only="optimizer.state.0.step")
    assert not any(name.startswith("model/") for name in decoded)


def test_damage_elsewhere_does_not_concern_a_part(tmp_path):
    state = {"model": {"w.weight": torch.randn(300, 40)}, "optimizer": {"m": torch.randn(300, 40)}}
    sp.save(state, tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    found = set()
    for place in range(len(data) // 4, len(data), len(data) // 8):
        (tmp_path / "b").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CorruptError):
            sp.load(tmp_path / "b")
        for only in ("model", "optimizer"):
            try:
                part = sp.load(tmp_path / "b", only=only)
            except CorruptError:
                continue
            found.add(only)
            assert difference(part, {only: state[only]}) is None
    assert found == {"model", "optimizer"}


def test_a_part_takes_no_memory_for_the_rest(tmp_path):
    sp.save({"small": torch.arange(1, 4), "large": torch.randn(1000, 50)}, tmp_path / "a")
    with pytest.raises(CorruptError, match="at most"):
        sp.load(tmp_path / "a", max_bytes=1000)
    assert sp.load(tmp_path / "a", max_bytes=1000, only="small")["small"].tolist() == [1, 2, 3]


def test_items_of_lists_keep_their_values_when_others_go(tmp_path):
    state = {"rows": [torch.full((3,), float(i)) for i in range(4)], "pair": (1, torch.ones(2)), "n": np.arange(3)}
    sp.save(state, tmp_path / "a")
    part = sp.load(tmp_path / "a", only=["rows.[13]", "pair.1", "n"])
    assert [row[0].item() for row in part["rows"]] == [1, 3]
    assert type(part["pair"]) is tuple and part["pair"][0].tolist() == [1, 1]
    assert part["n"].tolist() == [0, 1, 2]


def test_ties_within_a_part_are_kept_or_cut(tmp_path):
    x = torch.randn(30, 40)
    sp.save({"model": {"wte": x, "head": x, "row": x[3]}, "other": x}, tmp_path / "a")
    part = sp.load(tmp_path / "a", only="model")["model"]
    assert part["wte"].data_ptr() == part["head"].data_ptr() and torch.equal(part["row"], x[3])
    assert torch.equal(sp.load(tmp_path / "a", only="other")["other"], x)
    apart = sp.load(tmp_path / "a", only="model", tie=False)["model"]
    assert apart["wte"].data_ptr() != apart["head"].data_ptr()


def test_where_nothing_matches_the_names_that_exist_are_named(tmp_path):
    trained(tmp_path / "run", saves=1)
    with pytest.raises(NotFoundError, match=r"weights.*model/0.weight.*extra/epoch") as caught:
        sp.load(tmp_path / "run", only="weights.*")
    assert "show" in caught.value.do
    for only in ([], [""], 3, ["a", 3]):
        with pytest.raises(PolicyError):
            sp.load(tmp_path / "run", only=only)


def test_a_store_a_run_and_a_checkpoint_directory_are_loaded_by_step(tmp_path):
    trained(tmp_path / "store")
    assert sp.load(tmp_path / "store")["extra"] == {"epoch": 2}
    assert sp.load(LocalStorage(tmp_path / "store"), step=1, only="extra") == {"extra": {"epoch": 1}}
    for step in (5, 10):
        Checkpointer().save(tmp_path / "run" / f"checkpoint-{step}", {"at": step}, step=step)
    assert sp.load(tmp_path / "run") == sp.load(tmp_path / "run" / "checkpoint-10") == {"at": 10}
    assert sp.load(tmp_path / "run", step=5) == {"at": 5}
    for where, options, error, text in (
        (tmp_path / "store", {"step": 7}, NotFoundError, "one of 0, 1, 2"),
        (tmp_path / "run", {"step": 7}, NotFoundError, "one of 5, 10"),
        (tmp_path / "run" / "checkpoint-5", {"step": 10}, NotFoundError, "one of 5"),
        (tmp_path / "store", {"base": tmp_path}, PolicyError, "base"),
        (tmp_path / "file", {"step": 1}, PolicyError, "step"),
    ):
        sp.save({}, tmp_path / "file")
        with pytest.raises(error, match=text):
            sp.load(where, **options)


@pytest.mark.parametrize(
    "name", ["checkpoint-5", "epoch=4-step=10.ckpt", "best", "global_step7", "checkpoints/step-3", "5"]
)
def test_a_run_is_found_by_the_names_of_its_checkpoints(tmp_path, name):
    Checkpointer().save(tmp_path / name, {"at": 1}, step=1)
    assert sp.load(tmp_path) == {"at": 1}


@pytest.mark.parametrize("name", ["mine", "tmp5x/step-3", "gpt/checkpoint-5", "backstep5"])
def test_a_directory_in_which_checkpoints_happen_to_be_is_no_run(tmp_path, name):
    Checkpointer().save(tmp_path / name, {"at": 1}, step=1)
    for options in ({}, {"step": 1}):
        with pytest.raises(NotFoundError, match=f"such as {tmp_path / name}; expected .* Name one of them"):
            sp.load(tmp_path, **options)
    for command in ("show", "diff", "export"):
        others = {"show": [], "diff": [str(tmp_path / name)], "export": [str(tmp_path / "out.pt")]}[command]
        outcome = CliRunner().invoke(app, [command, str(tmp_path), *others], prog_name="shrinkpoint")
        assert outcome.exit_code == ExitCode.NOT_FOUND and f"such as {tmp_path / name}" in outcome.stderr, outcome


def test_the_newest_of_a_run_is_what_was_saved_last(tmp_path):
    writer = Checkpointer()
    for step in (1, 2, 3):
        writer.save(tmp_path / f"step-{step}", {"at": step}, step=step)
    again = Checkpointer()
    again.load(tmp_path / "step-1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.save(tmp_path / "step-2b", {"at": "again"}, step=2)
    assert sp.load(tmp_path) == {"at": "again"}
    assert sp.load(tmp_path, step=2) == {"at": "again"}


@pytest.mark.parametrize("where", ["/", "/..", "sub/.."])
def test_a_path_that_can_only_be_a_directory_is_said_to_be_one(tmp_path, monkeypatch, where):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for call in (sp.inspect, lambda path: sp.save({}, path), lambda path: sp.load(tmp_path / "none", base=path)):
        with pytest.raises(PolicyError, match=f"{where}: a directory; expected the name of a file"):
            call(where)


@pytest.mark.parametrize("step", ["1", 1.0, True, torch.tensor(1.5)])
def test_a_step_that_is_no_whole_number_is_an_error_of_ours(tmp_path, step):
    sp.CheckpointManager(tmp_path).save(1, model=torch.nn.Linear(2, 2))
    for call in (sp.Store(tmp_path).load, sp.Store(tmp_path).manifest, sp.CheckpointManager(tmp_path).restore):
        with pytest.raises(PolicyError, match="a whole number"):
            call(step)
    with pytest.raises(PolicyError, match="a whole number"):
        sp.load(tmp_path, step=step)


def test_names_that_no_file_system_takes_are_errors_of_ours(tmp_path):
    with pytest.raises(StorageError):
        sp.save({}, tmp_path / ("a" * 300))
    for call in (lambda path: sp.save({}, path), sp.load, sp.CheckpointManager):
        with pytest.raises(PolicyError, match="the file system can write"):
            call("\ud800")


def odd_state(seed: int) -> dict[str, Any]:
    """Tensors of few bytes and sizes that are no multiples of 64 bytes, several of each kind, and an optimizer's."""
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=random) for size in (3, 5, 1, 129, 70_001, 17)]
    tensors += [tensor.to(torch.bfloat16) for tensor in tensors] + [tensors[3].clone(), torch.zeros(3), torch.zeros(5)]
    tensors += [tensor.to(torch.uint8) for tensor in tensors[:6]] + [torch.arange(3), torch.arange(5)]
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 5, generator=random)).square().mean().backward()
    optimizer.step()
    trained = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**trained, "tensors": {f"t{index}": tensor for index, tensor in enumerate(tensors)}}


def read_store(path: Path, scheme: str) -> Any:
    with sp.Store(path) as store:
        for step in range(3):
            store.save(step, odd_state(step), scheme=scheme)
        return [store.load(step, tie=tie) for step in range(3) for tie in (True, False)]


def read_parts(path: Path) -> Any:
    read_store(path, "lossless")
    names = [f"tensors.t{index}" for index in range(6)]
    return [sp.load(path), sp.load(path, only="optimizer.*"), *(sp.load(path, only=name) for name in names)]


def read_boxes(path: Path) -> Any:
    sp.save(odd_state(0), path / "state.shrink")
    with PartialReader([path / "state.shrink"]) as reader:
        return [
            reader.read(info.name, (0,) * len(info.shape), tuple(-(-size // 2) for size in info.shape))
            for info in reader.infos.values()
        ]


def read_files(path: Path) -> Any:
    sp.save(odd_state(0), path / "state.shrink")
    sp.save(odd_state(1), path / "delta.shrink", base=path / "state.shrink")
    return [sp.load(path / "state.shrink"), sp.load(path / "delta.shrink")]


def read_directory(path: Path) -> Any:
    checkpointer = Checkpointer()
    for step in range(3):
        checkpointer.save(path / f"step-{step}", odd_state(step))
    return [checkpointer.load(path / "step-2"), sp.load(path / "step-2")]


def read_dcp(path: Path) -> Any:
    state = {**odd_state(0)["tensors"], "object": odd_state(0)["optimizer"]["state"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        torch.distributed.checkpoint.save(state, storage_writer=dcp.Writer(path / "step-0"))
    return dcp.load(path / "step-0")


def read_restored(path: Path) -> Any:
    def parts() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        return {"model": model, "optimizer": optimizer}

    saved, restored = parts(), parts()

    def closure() -> Any:
        saved["optimizer"].zero_grad()
        loss = saved["model"](torch.ones(2, 5)).square().mean()
        loss.backward()
        return loss

    saved["optimizer"].step(closure)
    manager = sp.CheckpointManager(path)
    manager.save(1, **saved, extra=odd_state(0)["tensors"])
    result = manager.restore(**restored)
    return [result.extra, restored["model"].state_dict(), restored["optimizer"].state_dict()]


def read_published(path: Path) -> Any:
    target = {name: torch.zeros_like(tensor) for name, tensor in odd_state(0)["tensors"].items()}
    with Publisher(path) as publisher:
        for step in range(2):
            publisher.publish(odd_state(step)["tensors"])
    Subscriber(path).update(target)
    return target


READERS = {
    "store": lambda path: read_store(path, "lossless"),
    "lossy": lambda path: read_store(path, "fisher(relative_error=.3)"),
    "parts": read_parts,
    "boxes": read_boxes,
    "files": read_files,
    "directory": read_directory,
    "dcp": read_dcp,
    "manager": read_restored,
    "subscriber": read_published,
}


@pytest.mark.parametrize("reader", READERS)
def test_every_tensor_starts_where_torch_would_allocate_it(tmp_path: Path, reader: str):
    tensors = [*iter_tensors(READERS[reader](tmp_path))]
    assert len(tensors) > 10
    assert [tensor.data_ptr() % 64 for tensor in tensors if tensor.numel()] == [0] * len(tensors)


def test_a_base_that_shares_no_tensor_is_left_out_with_a_warning(tmp_path: Path) -> None:
    weights = nn.Linear(64, 64).state_dict()
    sp.save({"model": weights}, tmp_path / "base")
    with pytest.warns(UserWarning, match=r"'model/weight', \[64, 64\], torch.float32 there.*is a keyframe"):
        assert sp.save(weights, tmp_path / "tuned", base=tmp_path / "base").keyframe
    (tmp_path / "base").unlink()
    assert difference(sp.load(tmp_path / "tuned"), weights) is None
