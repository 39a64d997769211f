"""Gradients of a model in parts, recorded for a scheme that all ranks decide together."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

RECORDED = """
import warnings
import torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Partial
from shrinkpoint import Fisher, Inshrinkerator
from shrinkpoint.errors import LossWarning
from shrinkpoint.store import directory as directories
from shrinkpoint.train import GradientRecorder
from shrinkpoint.train.dcp import Writer

x = torch.randn(64, 48, generator=torch.Generator().manual_seed(5))

def loss(model):
    with torch.no_grad():
        return float((model(x) - x.sum(1, keepdim=True)).square().mean())

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    warnings.simplefilter("ignore", LossWarning)
    results, means = {}, {}
    mesh = training.mesh_of(range(width))
    for kind in ("whole", "parts"):
        run = training.Run(mesh if kind == "parts" else None)
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
        recorder = GradientRecorder(run.model, squares=True).attach(run.optimizer)
        run.train(8)
        means[kind] = recorder.square
        schemes = {"fisher": Fisher(nats=1e-3, gradients=recorder, terms=16)}
        if kind == "parts":
            schemes["inshrinkerator"] = Inshrinkerator(threshold=0.5, gradients=recorder, evaluate=loss)
        for name, scheme in schemes.items():
            place = f"{folder}/{kind}-{name}"
            dcp.save(run.state(), storage_writer=Writer(place, scheme=scheme, model=run.model))
            results[f"{kind} {name}"] = directories.read_directory_manifest(place).loss
    wrong = []
    for name, parameter in run.model.named_parameters():
        if parameter.to_local().numel():
            mine, whole = means["parts"][name], means["whole"][name]
            part = whole.tensor_split(1)[0].split(-(-whole.shape[0] // width))[rank]
            if type(mine) is not torch.Tensor or not torch.allclose(mine, part, rtol=1e-4):
                wrong.append(name)
    results["wrong"], results["recorded"] = wrong, len(means["parts"])

    layer = torch.nn.Linear(2, 2, bias=False)  # its gradient is not summed yet
    layer.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh))
    layer.weight.grad = DTensor.from_local(torch.full((2, 2), 1.0 + rank), mesh, [Partial()])
    recorder = GradientRecorder(layer)
    recorder.after_backward()
    results["summed"] = recorder.mean["weight"].tolist()
    training.done(rank, folder, results)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return ranks(RECORDED, 2, tmp_path_factory.mktemp("recorded"))


def test_each_rank_records_its_part_of_what_one_process_would(results: list[dict]) -> None:
    assert [result["wrong"] for result in results] == [[], []]
    assert [result["recorded"] for result in results] == [6, 4]  # one row is on the first rank
    assert [result["summed"] for result in results] == [[[3.0, 3.0], [3.0, 3.0]]] * 2


def test_a_scheme_gets_the_same_statistics_from_shards_as_from_the_global_tensor(results: list[dict]) -> None:
    whole, parts = results[0]["whole fisher"], results[0]["parts fisher"]
    assert parts["size"] == whole["size"]
    assert parts["tried"][0]["curvature"] == pytest.approx(whole["tried"][0]["curvature"], rel=1e-4)
    assert results[0]["parts inshrinkerator"]["degradation"] <= 0.5
