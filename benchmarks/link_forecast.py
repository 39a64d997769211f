"""What the model behind `recommend` says of the links that link_latency.py measured, and what it would have chosen.

python benchmarks/link_forecast.py results/link_latency.json    # again, from the costs that are kept there
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from link_tables import PAYLOAD

from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL
from shrinkpoint_lab.forecast.average_cost import TORCH_BF16_HOOK
from shrinkpoint_lab.forecast.message_cost import measure_cost
from shrinkpoint_lab.forecast.recommendation import (
    DDP_CANDIDATES,
    DEFAULT_CANDIDATES,
    NO_COMPRESSION,
    measure_ddp,
    rank_candidates,
)
from shrinkpoint_lab.forecast.step_model import CandidateCost, MessageCost, Workload

FREE = "0:0"
"""The link without a limit, whose uncompressed step predictions start from."""
KINDS = ("ddp", "1F1B", "GPipe")
"""What the model knows: not schedules of several stages a rank."""
SPECS = {
    "pipeline": ("bf16", "q8:64", "q4:64"),
    "ddp": ("bf16", "q8:64", "q4:64", "lowrank4(q8:64)", "lowrank16(q8:64)"),
}
HOOK = "bf16 hook"


def measure_costs(figures: dict[str, Any]) -> None:
    """Measure the costs of all candidates for what the links have timed, and keep them with the figures."""
    torch.set_num_threads(1)
    for key in figures["links"]:
        kind, ranks, _ = key.split(", ")
        name = _cost_name(kind, ranks)
        if kind not in KINDS or "nodes" in ranks or name in figures.setdefault("costs", {}):
            continue
        if kind == "ddp":
            load, costs = _measure_ddp(int(ranks.split()[0]), figures)
            measured = {"all_reduce_seconds": load.all_reduce_seconds, "window": load.window}
            figures["costs"][name] = measured | {one.name: asdict(one) for one in costs}
        else:
            figures["costs"][name] = {spec: asdict(_measure(spec, figures)) for spec in SPECS["pipeline"]}


def predict(figures: dict[str, Any]) -> None:
    """Add to each row the predicted seconds, and to each link what would have been chosen there."""
    for key, cases in figures["links"].items():
        kind, ranks, link = key.split(", ")
        free = figures["links"].get(f"{kind}, {ranks}, {FREE}", {}).get("none")
        costs = figures.get("costs", {}).get(_cost_name(kind, ranks))
        if kind not in KINDS or free is None or link == FREE or costs is None or "nodes" in ranks:
            continue
        load = _workload(kind, int(ranks.split()[0]), link, free["seconds"], figures)
        load = replace(load, all_reduce_seconds=costs.get("all_reduce_seconds", 0.0), window=costs.get("window"))
        nbytes = 4 * _message_numel(kind, figures)
        found = {name: _read_cost(saved) for name, saved in costs.items() if isinstance(saved, dict)}
        for name, row in cases.items():
            cost = found.get(TORCH_BF16_HOOK if name == HOOK else name)
            if name == "none":
                row["predicted"] = load.uncompressed_seconds(nbytes, nbytes)
            elif cost is not None:
                row["predicted"] = load.step_seconds(cost)
        candidates = [found[str(one)] for one in (DDP_CANDIDATES if kind == "ddp" else DEFAULT_CANDIDATES)]
        best = rank_candidates(load, candidates, uncompressed=(nbytes, nbytes)).best
        figures.setdefault("chosen", {})[key] = {NO_COMPRESSION: "none", TORCH_BF16_HOOK: HOOK}.get(best, best)


def _cost_name(kind: str, ranks: str) -> str:
    return f"{kind}, {ranks}" if kind == "ddp" else "pipeline"


def _measure(spec: str, figures: dict[str, Any]) -> CandidateCost:
    numel = _message_numel("1F1B", figures)
    cost = measure_cost(spec, torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    return CandidateCost(spec, cost, cost)


def _measure_ddp(world: int, figures: dict[str, Any]) -> tuple[Workload, list[CandidateCost]]:
    side, random = round((figures["parameters"] / 4) ** 0.5), torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=random) for _ in range(4) for shape in ((side, side), (side,))]
    load = _workload("ddp", world, "1000:0", 0.0, figures)
    return measure_ddp(load, (TORCH_BF16_HOOK, *SPECS["ddp"]), gradients, figures["bucket_mb"] * 2**20, repeats=7)


def _read_cost(saved: dict[str, Any]) -> CandidateCost:
    pair = (MessageCost(**saved[name]) for name in ("forward", "backward"))
    return CandidateCost(saved["name"], *pair, transport=saved["transport"])


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


def main() -> None:
    path = Path(sys.argv[1])
    figures = json.loads(path.read_text())
    predict(figures)
    path.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
