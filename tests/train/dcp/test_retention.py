"""Promise: rules of retention hold in the directories of many ranks, and whatever they keep loads as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.processes import ranks
from torch import nn

from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError
from shrinkpoint.store import Keep
from shrinkpoint.store.directory import find_siblings, verify_directory
from shrinkpoint.train.dcp import Manager, reset_chains

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS = """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from helpers.multi_rank_training import Net, digest
    from helpers.replica_search import caught, join, leave
    from shrinkpoint.store import Keep
    from shrinkpoint.train.dcp import Manager

    def of_rank(rank, width, folder):
        said, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))
        model = Net(inner=131)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        manager = Manager(f"{folder}/run", keep=Keep(last=2, best=1, metric="loss", moments_last=2), keyframe_every=2)
        states = {}
        for step in range(7):
            model(torch.randn(16, 48, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            manager.save(step, model=model, optimizer=optimizer, metrics={"loss": abs(step - 1)})
            states[step] = digest([model.state_dict(), optimizer.state_dict()]), digest(model.state_dict())
        said["steps"] = [manager.steps(), manager.latest_step(), manager.best_step()]
        said["moments gone"] = caught(lambda: manager.restore(1, model=model, optimizer=optimizer))
        said["best"] = manager.restore("best", model=model).step
        said["best state"] = digest(model.state_dict()) == states[1][1]
        said["latest"] = manager.restore("latest", model=model, optimizer=optimizer).step
        said["latest state"] = digest([model.state_dict(), optimizer.state_dict()]) == states[6][0]
        leave(said, rank, folder)
"""


@pytest.mark.parametrize("width", [1, 2])
def test_a_sharded_run_keeps_what_rules_select(tmp_path: Path, width: int) -> None:
    for said in ranks(RANKS, width, tmp_path):
        assert said["steps"] == [[1, 5, 6], 6, 1]
        assert said["moments gone"][0] == "MismatchError" and "weights only" in str(said["moments gone"])
        assert (said["best"], said["latest"]) == (1, 6) and said["best state"] and said["latest state"]
    manifest = verify_directory(tmp_path / "run" / "step-000000001", deep=True)
    assert manifest.weights_only and len(manifest.payloads) == width


REVERSING = """
    import os
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from helpers.multi_rank_training import digest
    from helpers.replica_search import join, leave
    from shrinkpoint.errors import StorageError
    from shrinkpoint.store import Keep, directory_rewrite
    from shrinkpoint.store.directory import read_directory_manifest, verify_directory
    from shrinkpoint.train.dcp import Manager, reset_chains

    def fail_at(times, owner, name):
        calls, original = [0], getattr(owner, name)

        def fail(*arguments):
            calls[0] += 1
            if calls[0] in times:
                if "kill" in os.environ["FAULT"]:
                    os._exit(9)
                raise StorageError("disk", found="no space left", do="make room")
            return original(*arguments)

        setattr(owner, name, fail)

    def of_rank(rank, width, folder):
        said, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))
        fault = os.environ["FAULT"]
        if fault == "payload of rank 1" and rank == 1:
            fail_at({4}, directory_rewrite.RunRewriter, "_write")
        if fault in ("manifest", "kill") and rank == 0:
            fail_at({2, 5, 6}, directory_rewrite, "replace_manifest")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 4))
        model[0].requires_grad_(False)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-2)
        manager = Manager(f"{folder}/run", keep=3, keyframe_every=5)
        states, said["keyframes"], said["loads"] = {}, [], True
        for step in range(12):
            model(torch.randn(16, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            if step == 2 and rank == 1:
                reset_chains()  # its chains end at other steps than those of rank 0
            manager.save(step, model=model, optimizer=optimizer)
            states[step] = digest([model.state_dict(), optimizer.state_dict()])
            manifests = [verify_directory(manager._root / f"step-{step:09}", deep=True) for step in manager.steps()]
            (own,) = zip(*(manifest.of_rank(rank).payloads for manifest in manifests))
            said["keyframes"].append(len({payload.bases[0][0] if payload.bases else payload.digest for payload in own}))
        said["steps"] = manager.steps()
        for step in manager.steps():
            manager.restore(step, model=model, optimizer=optimizer)
            said["loads"] &= digest([model.state_dict(), optimizer.state_dict()]) == states[step]
        leave(said, rank, folder)
"""


@pytest.mark.parametrize("fault", ["none", "payload of rank 1", "manifest"])
def test_older_shards_become_deltas_against_newer_ones(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    reports = ranks(REVERSING, 2, tmp_path)
    assert all(said["steps"] == [9, 10, 11] and said["loads"] for said in reports)
    # A rank does not know how large deltas are before its first one, and a fault lasts until the next keyframe.
    most = max(max(said["keyframes"][4:]) for said in reports)
    assert most == (1 if fault == "none" else 2), str([said["keyframes"] for said in reports])
    assert all(said["keyframes"][-1] == 1 for said in reports), str([said["keyframes"] for said in reports])


def test_a_kill_while_older_shards_are_written_again_leaves_what_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "kill")
    with pytest.raises(AssertionError):
        ranks(REVERSING, 2, tmp_path)
    manifests = [verify_directory(path, deep=True) for path in find_siblings(tmp_path / "run" / "step-000000000")]
    assert len(manifests) >= 3


SOME_SAVE = """
    import os
    import torch
    from torch import nn
    from helpers.replica_search import join, leave
    from shrinkpoint.store.chain import file_sizes
    from shrinkpoint.store.directory import verify_directory
    from shrinkpoint.store.layout import rank_of
    from shrinkpoint.train.dcp import Manager

    def of_rank(rank, width, folder):
        said = join(rank, width, folder) | {"ranks": [], "held": []}
        torch.manual_seed(rank)
        parts = {part: nn.Linear(100, 200, bias=False) for part in os.environ["PARTS"] if int(part) % width == rank}
        manager = Manager(f"{folder}/run", keep=3)
        first = 1 + (manager.latest_step() or 0)
        manager.restore(**parts)
        for step in range(first, first + 6):
            for part in parts.values():
                part.weight.data[:120].normal_()
            manager.save(step, **parts)
            manifests = [verify_directory(manager._root / f"step-{step:09}", deep=True) for step in manager.steps()]
            said["ranks"] += [[rank_of(payload.name) for payload in manifest.payloads] for manifest in manifests]
            said["held"].append(sum(file_sizes(manifests).values()) / manifests[-1].raw_bytes)
        saved = [part.weight.clone() for part in parts.values()]
        manager.restore(**parts)
        said["loads"] = all(torch.equal(part.weight, old) for part, old in zip(parts.values(), saved))
        leave(said, rank, folder)
"""


def test_shards_of_ranks_between_which_one_saves_nothing_stay_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTS", "02")
    for said in ranks(SOME_SAVE, 3, tmp_path):
        assert said["loads"] and all(owners == [0, 2] for owners in said["ranks"]), str(said["ranks"])


def test_fewer_ranks_hold_no_more_than_plain_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTS", "0123")
    for width in (4, 2, 3):
        for said in ranks(SOME_SAVE, width, tmp_path):
            assert said["loads"] and max(said["held"]) < 2.5, str(said["held"])


ONE_FAILS = """
    import torch.distributed as dist
    from torch import nn
    from helpers.replica_search import caught, join, leave
    from shrinkpoint.errors import StorageError
    from shrinkpoint.store.delta_writer import DeltaWriter
    from shrinkpoint.train.dcp import Manager

    def of_rank(rank, width, folder):
        said, write = join(rank, width, folder) | {"errors": [], "left": []}, DeltaWriter.write

        def fail(*arguments, **options):
            raise StorageError("disk", found="no space left", do="make room")

        part, manager = nn.Linear(100, 200), Manager(f"{folder}/run", keep=3)
        for step in range(6):
            DeltaWriter.write = fail if rank == 1 and step in (1, 2, 4) else write
            said["errors"].append(caught(lambda: manager.save(step, **{str(rank): part}))[0])
            dist.barrier()
            said["left"] = sorted(path.name for path in manager._root.iterdir())
            dist.barrier()
        said["steps"] = manager.steps()
        leave(said, rank, folder)
"""


def test_a_save_that_fails_on_one_rank_leaves_no_files_of_the_others(tmp_path: Path) -> None:
    for said in ranks(ONE_FAILS, 2, tmp_path):
        assert said["errors"] == ["none", "StorageError", "StorageError", "none", "StorageError", "none"]
        assert said["steps"] == [0, 3, 5] and len(said["left"]) == 3


def test_a_manager_without_the_metric_says_so(tmp_path: Path) -> None:
    reset_chains()
    manager, model = Manager(tmp_path, keep=Keep(best=1, metric="acc")), nn.Linear(2, 2)
    assert manager.latest_step() is manager.best_step() is manager.restore("latest", model=model) is None
    manager.save(0, model=model)
    with pytest.raises(NotFoundError, match="metric"):
        manager.restore("best", model=model)
    with pytest.raises(PolicyError):
        manager.restore("newest", model=model)  # type: ignore[arg-type]
    with pytest.raises(MismatchError):
        manager.restore("latest", other=model)
