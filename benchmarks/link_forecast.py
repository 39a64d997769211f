"""What the model behind `recommend` says of the links that link_latency.py measured, and what it would have chosen."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from link_tables import PAYLOAD

from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL
from shrinkpoint.comm.recommendation import DEFAULT_CANDIDATES, NO_COMPRESSION, measure_cost, rank_candidates
from shrinkpoint.comm.step_model import CandidateCost, Workload

FREE = "0:0"
"""The link without a limit, whose uncompressed step predictions start from."""
KINDS = ("ddp", "1F1B", "GPipe")
"""What the model knows: not schedules of several stages a rank."""
SPECS = ("bf16", "q8:64", "q4:64")


def predict(figures: dict[str, Any]) -> None:
    """Add to each row the predicted seconds, and to each link what would have been chosen there."""
    torch.set_num_threads(1)
    for key, cases in figures["links"].items():
        kind, ranks, link = key.split(", ")
        free = figures["links"].get(f"{kind}, {ranks}, {FREE}", {}).get("none")
        if kind not in KINDS or free is None or link == FREE:
            continue
        numel = _message_numel(kind, figures)
        load = _workload(kind, int(ranks.split()[0]), link, free["seconds"], figures)
        for name, row in cases.items():
            if name == "none":
                row["predicted"] = load.uncompressed_seconds(4 * numel, 4 * numel)
            elif name == "bf16 hook":  # torch's buckets, half as large
                row["predicted"] = load.uncompressed_seconds(2 * numel, 2 * numel)
            elif name in SPECS:
                row["predicted"] = load.step_seconds(_cost(name, numel))
        candidates = [_cost(str(spec), numel) for spec in DEFAULT_CANDIDATES]
        best = rank_candidates(load, candidates, uncompressed=(4 * numel, 4 * numel)).best
        figures.setdefault("chosen", {})[key] = "none" if best == NO_COMPRESSION else best


@cache
def _cost(spec: str, numel: int) -> CandidateCost:
    cost = measure_cost(spec, torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    return CandidateCost(spec, cost, cost)


def _message_numel(kind: str, figures: dict[str, Any]) -> int:
    """The number of values of all gradients, or of the activation of a micro-batch."""
    side = round((figures["parameters"] / 4) ** 0.5)
    return 4 * side * (side + 1) if kind == "ddp" else int(figures["batch"]) * 128 * 1024


def _workload(kind: str, world: int, link: str, compute: float, figures: dict[str, Any]) -> Workload:
    mbps, delay_ms = (float(number) for number in link.split(":"))
    common = {"compute": compute, "world_size": world, "latency": delay_ms / 1000}
    if kind != "ddp":
        micro_batches = int(figures["micro_batches"])
        return Workload("pipeline", PAYLOAD * mbps, micro_batches=micro_batches, schedule=kind, **common)  # type: ignore[arg-type]
    numel = _message_numel(kind, figures)
    layers = 4  # each larger than a bucket
    return Workload("ddp", PAYLOAD * mbps, buckets=layers, segments=-(-numel // SEGMENT_NUMEL), **common)  # type: ignore[arg-type]
