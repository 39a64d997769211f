"""torch.distributed.checkpoint on several ranks: other numbers of them, other layouts, and all agreeing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.processes import ranks

SAVES_AND_LOADS = """
import logging, os, shutil
import torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, Writer, latest_valid, load, reset_chains

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    results = {kind.__name__: kind(rank, folder) for kind in (world, hybrid, parallel, boxes, agreed)}
    training.done(rank, folder, results)

def world(rank, folder):
    "Saved on two ranks, thrice; loaded on one to four; saved on by three."
    parts = [training.mesh_of(range(n)) for n in (1, 2, 3, 4)]
    want, got = [], {}
    if rank < 2:
        run = training.Run(parts[1])
        for step in range(3):
            run.train(2)
            state = run.state()
            dcp.save(state, checkpoint_id=f"{folder}/world/step-{step}", storage_writer=Writer(),
                     process_group=parts[1].get_group())
            want.append(training.digest(state))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{folder}/world/step-0")
    dist.barrier()
    for mesh in parts:
        if rank < mesh.size():
            step = 1 + mesh.size() % 2
            run = training.Run(mesh, seed=7)
            run.train(1)
            reader = Reader(f"{folder}/world/step-{step}")
            state = run.restore(storage_reader=reader, process_group=mesh.get_group())
            got[f"{mesh.size()} at {step}"] = training.digest(state)
    resumed = None
    if rank < 3:
        run = training.Run(parts[2], seed=7)
        run.train(1)
        run.restore(storage_reader=Reader(f"{folder}/world/step-2"), process_group=parts[2].get_group())
        run.train(1)
        dcp.save(run.state(), storage_writer=Writer(f"{folder}/world/step-3"), process_group=parts[2].get_group())
        again = training.Run(parts[2], seed=8)
        again.train(1)
        again.restore(storage_reader=Reader(f"{folder}/world/step-3"), process_group=parts[2].get_group())
        resumed = [training.digest(run.state()), training.digest(again.state())]
    depths = [directories.verify_directory(f"{folder}/world/step-{step}", deep=True).depth for step in (1, 2)]
    return want, got, training.digest(load(f"{folder}/world/step-2")), depths, resumed

def hybrid(rank, folder):
    "Two replicas of two shards each; then plain shards over four ranks, and over two."
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    run = training.Run(mesh)
    want = []
    for step in range(2):
        run.train(2)
        dcp.save(run.state(), storage_writer=Writer(f"{folder}/hybrid/step-{step}"))
        want.append(training.digest(run.state()))
    got = []
    four = training.mesh_of(range(4))
    for kind in (mesh, four):
        other = training.Run(kind, seed=5)
        other.train(1)
        got.append(training.digest(other.restore(storage_reader=Reader(f"{folder}/hybrid/step-1"))))
    return want, got, directories.read_directory_manifest(f"{folder}/hybrid/step-1").depth

def parallel(rank, folder):
    "Columns and rows of a layer on other ranks, and shards of these; then plain shards."
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    def cut(model):
        parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    run, got = training.Run(cut, inner=132), []
    for step in range(2):
        run.train(2)
        dcp.save(run.state(), storage_writer=Writer(f"{folder}/parallel/step-{step}"))
    for kind in (cut, training.mesh_of(range(4))):
        other = training.Run(kind, seed=5, inner=132)
        other.train(1)
        got.append(training.digest(other.restore(storage_reader=Reader(f"{folder}/parallel/step-1"))))
    return training.digest(run.state()), got

LAYOUTS = {
    "rows": (4, [Shard(0)]), "columns": (4, [Shard(1)]), "copies": (4, [Replicate()]),
    "tiles": ((2, 2), [Shard(0), Shard(1)]), "transposed tiles": ((2, 2), [Shard(1), Shard(0)]),
}

def boxes(rank, folder):
    "Uneven, and with more ranks than rows or columns; from each layout to itself and two others."
    torch.manual_seed(3)
    wholes = {"wide": torch.randn(37, 301), "flat": torch.randn(3, 50), "thin": torch.randn(90, 2),
              "cube": torch.randn(5, 6, 7), "empty": torch.empty(0, 4)}
    kinds = {name: (DeviceMesh("cpu", torch.arange(4).reshape(shape)), how) for name, (shape, how) in LAYOUTS.items()}
    wrong = []
    for name, (mesh, how) in kinds.items():
        for step in range(2):
            state = {key: distribute_tensor(x + step, mesh, how) for key, x in wholes.items()}
            dcp.save(state, storage_writer=Writer(f"{folder}/{name}/step-{step}"))
        place = [*kinds].index(name)
        for other, (mesh2, how2) in ([*kinds.items()] * 2)[place : place + 3]:
            target = {key: distribute_tensor(torch.zeros_like(x), mesh2, how2) for key, x in wholes.items()}
            dcp.load(target, storage_reader=Reader(f"{folder}/{name}/step-1"))
            found = {key: x.full_tensor() for key, x in target.items()}
            wrong += [(name, other, key) for key, x in wholes.items() if not torch.equal(found[key], x + 1)]
        found = load(f"{folder}/{name}/step-1")
        wrong += [(name, key) for key, x in wholes.items() if not torch.equal(found[key], x + 1)]
        reset_chains()
    return wrong

