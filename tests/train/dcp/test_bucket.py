"""torch.distributed.checkpoint to and from a bucket: each rank uploads its own file, and the manifest is last."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.multi_rank_training import Run, digest, save, trained
from helpers.processes import ranks
from torch.distributed.checkpoint.api import CheckpointException

import shrinkpoint
from shrinkpoint.errors import ChainError, NotFoundError, PolicyError, StorageError
from shrinkpoint.storage import directory_storage
from shrinkpoint.store.directory import is_checkpoint, read_directory_manifest, verify_directory
from shrinkpoint.train.dcp import Reader, Writer, latest_valid, load, reset_chains

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
_nightly = pytest.mark.nightly
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def anew() -> None:
    reset_chains()


@pytest.fixture
def url(s3) -> str:
    return f"s3://checkpoints/{os.getpid()}/dcp-{next(_numbers)}"


SAVES_AND_LOADS = """
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from helpers import multi_rank_training as training
from shrinkpoint.train.dcp import Reader, Writer, latest_valid, reset_chains

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    url = open(f"{folder}/url").read()
    parts = [training.mesh_of(range(n)) for n in range(1, width + 1)]
    run, saved, read = training.Run(parts[-1]), [], []
    for step in range(2):
        run.train(2)
        dcp.save(run.state(), storage_writer=Writer(f"{url}/step-{step}", keyframe_every=5))
        saved.append(training.digest(run.state()))
    newest = latest_valid(url)
    reset_chains()  # as in a new process
    for mesh in parts:
        if rank < mesh.size():
            again = training.Run(mesh, seed=7)
            again.train(1)
            state = again.restore(storage_reader=Reader(newest), process_group=mesh.get_group())
            read.append(training.digest(state))
    again.train(1)
    dcp.save(again.state(), storage_writer=Writer(f"{url}/step-2", keyframe_every=5))
    saved.append(training.digest(again.state()))
    training.done(rank, folder, [saved, read, newest.name])
