"""The switch for callers who only pass a path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.filesystem as filesystem
from helpers.multi_rank_training import Run, digest
from torch.distributed.checkpoint import _storage_utils, format_utils, state_dict_saver

from shrinkpoint import errors
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import install, load, reset_chains, uninstall

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STOCK = (dcp.FileSystemWriter, dcp.FileSystemReader)
PLACES = (dcp, filesystem, _storage_utils, format_utils)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    reset_chains()
    yield
    uninstall()


def found() -> list[Any]:
    executor = state_dict_saver._ProcessBasedAsyncCheckpointExecutor
    return [getattr(place, name.__name__) for place in PLACES for name in STOCK] + [executor]


def test_a_path_is_enough(tmp_path: Path) -> None:
    install()
    run = Run(None)
    for step in range(2):
        run.train()
        dcp.save(run.state(), checkpoint_id=tmp_path / f"step-{step}")
    assert directories.read_directory_manifest(tmp_path / "step-1").depth == 1
    other = Run(None, seed=3)
    assert digest(other.restore(checkpoint_id=str(tmp_path / "step-1"))) == digest(run.state())


def test_who_makes_torchs_own_writer_by_hand_gets_ours(tmp_path: Path) -> None:
    install(keyframe_every=1)
    writer = dcp.FileSystemWriter(path=tmp_path / "a", single_file_per_rank=True, thread_count=2)
    dcp.save({"x": torch.ones(3)}, storage_writer=writer)
    assert directories.is_checkpoint(tmp_path / "a")
    target = {"x": torch.zeros(3)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(path=tmp_path / "a"))
    assert target["x"].tolist() == [1, 1, 1]


def test_uninstall_puts_back_exactly_what_was_there() -> None:
    before = found()
    install()
    install(scheme="lossless", keyframe_every=3)
    assert all(a is not b for a, b in zip(found(), before, strict=True))
    uninstall()
    assert all(a is b for a, b in zip(found(), before, strict=True))
    uninstall()
    assert (dcp.FileSystemWriter, dcp.FileSystemReader) == STOCK


def test_installing_again_changes_the_settings(tmp_path: Path) -> None:
    install(keyframe_every=1)
    install(keyframe_every=2)
    for name in ("step-1", "step-2"):
        dcp.save({"x": torch.arange(1000)}, checkpoint_id=tmp_path / name)
    assert directories.read_directory_manifest(tmp_path / "step-2").depth == 1
    with pytest.raises(errors.PolicyError):
        install(scheme="nonsense")


def test_subclasses_of_torchs_own_classes_are_not_changed() -> None:
    install()
    from torch.distributed.checkpoint import hf_storage

    assert issubclass(hf_storage.HuggingFaceStorageReader, STOCK[1])
    fsspec = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem")
    assert issubclass(fsspec.FsspecWriter, STOCK[0])


def test_directories_of_torchs_own_are_read_as_ever(tmp_path: Path) -> None:
    run = Run(None)
    run.train()
    dcp.save(run.state(), checkpoint_id=tmp_path)
    install()
    assert not directories.is_checkpoint(tmp_path)
    assert digest(Run(None, seed=3).restore(checkpoint_id=tmp_path)) == digest(run.state())


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("ours_last", [True, False])
def test_of_two_checkpoints_in_a_directory_the_later_is_read(ours_last: bool, tmp_path: Path) -> None:
    for number, ours in enumerate((not ours_last, ours_last)):
        install() if ours else uninstall()
        dcp.save({"x": torch.full((2,), float(number))}, checkpoint_id=tmp_path)
    install()
    target = {"x": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target["x"].tolist() == [1, 1]


def test_torchs_own_tools_read_ours(tmp_path: Path) -> None:
    install()
    run = Run(None)
    run.train()
    dcp.save(run.state(), checkpoint_id=tmp_path / "a")
    format_utils.dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert digest(state) == digest(run.state()) == digest(load(tmp_path / "a"))


def test_overwrite_false_is_heeded(tmp_path: Path) -> None:
    install()
    dcp.save({"x": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=False))
    with pytest.raises(dcp.api.CheckpointException, match="overwrite=False"):
        dcp.save({"x": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=False))
    by_position = dcp.FileSystemWriter(tmp_path, True, True, 1, 10_000_000, False, False)  # the last one is overwrite
    with pytest.raises(dcp.api.CheckpointException, match="overwrite=False"):
        dcp.save({"x": torch.ones(2)}, storage_writer=by_position)
    dcp.save({"x": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path))


def test_transformations_of_bytes_are_refused(tmp_path: Path) -> None:
    install()
    with pytest.raises(errors.PolicyError, match="_extensions"):
        dcp.FileSystemWriter(tmp_path, _extensions=[object()])
