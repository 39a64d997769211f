"""Promise: a training of torchtitan's Trainer goes on as if nothing had ended it, on any number of ranks."""

from __future__ import annotations

import json
import signal

import pytest

pytest.importorskip("torchtitan")

from helpers.processes import run_forked

from shrinkpoint.report.files import read_file_report
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store.directory import read_directory_manifest, verify_directory

PREPARE = """
    import json, logging, sys, warnings
    warnings.simplefilter("ignore")
    from helpers.torchtitan_training import free_ports, run_killed, train
    PORTS = free_ports(6)

    def say(rank, folder, said):
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(said, file)
"""
TWO_RANKS = (
    PREPARE
    + """
    def of_rank(rank, width, folder):
        said, where = {}, (rank, width)
        said["killed"] = run_killed(4, *where, PORTS[0], f"{folder}/run", 6)
        said["resumed"] = train(*where, PORTS[1], f"{folder}/run", 6)
        said["whole"] = train(*where, PORTS[2], f"{folder}/whole", 6)
        options = {"async_mode": "async", "keep_latest_k": 2, "interval": 1, "scheme": "fisher(relative_error=.3)"}
        said["lossy"] = train(*where, PORTS[3], f"{folder}/lossy", 5, **options)
        said["lossy again"] = train(*where, PORTS[4], f"{folder}/lossy", 6, **options)
        say(rank, folder, said)
"""
)
FOUR_RANKS = (
    PREPARE
    + """
    def of_rank(rank, width, folder):
        wide = train(rank, width, PORTS[0], f"{folder}/run", 7, exclude_from_loading=["dataloader"])
        grid = train(rank, width, PORTS[1], f"{folder}/whole", 7, tensor_parallel=2)
        say(rank, folder, [wide, grid])
"""
)


def results(folder, width):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(width)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    run_forked(TWO_RANKS, str(folder), width=2)
    return folder, results(folder, 2)


def manifests(folder):
    return {path.name: read_directory_manifest(path) for path in sorted((folder / "checkpoint").iterdir())}


def test_killed_run_ends_as_an_uninterrupted_one(two_ranks):
    folder, said = two_ranks
    for rank in said:
        assert rank["killed"] == -signal.SIGKILL
        assert (rank["whole"]["begun"], rank["resumed"]["begun"]) == (0, 2)
        assert rank["resumed"]["state"] == rank["whole"]["state"]
    found = manifests(folder / "run")
    assert {name: manifest.depth > 0 for name, manifest in found.items()}["step-4"]
    assert {len(manifest.payloads) for manifest in found.values()} == {2}


def test_four_ranks_go_on_from_two(two_ranks):
    """FSDP2 over four ranks, where torchtitan's loader cannot go on; and over two with tensor parallelism in two."""
    folder, said = two_ranks
    run_forked(FOUR_RANKS, str(folder), width=4)
    for run in (run for rank in results(folder, 4) for run in rank):
        assert run["begun"] == 6
        assert run["begun_state"] == said[0]["whole"]["state"]
    assert len(manifests(folder / "run")["step-7"].payloads) == 4
    assert manifests(folder / "whole")["step-7"].step == 7


def test_lossy_run_keeps_the_latest_ones(two_ranks):
    folder, said = two_ranks
    found = manifests(folder / "lossy")
    assert [*found] == ["step-5", "step-6"]
    for name in found:
        verify_directory(folder / "lossy" / "checkpoint" / name, deep=True)
    assert {manifest.scheme for manifest in found.values()} == {"fisher"}
    for payload in found["step-6"].payloads:
        file = read_file_report(LocalStorage(folder / "lossy" / "checkpoint" / "step-6"), payload.name)
        large = [row for row in file.tensors if row.role == "parameter" and row.raw_bytes > 4096]
        assert large and not any(row.coding.startswith("exact") for row in large)  # parts of fused weights, too
    for rank in said:
        assert rank["lossy again"]["begun"] == 5
        assert rank["lossy again"]["begun_state"] != rank["lossy"]["state"]
