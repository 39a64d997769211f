"""Bytes and seconds of weight sync of a sharded model: four ranks publish, and ranks with another sharding follow.

    python -m lab.studies.weight_sync.run            # writes results/sharded_sync.json: 15 minutes, 8 GB of memory
    python -m lab.studies.weight_sync.run --quick    # small layers; a minute

The model has layers of the shapes of Qwen2.5-72B at a quarter of its width, 54.8 million bf16 values each, or at half,
219 million. Ranks
publish DTensors of rows (as FSDP2 shards them) through a directory in /dev/shm, and follow in columns. Each rank
compares its shard with the trainer's, bit for bit.

The statistics are those of a step of AdamW in mixed precision. A float32 master weight is uniform between the values
that round to its bf16 weight. It moves by a normal step, whose size is set so that the wanted share of bf16 weights
changes. verl reports 2.1 to 2.6% of weights changed a step of a 72B model, and 8.6 to 10.9 GB sent (pull requests
6974 and 7227).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lab.studies.harness import columns, fork_ranks, machine
from shrinkpoint.sync import Publisher, Subscriber

RANKS, VERSIONS = 4, 3
VERL_VALUES = 72_706_203_648  # of Qwen2.5-72B
SHARES = (0.021, 0.026)
MODELS = ("2x2048", "5x2048", "9x2048", "2x4096")
"""Layers and width."""
_CHUNK = 1 << 24  # values that a step is simulated for at a time


def shapes(layers: int, width: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and standard deviation of each weight."""
    inner, keys = 29568 * width // 8192, width // 8
    for layer in range(layers):
        for name, shape in {
            "q_proj": (width, width),
            "k_proj": (keys, width),
            "v_proj": (keys, width),
            "o_proj": (width, width),
            "gate_proj": (inner, width),
            "up_proj": (inner, width),
            "down_proj": (width, inner),
        }.items():
            yield f"layers.{layer}.{name}.weight", shape, 0.015 + 0.005 * (len(name) % 3) + 0.001 * (layer % 5)
        yield f"layers.{layer}.norm.weight", (width,), 0.3


def stepped(weights: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """The weights after a step of this size, relative to its root mean square."""
    out = torch.empty_like(weights)
    pairs = zip(weights.view(-1).split(_CHUNK), out.view(-1).split(_CHUNK), strict=True)
    for before, after in pairs:
        values = before.float()
        ulp = torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - 8)
        values += (torch.rand(values.shape, generator=generator) - 0.5) * ulp
        values += size * torch.randn(values.shape, generator=generator)
        after.copy_(values)
    return out


def step_size(share: float) -> float:
    """The step that changes a share of weights, found on a sample of all standard deviations."""
    generator = torch.Generator().manual_seed(0)
    deviations = [deviation for name, shape, deviation in shapes(5, 64) if len(shape) > 1]
    sample = torch.cat([deviation * torch.randn(1 << 15, generator=generator) for deviation in deviations]).bfloat16()
    low, high = 1e-9, 1e-3
    for _ in range(30):
        middle = (low * high) ** 0.5
        changed = float((stepped(sample, middle, generator) != sample).float().mean())
        low, high = (middle, high) if changed < share else (low, middle)
    return low


