"""torch.distributed.checkpoint in one process: what is stored, what it stands on, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.multi_rank_training import Run, digest, save, trained
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from shrinkpoint import Fisher, errors
from shrinkpoint.schemes import get_scheme
from shrinkpoint.store import directory as directories
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.train.dcp import Reader, Writer, chain_registry, latest_valid, load, reset_chains
from shrinkpoint.train.dcp.chain_registry import ChainState, RestoreOrigin, find_origin
from shrinkpoint.train.dcp.checkpoint_metadata import report_entries

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def anew() -> None:
    reset_chains()


def restored(folder: Path) -> str:
    run = Run(None, seed=9)
    run.train()
    return digest(run.restore(storage_reader=Reader(folder)))


def test_chains_by_name_do_not_depend_on_paths(tmp_path: Path) -> None:
    run = Run(None)
    save(run.state(), tmp_path / "here", chain="mine")
    assert save(run.state(), tmp_path / "there", chain="mine").depth == 1
    assert save(run.state(), tmp_path / "nowhere", chain="mine", keyframe_every=9).depth == 0  # as options say now
    assert save(run.state(), tmp_path / "elsewhere").depth == 0


def test_a_chain_that_is_full_ends_after_a_restore_as_it_does_before(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    reset_chains()
    run = Run(None, seed=9)
    run.restore(storage_reader=Reader(tmp_path / "step-1"))
    depths = [save(run.state(), tmp_path / f"step-{step}", keyframe_every=3).depth for step in range(2, 7)]
    assert depths == [2, 0, 1, 2, 0]


def test_every_lossy_restore_is_counted(tmp_path: Path) -> None:
    run = Run(None)
    for count in range(3):
        made = save(run.state(), tmp_path / f"step-{count}", scheme="fisher(relative_error=.3)")
        assert made.lossy_restores == count
        reset_chains()
        run.restore(storage_reader=Reader(tmp_path / f"step-{count}"))


@pytest.mark.parametrize(
    ("name", "tensors", "found"),
    [("a", "z", "a"), ("b", "", "b"), ("new", "xy", "b"), ("new", "x", "c"), ("new", "xw", None), ("new", "", None)],
)
def test_training_resumed_from_the_last_of_its_chain_else_the_last_with_all_its_tensors(
    name: str, tensors: str, found: str | None
) -> None:
    held = {"a": "xy", "b": "xyz", "c": "x"}
    origins = {
        key: RestoreOrigin(key, key, 0, signatures=frozenset((tensor, (3,), "F32") for tensor in names))
        for key, names in held.items()
    }
    origin = find_origin(origins, name, {(tensor, (3,), "F32") for tensor in tensors})
    assert (None if origin is None else origin.id) == found


def test_what_a_checkpoint_of_another_layout_holds_is_nothing_to_stand_on(tmp_path: Path) -> None:
    save({"a": torch.ones(1000), "small": torch.ones(3)}, tmp_path / "step-0")
    reset_chains()
    target = {"small": torch.zeros(3)}
    dcp.load(target, storage_reader=Reader(tmp_path / "step-0"))
    assert save({"b": torch.ones(1000), "small": torch.ones(3)}, tmp_path / "step-1").depth == 0


def test_a_process_holds_a_bounded_number_of_chains(tmp_path: Path) -> None:
    names = "abcdefghijklm"[: chain_registry.MAX_CHAINS + 1]
    for name in names:
        save({"x": torch.arange(8.0)}, tmp_path / name)
    assert save({"x": torch.arange(8.0)}, tmp_path / names[-1]).depth == 1
    assert save({"x": torch.arange(8.0)}, tmp_path / names[0]).depth == 0


def test_a_writer_for_each_save_goes_on_with_what_a_scheme_has_learned(tmp_path: Path) -> None:
    with pytest.warns(errors.UnmeasuredLossWarning) as warned:  # once in a run
        trained(tmp_path, 3, scheme="fisher(relative_error=.3)")
    assert [warning.category for warning in warned].count(errors.UnmeasuredLossWarning) == 1


@pytest.mark.parametrize("name", ["lossless", "fisher(nats=.01)", "excp", "lc-checkpoint"])
def test_schemes_of_the_same_settings_are_one(name: str) -> None:
    chain = ChainState(DeltaWriter(), (None, None))
    first = chain.scheme_for(get_scheme(name), None)
    assert chain.scheme_for(get_scheme(name), None) is first
    other = get_scheme("lossless(chunk=4096)" if name == "lossless" else "fisher(nats=.01, seed=1)")
    assert chain.scheme_for(other, None) is other


def test_schemes_of_other_functions_are_others() -> None:
    class Model:
        def loss(self, _: Any) -> float:
            return 1.0

    def make(evaluate: Any) -> Fisher:
        return Fisher(budget="1%", evaluate=evaluate)

    chain, model, other = ChainState(DeltaWriter(), (None, None)), Model(), Model()
    first = chain.scheme_for(make(model.loss), None)
    assert chain.scheme_for(make(model.loss), None) is first
    second = chain.scheme_for(make(other.loss), None)
    assert second is not first
    assert repr(second) == repr(first)


def test_nothing_on_the_disk_is_a_pickle_and_nothing_is_unpickled(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run(None)
    run.train()
    save(run.state(), tmp_path)
    expected = digest(run.state())
    for path in tmp_path.rglob("*"):
        if path.is_file():
            with pytest.raises(Exception):  # noqa: B017 - whatever unpickling raises
                pickle.loads(path.read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    assert restored(tmp_path) == expected
    assert digest(load(tmp_path)) == expected


class _Bomb:
    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> None:
    raise AssertionError("unpickled")


def test_the_file_that_tools_look_for_is_there(tmp_path: Path) -> None:
    manifest = save({"x": torch.ones(2)}, tmp_path)
    words, about = (tmp_path / ".metadata").read_text().splitlines()
    assert "shrinkpoint convert" in words and json.loads(about)["id"] == manifest.id


def test_any_safetensors_reader_sees_boxes_by_their_names(tmp_path: Path) -> None:
    save({"model": {"weight": torch.arange(4.0)}}, tmp_path)
    with safe_open(tmp_path / "rank-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.weight"), torch.arange(4.0))


def test_plans_that_torch_replays_do_not_repeat_a_save(tmp_path: Path) -> None:
    run, digests = Run(None), []
    for step in range(3):
        run.train()
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(run.state(), storage_writer=Writer(tmp_path / f"step-{step}"), planner=planner)
        digests.append(digest(run.state()))
    assert [restored(tmp_path / f"step-{step}") for step in range(3)] == digests
    assert directories.read_directory_manifest(tmp_path / "step-2").depth == 2


class Dies(Exception):
    """As if the process were gone."""


@pytest.mark.parametrize("at", ["write_data", "finish", "commit"])
def test_a_crash_while_a_directory_is_overwritten_leaves_the_old_checkpoint(at: str, tmp_path: Path) -> None:
    (expected,) = trained(tmp_path, 1)
    folder = tmp_path / "step-0"

    class Crashing(Writer):
        def write_data(self, *args: Any) -> Any:
            done = super().write_data(*args)
            if at == "write_data":
                raise Dies
            return done

        def finish(self, metadata: Any, results: Any) -> None:
            if at == "finish":
                raise Dies
            super().finish(metadata, results)
            raise Dies

    run = Run(None)
    run.train(7)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(run.state(), storage_writer=Crashing(folder))
    assert restored(folder) == (digest(run.state()) if at == "commit" else expected)
    directories.verify_directory(folder, deep=True)


def test_no_delta_depends_on_a_save_that_failed(tmp_path: Path) -> None:
    class Failing(Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            raise Dies

    run = Run(None)
    save(run.state(), tmp_path / "step-0")
    run.train()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(run.state(), storage_writer=Failing(tmp_path / "step-1"))
    assert save(run.state(), tmp_path / "step-2").depth == 0
    shutil.rmtree(tmp_path / "step-1")
    assert restored(tmp_path / "step-2") == digest(run.state())


def test_a_result_that_is_lost_is_no_checkpoint(tmp_path: Path) -> None:
    class Losing(Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            (result,) = results[0]
            entries = report_entries([MetadataIndex("a", (0,))])
            results[0] = [replace(result, storage_data=result.storage_data._replace(entries=entries))]
            super().finish(metadata=metadata, results=results)

    with pytest.raises(dcp.api.CheckpointException, match="'b'"):
        dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, storage_writer=Losing(tmp_path))
    assert not directories.is_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("how", "found"), [({}, "no path"), ({"checkpoint_id": "s3://bucket/a"}, "s3://"), ({"checkpoint_id": 3}, "3")]
)
def test_a_place_that_cannot_be_is_an_error_of_the_protocol(how: dict[str, Any], found: str) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=found):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(), **how)


def test_ranks_that_do_not_speak_to_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.PolicyError, match="use_collectives"):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path), use_collectives=False)


def test_threads_are_shared_among_ranks_on_systems_without_affinity_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as macOS."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert Writer("never")._threads == Reader("never")._threads == 4


def test_a_directory_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"shrinkpoint\.json"):
        dcp.load({"x": torch.zeros(2)}, storage_reader=Reader(tmp_path))
    with pytest.raises(errors.NotFoundError):
        load(tmp_path)


def test_a_checkpoint_of_torch_is_named_as_such(tmp_path: Path) -> None:
    """By the reader, whose errors torch wraps, and by `load`."""
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id=str(tmp_path))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, storage_reader=Reader(tmp_path))
    assert "a checkpoint of torch.distributed.checkpoint; expected" in str(caught.value.failures)
    with pytest.raises(errors.NotFoundError, match=r"a checkpoint of torch\.distributed.*shrinkpoint convert"):
        load(tmp_path)


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    save({"x": torch.randn(4000, generator=torch.Generator().manual_seed(1))}, tmp_path)
    path = tmp_path / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with pytest.raises(dcp.api.CheckpointException, match="digest"):
        dcp.load({"x": torch.zeros(4000)}, storage_reader=Reader(tmp_path))


def test_what_is_missing_or_of_another_shape_is_an_error(tmp_path: Path) -> None:
    save({"x": torch.ones(2)}, tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load({"y": torch.zeros(2)}, storage_reader=Reader(tmp_path))
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"x": torch.zeros(3)}, storage_reader=Reader(tmp_path))


def test_a_cast_while_loading_gives_a_warning(tmp_path: Path, caplog: Any) -> None:
    save({"x": torch.ones(2)}, tmp_path)
    target = {"x": torch.zeros(2, dtype=torch.float64)}
    dcp.load(target, storage_reader=Reader(tmp_path))
    assert target["x"].tolist() == [1, 1]
    assert "float64" in caplog.text


def test_the_newest_is_the_one_with_the_largest_number_that_is_whole(tmp_path: Path, caplog: Any) -> None:
    assert latest_valid(tmp_path / "nowhere") is None
    for step in (9, 10, 100):
        save({"x": torch.full((3,), float(step))}, tmp_path / f"step-{step}")
    (tmp_path / "step-200").mkdir()
    (tmp_path / "step-300").mkdir()
    shutil.copy(tmp_path / "step-9/rank-00000.safetensors", tmp_path / "step-300")
    assert latest_valid(tmp_path) == tmp_path / "step-100"
    assert "step-300 is passed over" in caplog.text
    (tmp_path / "step-100/rank-00000.safetensors").unlink()
    assert latest_valid(tmp_path) == tmp_path / "step-10"
    assert "step-100 is passed over" in caplog.text


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    save({"x": torch.arange(100)}, tmp_path / "step-0")
    dcp.load({"x": torch.zeros(100, dtype=torch.int64)}, storage_reader=Reader(tmp_path / "step-0"))
    sent = pickle.dumps(Writer())
    reset_chains()
    dcp.save({"x": torch.arange(100)}, storage_writer=pickle.loads(sent), checkpoint_id=tmp_path / "step-1")
    assert directories.read_directory_manifest(tmp_path / "step-1").depth == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_is_on_a_device_is_saved_and_comes_back_there(tmp_path: Path) -> None:
    for step in range(2):
        state = {"x": torch.arange(5000.0, device="cuda") * (step + 1), "n": torch.tensor(step, device="cuda")}
        save(state, tmp_path / f"step-{step}")
    target = {"x": torch.zeros(5000, device="cuda"), "n": torch.tensor(9, device="cuda")}
    dcp.load(target, storage_reader=Reader(tmp_path / "step-1"))
    assert target["x"].is_cuda
    assert torch.equal(target["x"], state["x"])
    assert int(target["n"]) == 1
    assert directories.read_directory_manifest(tmp_path / "step-1").depth == 1


def test_a_part_of_a_state_is_loaded_by_patterns(tmp_path):
    state = {"model": {"w.weight": torch.randn(300, 40)}, "optimizer": {"m": torch.randn(300, 40)}, "steps": [1, 2]}
    dcp.save(state, storage_writer=Writer(tmp_path / "a"))
    for only in ("model.*", "model", ["model/w.weight"]):
        part = load(tmp_path / "a", only=only)
        assert [*part] == ["model"] and torch.equal(part["model"]["w.weight"], state["model"]["w.weight"])
    assert load(tmp_path / "a", only=["steps", "*.m"]).keys() == {"optimizer", "steps"}
    with pytest.raises(errors.NotFoundError, match=r"'head.\*'.*optimizer/m"):
        load(tmp_path / "a", only="head.*")
    with pytest.raises(errors.PolicyError):
        load(tmp_path / "a", only=[])
