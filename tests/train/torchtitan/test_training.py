"""Promise: a training of torchtitan's Trainer goes on as if nothing had ended it, on any number of ranks."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("torchtitan")

from helpers.processes import ranks

from shrinkpoint.report.files import read_file_report
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store.directory import read_directory_manifest, verify_directory

RANKS = """
    import json, warnings
    import torch.distributed as dist
    warnings.simplefilter("ignore")
    from helpers.torchtitan_training import free_ports, run_killed, train
    PORTS = free_ports(7)

    def of_two(rank, folder, said):
        where = rank, 2
        said["killed"] = run_killed(2, *where, PORTS[0], f"{folder}/run", 3)
        said["resumed"] = train(*where, PORTS[1], f"{folder}/run", 3)
        said["whole"] = train(*where, PORTS[2], f"{folder}/whole", 3)
        options = {"async_mode": "async", "keep_latest_k": 2, "scheme": "fisher(relative_error=.3)"}
        said["lossy"] = train(*where, PORTS[3], f"{folder}/lossy", 2, **options)
        said["lossy again"] = train(*where, PORTS[4], f"{folder}/lossy", 3, **options)

    def of_rank(rank, width, folder):
        said, store = {}, dist.FileStore(f"{folder}/ended", width)
        if rank < 2:
            of_two(rank, folder, said)
            store.set(str(rank), "")
        store.wait(["0", "1"])
        wide = train(rank, width, PORTS[5], f"{folder}/run", 4, exclude_from_loading=["dataloader"])
        grid = train(rank, width, PORTS[6], f"{folder}/whole", 4, tensor_parallel=2)
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(said | {"of four": [wide, grid]}, file)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    return folder, ranks(RANKS, 4, folder)


def manifests(folder):
    return {path.name: read_directory_manifest(path) for path in sorted((folder / "checkpoint").iterdir())}


def test_killed_run_ends_as_an_uninterrupted_one(trained):
    folder, said = trained
    for rank in said[:2]:
        assert rank["killed"] == -signal.SIGKILL
        assert (rank["whole"]["begun"], rank["resumed"]["begun"]) == (0, 1)
        assert rank["resumed"]["state"] == rank["whole"]["state"]
    found = manifests(folder / "run")
    assert found["step-2"].depth > 0
    assert {len(found[f"step-{step}"].payloads) for step in (1, 2, 3)} == {2}


def test_four_ranks_go_on_from_two(trained):
    """FSDP2 over four ranks, where torchtitan's loader cannot go on; and over two with tensor parallelism in two."""
    folder, said = trained
    for run in (run for rank in said for run in rank["of four"]):
        assert run["begun"] == 3
        assert run["begun_state"] == said[0]["whole"]["state"]
    assert len(manifests(folder / "run")["step-4"].payloads) == 4
    assert manifests(folder / "whole")["step-4"].step == 4


def test_lossy_run_keeps_the_latest_ones(trained):
    folder, said = trained
    found = manifests(folder / "lossy")
    assert [*found] == ["step-2", "step-3"]
    for name in found:
        verify_directory(folder / "lossy" / "checkpoint" / name, deep=True)
    assert {manifest.scheme for manifest in found.values()} == {"fisher"}
    for payload in found["step-3"].payloads:
        file = read_file_report(LocalStorage(folder / "lossy" / "checkpoint" / "step-3"), payload.name)
        large = [row for row in file.tensors if row.role == "parameter" and row.raw_bytes > 4096]
        assert large and not any(row.coding.startswith("exact") for row in large)  # parts of fused weights, too
    for rank in said[:2]:
        assert rank["lossy again"]["begun"] == 2
        assert rank["lossy again"]["begun_state"] != rank["lossy"]["state"]
