"""Lossy schemes on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.processes import ranks

LOSSY = """
import warnings
import torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from shrinkpoint import Fisher, Inshrinkerator
from shrinkpoint.errors import LossWarning
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, Writer, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def error_of(save):
    try:
        save()
        return "nothing"
    except dcp.api.CheckpointException as error:
        return sorted({f"{type(one).__name__}: {one}" for one, _ in error.failures.values()})

def fisher():
    return Fisher(relative_error=0.05)

def far(folder, run):
    found = load(folder)["model"]
    whole = {name: getattr(x, "full_tensor", lambda x=x: x)().detach() for name, x in run.model.named_parameters()}
    return {name: float((found[name] - x).norm() / x.norm()) for name, x in whole.items()}

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    warnings.simplefilter("ignore", LossWarning)
    mesh, one, group = training.mesh_of(range(width)), dist.new_group([0]), dist.new_group()
    x, results = torch.randn(64, 48, generator=torch.Generator().manual_seed(5)), {}

    run = training.Run(mesh)
    for step in range(3):
        run.train(4)
        place = f"{folder}/fisher/step-{step}"
        dcp.save(run.state(), storage_writer=Writer(place, scheme=fisher()))
        exact = f"{folder}/exact/step-{step}"
        dcp.save(run.state(), storage_writer=Writer(exact))
    made, plain = (directories.verify_directory(one, deep=True) for one in (place, exact))
    results["manifest"] = [made.scheme, made.is_lossy, made.lossy_restores, made.depth]
    results["far"], results["exact"] = far(place, run), far(exact, run)
    results["bytes"] = [made.stored_bytes, plain.stored_bytes]

    other = training.Run(mesh, seed=3)
    other.train(1)
    other.restore(storage_reader=Reader(place))
    other.train(1)
    dcp.save(other.state(), storage_writer=Writer(f"{folder}/fisher/step-3", scheme=fisher()))
    results["restores"] = directories.read_directory_manifest(f"{folder}/fisher/step-3").lossy_restores

    future = dcp.async_save(run.state(), process_group=group,
                            storage_writer=Writer(f"{folder}/beside", scheme=fisher(), group=group))
    future.result()
    results["beside"] = directories.read_directory_manifest(f"{folder}/beside").is_lossy

    def loss(model):
        with torch.no_grad():
            return float((model(x) - x.sum(1, keepdim=True)).square().mean())
    measuring = lambda: Fisher(budget="2%", evaluate=loss)
    before = training.digest(run.state())
    dcp.save(run.state(), storage_writer=Writer(f"{folder}/measured", scheme=measuring(), model=run.model))
    results["untouched"] = training.digest(run.state()) == before
    base = loss(run.model)
    run.restore(storage_reader=Reader(f"{folder}/measured"))
    results["rise"] = loss(run.model) / base - 1
    results["no model"] = error_of(lambda: dcp.save(run.state(), storage_writer=Writer(
        f"{folder}/a", scheme=measuring())))
    results["trains on"] = error_of(lambda: dcp.async_save(run.state(), process_group=group, storage_writer=Writer(
        f"{folder}/b", scheme=measuring(), group=group, model=run.model)).result())

    def split(model):
        parts = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (width,)), parts)
    parallel, replicas = training.Run(split, inner=132), training.Run(None)
    parallel.train(1)
    before = training.digest(parallel.state())
    writer = Writer(f"{folder}/parallel", scheme=measuring(), model=parallel.model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dcp.save(parallel.state(), storage_writer=writer)
    results["parallel"] = {
        "untouched": training.digest(parallel.state()) == before,
        "far": far(f"{folder}/parallel", parallel),
        "said": [str(one.message) for one in said],
    }
    def split_one(model):
        mesh = init_device_mesh("cpu", (width,))
        parallelize_module(model, mesh, {"first": ColwiseParallel(output_layouts=Replicate())})
    loose = training.Run(split_one, inner=132)
    loose.train(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dcp.save(loose.state(), storage_writer=Writer(f"{folder}/loose", scheme=measuring(), model=loose.model))
    results["loose"] = [str(one.message) for one in said]
    results["replicas"] = error_of(lambda: dcp.save(replicas.state(), storage_writer=Writer(
        f"{folder}/replicas", scheme=measuring(), model=replicas.model)))

    odd = run.state() | ({"odd": bytearray(2)} if rank == 1 else {"even": 1})
    results["odd"] = error_of(lambda: dcp.save(odd, storage_writer=Writer(f"{folder}/odd", scheme=fisher())))
    results["alone"] = error_of(lambda: dcp.save({f"x{rank}": torch.ones(9)}, no_dist=True,
                             storage_writer=Writer(f"{folder}/alone-{rank}", scheme=fisher())))
    results["wrong"] = error_of(lambda: dcp.save(run.state(), storage_writer=Writer(
        f"{folder}/wrong", scheme=fisher(), group=one)))
    training.done(rank, folder, results)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(LOSSY, 2, tmp_path_factory.mktemp("lossy"))


def test_shards_are_written_lossily_and_the_manifest_says_so(results: list[dict[str, Any]]) -> None:
    scheme, is_lossy, restores, depth = results[0]["manifest"]
    assert (is_lossy, restores, depth) == (True, 0, 2)
    assert scheme == "fisher"
    assert max(results[0]["exact"].values()) == 0
    assert 0 < max(results[0]["far"].values()) < 0.2
    lossy, exact = results[0]["bytes"]
    assert lossy < exact / 2


def test_a_lossy_restore_is_counted(results: list[dict[str, Any]]) -> None:
    assert [result["restores"] for result in results] == [1, 1]


def test_a_lossy_save_can_be_asynchronous(results: list[dict[str, Any]]) -> None:
    assert results[0]["beside"]


def test_a_model_in_shards_is_measured_and_left_as_it_was(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["untouched"]
        assert abs(result["rise"]) < 0.025


def test_weights_with_copies_stay_exact_where_a_model_in_parts_is_measured(results: list[dict[str, Any]]) -> None:
    for result in (result["parallel"] for result in results):
        exact = {name for name, distance in result["far"].items() if not distance}
        assert result["untouched"] and exact == {"second.bias", "last.weight", "last.bias"}
    texts = [text for result in results for text in result["parallel"]["said"]]
    assert any("weights that several ranks hold stay exact: model.last.weight" in text for text in texts), texts
    texts = [text for result in results for text in result["loose"] if "stay exact" in text]
    assert any("second.weight" in text for text in texts), texts
    assert all("several ranks hold" in text for text in texts), texts


def test_replicas_without_weights_of_their_own_are_not_measured(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "copies of it on ranks that do not save it" in result["replicas"][0]


def test_a_model_that_is_not_there_or_trains_on_is_not_measured(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "PolicyError: evaluate" in result["no model"][0]
        assert "async_save with a scheme that evaluates" in result["trains on"][0]


def test_a_rank_that_fails_before_planning_does_not_block_the_others(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all("extra" in text or "odd" in text for text in result["odd"])
        assert any(text.startswith("StateError") for text in result["odd"])


def test_ranks_that_save_alone_decide_alone(results: list[dict[str, Any]]) -> None:
    assert [result["alone"] for result in results] == ["nothing"] * 2


def test_another_group_than_the_one_that_saves_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all("pass group=" in text.lower() for text in result["wrong"])