def agreed(rank, folder):
    "As if each rank had a disk of its own."
    mine, results, handler = f"{folder}/disk-{rank}", [], logging.Handler()
    handler.emit = lambda record: results.append(record.getMessage())
    logging.getLogger("shrinkpoint").addHandler(handler)
    for step in (8, 9, 10, 11):
        dcp.save({"x": torch.full((4,), step)}, storage_writer=Writer(f"{mine}/step-{step}"), no_dist=True)
    if rank == 1:
        os.remove(f"{mine}/step-11/shrinkpoint.json")
    if rank == 0:
        os.remove(f"{mine}/step-10/rank-00000.safetensors")
    return latest_valid(mine).name, sorted(set(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(SAVES_AND_LOADS, 4, tmp_path_factory.mktemp("layouts"))


def test_any_number_of_ranks_loads_what_two_have_saved(results: list[dict[str, Any]]) -> None:
    (want, _, alone, depths, _) = results[0]["world"]
    assert len(set(want)) == 3
    for rank in range(4):
        got = results[rank]["world"][1]
        assert set(got) == {f"{n} at {step}" for n in range(1, 5) if rank < n for step in (1 + n % 2,)}
        for where, digest in got.items():
            assert digest == want[int(where[-1])], where
    assert alone == want[2]
    assert depths == [1, 2]


def test_a_run_resumes_with_another_number_of_ranks(results: list[dict[str, Any]]) -> None:
    for rank in range(3):
        saved, loaded = results[rank]["world"][4]
        assert saved == loaded


def test_replicas_are_stored_once_and_load_as_shards(results: list[dict[str, Any]]) -> None:
    for rank in range(4):
        want, got, depth = results[rank]["hybrid"]
        assert got == [want[1]] * 2
        assert depth == 1


def test_tensor_parallel_shards_load_as_they_were_and_as_plain_ones(results: list[dict[str, Any]]) -> None:
    for result in results:
        want, got = result["parallel"]
        assert got == [want] * 2


def test_every_layout_loads_as_others(results: list[dict[str, Any]]) -> None:
    assert [result["boxes"] for result in results] == [[]] * 4


def test_all_ranks_resume_from_the_newest_checkpoint_that_is_valid_on_all(results: list[dict[str, Any]]) -> None:
    for result in results:
        name, aloud = result["agreed"]
        assert name == "step-9"
        assert len(aloud) == 2
        assert "step-10 is passed over: rank 0" in aloud[0]
        assert "step-11 is passed over: rank 1" in aloud[1]


FAULTS = """
import os, torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.futures import Future
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, Writer, latest_valid

class Fault(Exception):
    pass

def faulty(base, step, on):
    class Faulty(base):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name != step or dist.get_rank() != on:
                return found
            def fail(*args, **kwargs):
                if step.endswith("_data") and os.environ.get("LATE"):
                    future = Future()
                    future.set_exception(Fault(name))
                    return future
                raise Fault(name)
            return fail
        def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        def read_metadata(self, *args, **kwargs):
            return super().read_metadata(*args, **kwargs)
    return Faulty

WRITER = ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"]
READER = ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"]

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    mesh = training.mesh_of(range(width))
    run = training.Run(mesh)
    run.train(1)
    dcp.save(run.state(), storage_writer=Writer(f"{folder}/step-0"))
    want = training.digest(run.state())
    raised, loaded, depths, number = {}, [], [], 0
    for step in WRITER:
        for on in (0, 1):
            if on and step in ("prepare_global_plan", "finish"):
                continue  # nobody calls these there
            number += 1
            run.train(1)
            place = f"{folder}/step-{number}" if number % 2 else f"{folder}/step-0"
            try:
                dcp.save(run.state(), storage_writer=faulty(Writer, step, on)(place))
                raised[f"{step} {on}"] = "nothing"
            except dcp.api.CheckpointException as error:
                raised[f"{step} {on}"] = repr([(type(e).__name__, str(e), at) for at, (e, _) in error.failures.items()])
            other = training.Run(mesh, seed=4)
            other.train(1)
            found = latest_valid(folder)
            loaded.append(training.digest(other.restore(storage_reader=Reader(found))) == want)
    dcp.save(run.state(), storage_writer=Writer(f"{folder}/step-0"))
    want = training.digest(run.state())
    directories.verify_directory(f"{folder}/step-0", deep=True)
    for step in READER:
        for on in (0, 1):
            if on and step == "prepare_global_plan":
                continue
            os.environ["LATE"] = "1" if step == "read_data" and on else ""
            state = run.state()
            try:
                dcp.load(state, storage_reader=faulty(Reader, step, on)(f"{folder}/step-0"))
                raised[f"{step} {on} load"] = "nothing"
            except dcp.api.CheckpointException as error:
                raised[f"{step} {on} load"] = repr([at for at in error.failures])
    run.restore(storage_reader=Reader(f"{folder}/step-0"))
    loaded.append(training.digest(run.state()) == want)
    training.done(rank, folder, [raised, loaded])
"""


@pytest.mark.filterwarnings("error")
def test_a_failure_of_any_rank_in_any_step_is_an_error_of_all_and_costs_no_checkpoint(tmp_path: Path) -> None:
    results = ranks(FAULTS, 2, tmp_path)
    assert results[0] == results[1]
    raised, loaded = results[0]
    assert all(loaded)
    assert len(raised) == 8 + 9
    for what, found in raised.items():
        step, on, *loading = what.split()
        assert found == (repr([int(on)]) if loading else repr([("Fault", step, int(on))])), what
