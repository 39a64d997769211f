"""Ranks that are not set up alike: an error of all, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

from helpers.processes import ranks

UNLIKE = """
import datetime, warnings
import torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Partial
from shrinkpoint import Fisher
from shrinkpoint.errors import LossWarning
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, Writer, latest_valid, reset_chains

def error_of(save):
    try:
        save()
        return []
    except dcp.api.CheckpointException as error:
        return sorted({type(one).__name__ for one, _ in error.failures.values()})

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    warnings.simplefilter("ignore", LossWarning)
    run, results = training.Run(training.mesh_of(range(width))), {}
    run.train(2)
    fisher = lambda **further: Fisher(budget="2%", evaluate=lambda model: 1.0, **further)

    def save(name, **settings):
        results[name] = error_of(lambda: dcp.save(run.state(), storage_writer=Writer(f"{folder}/{name}", **settings)))

    save("one loses nothing", scheme="lossless" if rank else Fisher(relative_error=0.1))
    save("one has no model", scheme=fisher(), model=None if rank else run.model)
    save("alike", scheme=Fisher(relative_error=0.1))

    # one rank alone has restored what lost something
    if rank == 1:
        dcp.load(run.state(), storage_reader=Reader(f"{folder}/alike"), no_dist=True)
    dcp.save(run.state(), storage_writer=Writer(f"{folder}/alike", scheme=Fisher(relative_error=0.1)))
    results["restores"] = directories.read_directory_manifest(f"{folder}/alike").lossy_restores

    # and all of them from elsewhere
    for name in ("step-1", "step-2"):
        dcp.load(run.state(), storage_reader=Reader(f"{folder}/alike"))
        dcp.save(run.state(), storage_writer=Writer(f"{folder}/other/{name}", scheme=Fisher(relative_error=0.1)))
        reset_chains()
    results["elsewhere"] = directories.read_directory_manifest(f"{folder}/other/step-2").lossy_restores

    mesh = training.mesh_of(range(width))
    summands = {"x": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
    results["summands"] = error_of(lambda: dcp.save(summands, storage_writer=Writer(f"{folder}/summands")))

    for number, name in enumerate(("step-1", "step-01", "step-001", "step-0001")):
        dcp.save({"x": torch.full((3,), number)}, storage_writer=Writer(f"{folder}/many/{name}"))
    results["newest"] = latest_valid(f"{folder}/many").name
    dcp.save({"x": torch.ones(3)}, storage_writer=Writer(f"{folder}/many/2\\u00b2"))
    results["newer"] = latest_valid(f"{folder}/many").name
    training.done(rank, folder, results)
"""


def test_no_rank_waits_for_one_with_another_configuration(tmp_path: Path) -> None:
    results = ranks(UNLIKE, 2, tmp_path)
    for result in results:
        assert result["one loses nothing"] == ["PolicyError"]
        assert result["one has no model"] == ["PolicyError"]
        assert result["alike"] == []
        assert result["restores"] == 1
        assert result["elsewhere"] == 2
        assert result["summands"] == ["ValueError"]  # torch says so
        assert result["newest"] == results[0]["newest"]
        assert result["newer"] == "2²"  # saved last, whatever digits its name has
