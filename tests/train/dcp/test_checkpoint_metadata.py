"""What a manifest says of a state dict, and what of that is believed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.multi_rank_training import save

from shrinkpoint import errors
from shrinkpoint.store import directory as directories
from shrinkpoint.store.manifest import DCP_KEY
from shrinkpoint.train.dcp import Reader, load, reset_chains
from shrinkpoint.train.dcp.checkpoint_metadata import metadata_from_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def anew() -> None:
    reset_chains()


DESCRIPTION = {"items": [["x", ["x"], "F32", 0], ["y", None, None, 0]], "layouts": [[[4], [[[0], [4], 0]]]]}


def test_a_forged_description_is_refused() -> None:
    for forged in [
        None,
        [],
        {},
        {"items": [], "layouts": 3},
        {"items": [["x", ["x"], "F32", 1]], "layouts": DESCRIPTION["layouts"]},
        {"items": [["x", ["x"], "F33", 0]], "layouts": DESCRIPTION["layouts"]},
        {"items": [["x", [1.5], "F32", 0]], "layouts": DESCRIPTION["layouts"]},
        {"items": [["x", ["x", 2**40], "F32", 0]], "layouts": DESCRIPTION["layouts"]},
        {"items": [["x", ["x", -1], "F32", 0]], "layouts": DESCRIPTION["layouts"]},
        {"items": [["x", [], "F32", 0]], "layouts": DESCRIPTION["layouts"]},
        {"items": [["x", ["x"], "F32", 0]] * 2, "layouts": DESCRIPTION["layouts"]},
        {"items": [["x", ["x"], None, 7]], "layouts": []},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[4], [[[2], [4], 0]]]]},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[4], [[[0], [4], 7]]]]},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[4], [[[0, 0], [4], 0]]]]},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[-4], []]]},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[2**62], []]]},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[4], [[[0], [2], 0], [[1], [2], 0]]]]},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[4, 4], [[[0, 1], [2, 2], 0], [[1, 0], [2, 2], 0]]]]},
        {"items": [["x", ["x"], "F32", 0]], "layouts": [[[], [[[], [], 0], [[], [], 0]]]]},
        {"items": [[f"x{n}", [f"x{n}", 99], None, 0] for n in range(100)], "layouts": []},
    ]:
        assert list(metadata_from_json(DESCRIPTION, 1, "here").entries) == ["x", "y"]
        with pytest.raises(errors.CorruptError):
            metadata_from_json(forged, 1, "here")


def test_boxes_that_do_not_fill_their_tensor_take_no_memory(tmp_path: Path) -> None:
    manifest = save({"x": torch.ones(4)}, tmp_path)
    extra = {DCP_KEY: {"items": [["x", ["x"], "F32", 0]], "layouts": [[[2**40], [[[0], [4], 0]]]]}}
    directories.commit(tmp_path, manifest.payloads, scheme="lossless", extra=extra)
    with pytest.raises(errors.CorruptError, match="boxes"):
        load(tmp_path)


@pytest.mark.parametrize(("dtype", "size"), [("I32", 4), ("F32", 2**40)])
def test_a_manifest_that_says_more_than_its_files_is_refused_before_it_costs_memory(
    dtype: str, size: int, tmp_path: Path
) -> None:
    manifest = save({"x": torch.ones(4)}, tmp_path)
    items, layouts = [["x", ["x"], dtype, 0]], [[[size], [[[0], [size], 0]]]]
    directories.commit(
        tmp_path, manifest.payloads, scheme="lossless", extra={DCP_KEY: {"items": items, "layouts": layouts}}
    )
    with pytest.raises(errors.CorruptError, match="shape"):
        load(tmp_path)
    target = {"x": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(dcp.api.CheckpointException, match=r"(?i)shape|size"):
        dcp.load(target, storage_reader=Reader(tmp_path))


def test_many_entries_cut_alike_take_the_memory_of_one() -> None:
    boxes = [[[at], [1], 0] for at in range(1000)]
    document = {"items": [[f"x{n}", None, "F32", 0] for n in range(1000)], "layouts": [[[1000], boxes]]}
    tracemalloc.start()
    metadata_from_json(document, 1, "here").to_torch()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 23


def test_a_checkpoint_of_something_else_is_not_ours_to_read(tmp_path: Path) -> None:
    manifest = save({"x": torch.ones(4)}, tmp_path)
    directories.commit(tmp_path, manifest.payloads, scheme="lossless")
    with pytest.raises(errors.MismatchError, match=r"dcp\.save"):
        load(tmp_path)


def test_a_state_dict_by_its_full_names(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "n": {"k": 3}}}, tmp_path)
    assert list(load(tmp_path, nested=False)) == ["model.a", "model.n.k"]
    assert load(tmp_path)["model"]["n"] == {"k": 3}


def test_lists_come_back_as_lists_with_what_is_not_in_them_left_out(tmp_path: Path) -> None:
    save({"list": [{}, {"x": torch.ones(2), "y": [{"z": 1}, torch.zeros(1)]}], "empty": []}, tmp_path)
    state = load(tmp_path)
    assert state["list"][0] is None
    assert state["list"][1]["y"][0] == {"z": 1}
    assert state["empty"] == []


@pytest.mark.parametrize("paths", [[["a"], ["a", "b"]], [["a", "b"], ["a", 0]], [["a", 0], ["a", "b"]]])
def test_paths_that_contradict_each_other_are_refused(paths: Any, tmp_path: Path) -> None:
    manifest = save({"x": 1, "y": 2}, tmp_path)
    items = [["x", paths[0], None, 0], ["y", paths[1], None, 0]]
    directories.commit(tmp_path, manifest.payloads, scheme="lossless", extra={DCP_KEY: {"items": items, "layouts": []}})
    with pytest.raises(errors.CorruptError):
        load(tmp_path)