def of_rank(rank: int, folder: str, place: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=RANKS)
    group, mesh = dist.new_group([*range(RANKS)]), init_device_mesh("cpu", (RANKS,))
    rows = []
    for layers, width in (map(int, model.split("x")) for model in args.models):
        for share in args.shares:
            where = place / f"{layers}-{width}-{share}"
            row = measure(rank, mesh, group, where, layers, share, width)
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
                shutil.rmtree(where)
            dist.barrier()
    if rank == 0:
        document = {"date": date.today().isoformat(), "machine": machine(), "ranks": RANKS, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")


def measure(
    rank: int, mesh: Any, group: dist.ProcessGroup, where: Path, layers: int, share: float, width: int
) -> dict[str, Any]:
    """Publish some versions, follow them in columns, and return the means over the deltas."""
    generator, size = torch.Generator().manual_seed(rank), step_size(share)
    local = {
        name: drawn((shape[0] // RANKS, *shape[1:]), deviation, generator)
        for name, shape, deviation in shapes(layers, width)
    }
    model = {name: DTensor.from_local(values, mesh, [Shard(0)]) for name, values in local.items()}
    served = {name: columns_of(values.shape, mesh) for name, values in model.items()}
    rows = []
    with Publisher(where, ranks=group, threads=1) as publisher:
        subscriber = Subscriber(where, ranks=group, threads=1)
        keyframe = publisher.publish(model)
        subscriber.update(served)
        for _ in range(VERSIONS):
            changed = advance(local, size, generator)
            report, update = publisher.publish(model), subscriber.update(served)
            assert report.delta_bytes is not None and update is not None
            compare(model, served, mesh)
            rows.append(
                [changed, update.nbytes, report.delta_bytes / RANKS, report.seconds / RANKS, update.pause / RANKS]
            )
    held = sum(part.num_held_bytes for part in subscriber._held.parts) if subscriber._held else 0
    means = torch.tensor(rows, dtype=torch.float64).mean(0)
    dist.all_reduce(means)
    values, delta = keyframe.raw_bytes // 2, float(means[2])
    return {
        "model": f"{layers}x{width}",
        "values": values,
        "changed": float(means[0]) / values,
        "delta_bytes": delta,
        "bits_a_value": 8 * delta / values,
        "delta_bytes_at_72B": delta / values * VERL_VALUES,
        "keyframe_bytes": keyframe.keyframe_bytes,
        "read_bytes_of_all_ranks": float(means[1]),
        "held_share_of_a_rank": held / keyframe.raw_bytes,
        "publish_seconds": float(means[3]),
        "pause_seconds": float(means[4]),
    }


def drawn(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16)
    for part in values.view(-1).split(_CHUNK):
        part.copy_(deviation * torch.randn(part.shape, generator=generator))
    return values


def advance(local: dict[str, Tensor], size: float, generator: torch.Generator) -> int:
    """Take a step in place, and return the number of values that it changed."""
    changed = 0
    for values in local.values():
        after = stepped(values, size, generator)
        changed += int((after != values).sum())
        values.copy_(after)
    return changed


def columns_of(shape: torch.Size, mesh: Any) -> DTensor:
    """Zeros in shards of columns; of a vector, in shards."""
    placement = Shard(1 if len(shape) > 1 else 0)
    return distribute_tensor(torch.zeros(shape, dtype=torch.bfloat16), mesh, [placement], src_data_rank=None)


def compare(model: dict[str, DTensor], served: dict[str, DTensor], mesh: Any) -> None:
    """Raise unless each rank's columns have the bits of the trainer's rows."""
    for name, tensor in model.items():
        expected = tensor.redistribute(mesh, served[name].placements).to_local()
        assert torch.equal(expected.view(torch.int16), served[name].to_local().view(torch.int16)), name


def report(document: dict[str, Any]) -> None:
    head = (
        "model",
        "million values",
        "changed",
        "delta",
        "bits a value",
        "at 72B",
        "held by a rank",
        "publish",
        "pause",
    )
    table = [
        (
            row["model"],
            f"{row['values'] / 1e6:.0f}",
            f"{row['changed']:.2%}",
            f"{row['delta_bytes'] / 1e6:.2f} MB",
            f"{row['bits_a_value']:.4f}",
            f"{row['delta_bytes_at_72B'] / 1e9:.2f} GB",
            f"{row['held_share_of_a_rank']:.1%}",
            f"{row['publish_seconds']:.1f} s",
            f"{1000 * row['pause_seconds']:.0f} ms",
        )
        for row in document["rows"]
    ]
    print(columns(head, table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="layers and width, such as 2x2048")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/sharded_sync.json"))
    parser.add_argument("--report", action="store_true", help="print the table of a file that is there")
    args = parser.parse_args()
    args.models = ["1x512"] if args.quick else args.models
    if not args.report:
        place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            if fork_ranks(RANKS, lambda rank, folder: of_rank(rank, folder, place, args)):
                sys.exit(1)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    report(json.loads(args.out.read_text()))


if __name__ == "__main__":
    main()
