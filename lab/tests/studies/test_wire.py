"""Promise: steps before compression begins have the bits of an uncompressed training, and count as 32 bits a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lab.studies import workloads
from lab.studies.wire import grid, image, run, table, task

STEPS = 8


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Puts back what a run sets for its process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_compression_begins_after_the_warm_up() -> None:
    plain, late, whole = (_record(*job) for job in (("", 0.0), ("top10", 0.5), ("top10", 0.0)))
    half = STEPS // 2
    losses = [record["train loss"] for record in (plain, late, whole)]
    assert losses[1][:half] == losses[0][:half]
    assert losses[1][half] != losses[0][half]
    assert losses[2][0] != losses[0][0]
    sent = {name: link["messages"] for name, link in late["links"].items()}
    assert sent == {"0 forward": half, "0 backward": half}


def test_what_crosses_before_compression_begins_has_32_bits() -> None:
    late, whole = (_record("top10", warmup) for warmup in (0.5, 0.0))
    for way in ("forward", "backward"):
        assert late["bits of the last epoch"][way] == whole["bits"][way]
        assert late["bits"][way] == pytest.approx(16 + whole["bits"][way] / 2)
    assert late["on"] is not None
    assert late["off"] is not None


def test_the_grid_names_its_runs_once_and_each_by_its_warm_up() -> None:
    jobs = grid.grid(False)
    assert len(jobs) == len(set(jobs))
    warm = list(grid.chosen(jobs, ["warmup"], None))
    assert warm
    assert all(job.warmup for job in warm)
    assert all(str(job).endswith("%") and not job.key for job in warm)


def test_another_network_for_images_is_a_line() -> None:
    assert image.TASKS["image"] == image.ImageTask(still=False)
    narrow, wide = (
        image.ResNet18(kind.width, kind.stem, kind.half) for kind in map(image.TASKS.get, ("image", "wide"))
    )
    assert sum(p.numel() for p in narrow.parameters()) == 176_402
    assert wide.layer4[-1].conv2.weight.shape == (256, 256, 3, 3)
    assert wide(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert wide.layer1(torch.zeros(1, 32, 32, 32)).dtype == torch.float32


def test_runs_of_another_processor_stay_until_the_newer_one_has_their_seeds() -> None:
    older = [_run(seed, 50, cpu="Xeon", code=None) for seed in (0, 1, 2)]
    again = _run(0, 49, cpu="Xeon")  # one seed beside three
    newer = [_run(0, 48), _run(1, 47), _run(2, 46)]
    assert _shown([*older, again, newer[0]]) == [[50, 50, 50], [48]]
    assert _shown([*older, again, *newer]) == [[48, 47, 46]]


def test_operators_are_grouped_by_kind() -> None:
    kinds = {
        "range": [("", ""), ("q4", "q8")],
        "groups": [("q4:64", "q8:64"), ("h64(n3:64)", "h64(n3:64)"), ("q4:row", "q4:row")],
        "topk": [("top10", ""), ("", "top10"), ("top10:q4:64", "same:q4:64")],
        "feedback": [("ef(top10)", "ef(top10)"), ("aq(q2:64)", "q4:64"), ("ef21(top10)", "ef21(top10)")],
    }
    for kind, pairs in kinds.items():
        assert [table.section(pair) for pair in pairs] == [kind] * len(pairs)


def _shown(runs: list[dict[str, Any]]) -> list[list[float]]:
    return [[one["on"] for one in batch] for batch in table.batches(runs)]


def _run(seed: int, on: float, *, cpu: str = "EPYC", code: str | None = "0123456789ab") -> dict[str, Any]:
    return {"settings": {"seed": seed}, "cpu": cpu, "on": on} | ({"code": code} if code else {})


def _record(spec: str, warmup: float) -> dict[str, Any]:
    found: dict[str, Any] = run.Play(grid.Job("image", 0, spec, spec, warmup=warmup), _task()).run()
    return found


def _task() -> Any:
    """A perceptron in two stages, eight steps in two epochs."""

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

    return task.Task("image", "top-1 %", True, ("0",), STEPS, 2, build, loss, test)
