"""Promise: steps before compression begins have the bits of an uncompressed training, and count as 32 bits a value."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.paths import REPOSITORY
from torch import nn

STEPS = 8


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The study; what it sets for the process is put back."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield importlib.import_module("wire")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_compression_begins_after_the_warm_up(wire: ModuleType) -> None:
    plain, late, whole = (_record(wire, *job) for job in (("", 0.0), ("top10", 0.5), ("top10", 0.0)))
    half = STEPS // 2
    losses = [record["train loss"] for record in (plain, late, whole)]
    assert losses[1][:half] == losses[0][:half]
    assert losses[1][half] != losses[0][half]
    assert losses[2][0] != losses[0][0]
    sent = {name: link["messages"] for name, link in late["links"].items()}
    assert sent == {"0 forward": half, "0 backward": half}


def test_what_crosses_before_compression_begins_has_32_bits(wire: ModuleType) -> None:
    late, whole = (_record(wire, "top10", warmup) for warmup in (0.5, 0.0))
    for way in ("forward", "backward"):
        assert late["bits of the last epoch"][way] == whole["bits"][way]
        assert late["bits"][way] == pytest.approx(16 + whole["bits"][way] / 2)
    assert late["on"] is not None
    assert late["off"] is not None


def test_the_grid_names_its_runs_once_and_each_by_its_warm_up(wire: ModuleType) -> None:
    grid = importlib.import_module("wire_grid")
    jobs = grid.grid(False)
    assert len(jobs) == len(set(jobs))
    warm = list(grid.chosen(jobs, ["warmup"], None))
    assert warm
    assert all(job.warmup for job in warm)
    assert all(str(job).endswith("%") and not job.key for job in warm)
    rows = importlib.import_module("wire_findings")
    plain = grid.Job("image", 0, "top10", "top10")
    late = grid.Job("image", 0, "top10", "top10", warmup=0.2)
    study = rows.Study("image", [_result(plain, 40.0), _result(late, 45.0)])
    assert [row.on for row in study.rows.values()] == [[40.0]]
    assert [row.name for row in study.warm.values()] == ["top10 / top10 after 20%"]


def test_another_network_for_images_is_a_line(wire: ModuleType) -> None:
    images = importlib.import_module("wire_image")
    assert images.TASKS["image"] == images.ImageTask(still=False)
    narrow, wide = (
        images.ResNet18(kind.width, kind.stem, kind.half) for kind in map(images.TASKS.get, ("image", "wide"))
    )
    assert sum(p.numel() for p in narrow.parameters()) == 176_402
    assert wide.layer4[-1].conv2.weight.shape == (256, 256, 3, 3)
    assert wide(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert wide.layer1(torch.zeros(1, 32, 32, 32)).dtype == torch.float32


def _record(wire: ModuleType, spec: str, warmup: float) -> dict[str, Any]:
    grid = importlib.import_module("wire_grid")
    found: dict[str, Any] = wire.Play(grid.Job("image", 0, spec, spec, warmup=warmup), _task()).run()
    return found


def _result(job: Any, on: float) -> dict[str, Any]:
    bits = {"forward": 3.7, "backward": 3.7}
    links = {"0 forward": {"relative_error": 0.5}}
    rest = {"bits": bits, "bits of the last epoch": bits, "links": links, "train CPU seconds": 1.0, "start": 10.0}
    return {"settings": asdict(job), "on": on, "off": on, **rest}


def _task() -> Any:
    """A perceptron in two stages, eight steps in two epochs."""
    tasks, workloads = importlib.import_module("wire_task"), importlib.import_module("workloads")

    def build(seed: int) -> Any:
        model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

        def draw(generator: torch.Generator, number: int) -> Any:
            return torch.randn(16, 12, generator=generator), torch.arange(16) % 3, torch.arange(16)

        return workloads.Course(model, optimizer, scheduler, workloads.Stream(draw, seed))

    def loss(model: nn.Module, drawn: Any) -> Any:
        return nn.functional.cross_entropy(model(drawn[0]), drawn[1])

    def test(model: nn.Module) -> float:
        with torch.no_grad():
            return float(model(torch.ones(2, 12)).sum())

    return tasks.Task("image", "top-1 %", True, ("0",), STEPS, 2, build, loss, test)