"""


def test_ranks_save_deltas_and_any_number_of_them_loads(url, tmp_path) -> None:
    (tmp_path / "url").write_text(url)
    results = ranks(SAVES_AND_LOADS, 2, tmp_path)
    saved = results[0][0]
    assert [result[0] for result in results] == [saved, saved]
    assert [result[1:] for result in results] == [[[saved[1]] * 2, "step-1"], [[saved[1]], "step-1"]]
    assert [digest(load(f"{url}/step-{step}")) for step in range(3)] == saved
    manifests = [verify_directory(f"{url}/step-{step}", deep=True) for step in range(3)]
    assert [manifest.depth for manifest in manifests] == [0, 1, 2]
    assert {len(manifest.payloads) for manifest in manifests} == {2}


def test_directories_in_a_bucket_need_no_other_ones_unless_it_is_asked_for(url) -> None:
    digests = trained(url, 2)
    assert [read_directory_manifest(f"{url}/step-{step}").depth for step in range(2)] == [0, 0]
    storage = directory_storage(f"{url}/step-0")
    for key in storage.list():
        storage.delete(key)
    assert digest(load(f"{url}/step-1")) == digests[1]
    names = sorted(directory_storage(f"{url}/step-1").list())
    assert [name.partition(".")[0] for name in names] == ["", "rank-00000", "shrinkpoint"]


@_nightly
def test_base_that_was_deleted_is_an_error_that_says_why(url, caplog) -> None:
    digests = trained(url, 4, keyframe_every=2)
    assert [read_directory_manifest(f"{url}/step-{step}").depth for step in range(4)] == [0, 1, 0, 1]
    directory_storage(f"{url}/step-2").delete(read_directory_manifest(f"{url}/step-2").payloads[0].name)
    with pytest.raises(ChainError, match=r"step-2/rank-00000.*in a bucket a delta needs the directories"):
        load(f"{url}/step-3")
    newest = latest_valid(url)
    assert newest is not None
    assert (newest.name, str(newest)) == ("step-1", f"{url}/step-1")
    assert "step-3 is passed over" in caplog.text
    assert digest(load(newest)) == digests[1]


@_nightly
def test_save_after_its_base_was_deleted_is_a_keyframe(url) -> None:
    run = Run(None)
    for step in range(2):
        run.train()
        assert save(run.state(), f"{url}/step-{step}", keyframe_every=9).depth == 0
        storage = directory_storage(f"{url}/step-{step}")
        for key in storage.list():
            storage.delete(key)


@_nightly
def test_chain_goes_on_after_a_restore_and_between_directories_deep_below(url) -> None:
    trained(f"{url}/a/b", 2, keyframe_every=9)
    reset_chains()
    run = Run(None, seed=9)
    run.train()
    run.restore(storage_reader=Reader(f"{url}/a/b/step-1"))
    for depth, place in ((2, "a/b/step-2"), (0, "a/step-3"), (1, "c/d/step-4")):
        run.train()
        manifest = save(run.state(), f"{url}/{place}", keyframe_every=9, chain=None if depth == 2 else "mine")
        assert manifest.depth == depth
        assert digest(load(f"{url}/{place}")) == digest(run.state())


@_nightly
def test_directory_that_is_saved_into_again_does_not_break_what_was_made_against_it(url) -> None:
    run = Run(None)
    for step in (0, 1, 0):
        run.train()
        save(run.state(), f"{url}/step-{step}", keyframe_every=9)
        if step:
            expected = digest(run.state())
    assert digest(load(f"{url}/step-1")) == expected
    assert digest(load(f"{url}/step-0")) == digest(run.state())
    for _ in range(2):  # without deltas nothing piles up
        save(run.state(), f"{url}/last")
    assert len([key for key in directory_storage(f"{url}/last").list() if key.startswith("rank")]) == 1


@_nightly
def test_part_of_a_checkpoint_is_read_without_the_rest(url, s3) -> None:
    state = {"small": torch.arange(1000.0), "large": torch.randint(0, 256, (24 << 20,), dtype=torch.uint8)}
    save(state, f"{url}/step-0")
    s3.clear()
    target = {"small": torch.zeros(1000)}
    dcp.load(target, storage_reader=Reader(f"{url}/step-0"))
    assert torch.equal(target["small"], state["small"])
    assert torch.equal(load(f"{url}/step-0", only="small")["small"], state["small"])
    part = {"large": torch.zeros(24 << 20, dtype=torch.uint8)}
    assert len([path for method, path, _ in s3.requests() if method == "GET" and "rank" in path]) <= 12
    dcp.load(part, storage_reader=Reader(f"{url}/step-0"))
    assert torch.equal(part["large"], state["large"])


@_nightly
def test_failed_upload_is_an_error_and_leaves_no_checkpoint(url, s3) -> None:
    digests = trained(url, 1)
    s3.fail("PUT .*step-1/rank", "error", count=1000)
    with pytest.raises(CheckpointException) as caught:
        save(Run(None).state(), f"{url}/step-1")
    assert all(isinstance(error, StorageError) for error, _ in caught.value.failures.values())
    s3.clear()
    assert not is_checkpoint(f"{url}/step-1")
    newest = latest_valid(url)
    assert newest is not None
    assert digest(load(newest)) == digests[0]


@_nightly
def test_one_process_checkpoint_loads_by_its_url(url) -> None:
    from shrinkpoint import Lossless
    from shrinkpoint.store import directory
    from shrinkpoint.store.delta_writer import DeltaWriter
    from shrinkpoint.tensors.flat_state import flatten

    writer, state = DeltaWriter(), {"x": torch.randn(1000)}
    for step in range(2):
        state["x"] += 1e-3
        writer.write(f"{url}/step-{step}", flatten(state), scheme=Lossless())
        directory.commit(f"{url}/step-{step}", [writer.payload], scheme="lossless", step=step)
        writer.commit_reference()
    assert read_directory_manifest(f"{url}/step-1").depth == 1
    assert torch.equal(shrinkpoint.load(f"{url}/step-1")["x"], state["x"])


@_nightly
def test_wrong_places_are_errors_that_say_so(url) -> None:
    with pytest.raises(NotFoundError, match=r"nothing/shrinkpoint\.json"):
        load(f"{url}/nothing")
    assert latest_valid(f"{url}/nothing") is None
    for place in ("hdfs://x/y", "s3://key:SECRET@bucket/x"):
        for use in (Writer, Reader, load, latest_valid):
            with pytest.raises(PolicyError):
                use(place)
    with pytest.raises(PolicyError, match="keyframe_every"):
        Writer(url, keyframe_every="never")  # type: ignore[arg-type]
    save({"x": torch.ones(3)}, f"{url}/step-0")
    with pytest.raises(CheckpointException, match="already exists"):
        save({"x": torch.ones(3)}, f"{url}/step-0", overwrite=False)
