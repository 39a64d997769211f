"""A small model cut into stages, trained in a pipeline of real processes and in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.timeouts import PATIENCE
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from shrinkpoint.comm import compress_pipeline, insert_compression

WIDTH, ROWS, MICRO = 16, 8, 4
CPU = torch.device("cpu")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # torch 2.13 cannot evaluate with these: their turn asks for gradients


def join(rank: int, width: int, folder: str, *, seconds: float = PATIENCE, name: str = "rendezvous") -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=width,
        timeout=timedelta(seconds=seconds),
    )


def parts(count: int, *, seed: int = 0) -> nn.Sequential:
    """`count` stages with different weights; the same in every process."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count))
    )


def batches(steps: int, *, rows: int = ROWS, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(rows, WIDTH, generator=generator) for _ in range(2)) for _ in range(steps)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def held(kind: str, rank: int, ranks: int, stages: int) -> list[int]:
    """Which stages a rank has."""
    if kind in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


def scheduled(kind: str, stages: list[PipelineStage], micro: int = MICRO, **options: Any) -> Any:
    options = {"loss_fn": loss_of, **options}
    generator = schedules.get_schedule_class(kind)
    return generator(stages[0] if kind in ("GPipe", "1F1B") else stages, n_microbatches=micro, **options)


def build(
    kind: str,
    rank: int,
    ranks: int,
    stages: int,
    *,
    micro: int = MICRO,
    seed: int = 0,
    group: Any = None,
    **options: Any,
) -> tuple[Any, dict[int, nn.Module]]:
    """This rank's schedule and modules."""
    model = parts(stages, seed=seed)
    mine = {index: model[index] for index in held(kind, rank, ranks, stages)}
    wrapped = [PipelineStage(module, index, stages, CPU, group=group) for index, module in mine.items()]
    return scheduled(kind, wrapped, micro, **options), mine


def step(schedule: Any, mine: dict[int, nn.Module], last: int, x: Tensor, y: Tensor) -> list[float]:
    """One step of SGD; the losses of the micro-batches on the rank of the last stage."""
    losses: list[Tensor] = []
    given = {"target": y, "losses": losses} if last in mine else {}
    schedule.step(*([x] if 0 in mine else []), **given)
    descend(mine.values())
    return [float(loss.detach()) for loss in losses]


def evaluated(schedule: Any, mine: dict[int, nn.Module], last: int, x: Tensor, y: Tensor) -> Tensor | None:
    """What comes out without training, on the rank of the last stage."""
    output: Tensor | None = schedule.eval(*([x] if 0 in mine else []), **({"target": y} if last in mine else {}))
    return output


def descend(modules: Any, rate: float = 0.1) -> None:
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter -= rate * parameter.grad
                parameter.grad = None


def trained_here(
    stages: int,
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    micro: int = MICRO,
    seed: int = 0,
    ids: Sequence[Tensor] | None = None,
    backwards: bool = False,
    each: Callable[[Any, nn.Module], None] | None = None,
    **how: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: the losses and the final weights.

    Args:
        backwards: gradients of the last micro-batch come first, as with LoopedBFS.
    """
    model = parts(stages, seed=seed)
    points = insert_compression(model, [str(index) for index in range(stages - 1)], micro_batches=micro, **how)
    losses = []
    for number, (x, y) in enumerate(data):
        if ids is not None:
            points.set_sample_ids(ids[number])
        outputs = [model(part) for part in torch.tensor_split(x, micro)]
        found = [loss_of(output, part) for output, part in zip(outputs, torch.tensor_split(y, micro), strict=True)]
        for loss in reversed(found) if backwards else found:
            loss.backward()
        for parameter in model.parameters():
            parameter.grad /= micro
        descend([model])
        losses += [float(loss.detach()) for loss in found]
        if each is not None:
            each(points, model)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def weights(mine: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {f"{index}.{name}": value for index, module in mine.items() for name, value in module.state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that are not bit for bit alike."""
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


def versus(
    kind: str,
    rank: int,
    ranks: int,
    stages: int,
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    per: dict[int, dict[str, Any]] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Train and evaluate in the pipeline and here: what is not alike, and what the links carried."""
    schedule, mine = build(kind, rank, ranks, stages)
    wire = compress_pipeline(schedule, per_link=per, **how)
    losses = [loss for x, y in data for loss in step(schedule, mine, stages - 1, x, y)]
    turns = {
        index: {"forward": None, "backward": None}
        for index in range(stages - 1)
        if len({owner(kind, ranks, stages, index), owner(kind, ranks, stages, index + 1)}) == 1
    }
    output = None if kind in V_SHAPED else evaluated(schedule, mine, stages - 1, *data[0])
    expected: list[Tensor] = []

    def each(points: Any, model: nn.Module) -> None:
        with torch.no_grad():
            expected[:] = [torch.cat([model(part) for part in data[0][0].tensor_split(MICRO)])]

    here = trained_here(
        stages, data, each=each, backwards=kind == "LoopedBFS", per_point={**(per or {}), **turns}, **how
    )
    return {
        "weights": same(weights(mine), here[1]),
        "losses": losses == here[0] if stages - 1 in mine else True,
        "output": output is None or torch.equal(output, expected[0]),
        "bytes": {name: [one.raw_bytes, one.wire_bytes] for name, one in wire.link_stats().items()},
    }


def owner(kind: str, ranks: int, stages: int, stage: int) -> int:
    return next(rank for rank in range(ranks) if stage in held(kind, rank, ranks, stages))


def tell(rank: int, folder: str, reports: Any) -> None:
    """Writes the reports of this rank and waits for the others."""
    Path(folder, f"{rank}.json").write_text(json.dumps(reports))
    dist.barrier()


def failure(call: Callable[[], Any]) -> list[str] | None:
    """What a call raised: the name and the text."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None
