"""What ranks exchange to decide a sharded save: bytes that the busiest rank receives, and number of exchanges.

    python benchmarks/shard_traffic.py             # 5 minutes

Ranks are threads of one process whose messages are counted; tensors are cut by rows, as FSDP2 does. Weights of a small
GPT of width 768 with AdamW's moments. Only what the schemes exchange counts, not what a framework sends to save.
"""

from __future__ import annotations

import argparse
import json
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from scale_states import GPTShapes, state_dicts, training_states

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.plan_shards import plan_shards
from shrinkpoint.sharding.collectives import Collectives
from shrinkpoint.sharding.shard_spec import ShardLayout, ShardSpec
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import OptimizerInfo

SHAPES = GPTShapes(layers=2, width=768, vocabulary=8192)
BINS = {"bins": 16, "embedding_bins": 16, "prune": 0.1, "protect": 0.005}
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "fisher, relative_error=.2": lambda: sp.Fisher(relative_error=0.2),
    "inshrinkerator, config=": lambda: sp.Inshrinkerator(config=BINS),
    "excp": sp.ExCP,
    "lc-checkpoint": sp.LCCheckpoint,
}


class Exchange:
    """What the ranks of one run share: the messages on their way, and how many bytes each has received."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.messages: list[Sequence[bytes]] = [()] * world_size
        self.received, self.count = [0] * world_size, 0


class CountingCollectives(Collectives):
    """The collectives of one thread."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__()
        self._shared, self.rank, self.world_size = exchange, rank, len(exchange.messages)

    def exchange(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        self._shared.messages[self.rank] = messages
        self._shared.barrier.wait()
        received = [sent[self.rank] for sent in self._shared.messages]
        self._shared.barrier.wait()
        self._shared.received[self.rank] += sum(map(len, received)) - len(messages[self.rank])
        self._shared.count += self.rank == 0
        return received


def shard(state: FlatState, rank: int, world_size: int) -> tuple[FlatState, dict[str, ShardSpec]]:
    """A rank's rows of every tensor; scalars are on the first rank."""
    tensors, specs = {}, {}
    for name, tensor in state.tensors.items():
        if tensor.dim() == 0 and rank > 0:
            continue
        shape = tuple(tensor.shape)
        tensors[name], specs[name] = tensor, ShardSpec(name, shape, (0,) * len(shape))
        if shape:
            size = -(-shape[0] // world_size)
            start = min(rank * size, shape[0])
            tensors[name] = tensor[start : start + size]
            specs[name] = ShardSpec(name, shape, (start, *specs[name].offsets[1:]))
    infos = {name: replace(state.infos[name], shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    optimizer_info = _present_moments(state.optimizer_info, tensors)
    kinds = {name: kind for name, kind in state.moment_kinds.items() if name in tensors}
    return FlatState(state.tree, tensors, infos, optimizer_info, kinds), specs


def _present_moments(infos: Any, tensors: dict[str, torch.Tensor]) -> dict[str, OptimizerInfo]:
    return {
        name: replace(
            info,
            moment1=info.moment1 if info.moment1 in tensors else None,
            moment2=info.moment2 if info.moment2 in tensors else None,
            squares=info.squares if info.squares in tensors else None,
        )
        for name, info in infos.items()
        if name in tensors
    }


def measure(make: Callable[[], Scheme], states: Sequence[FlatState], world_size: int) -> list[dict[str, Any]]:
    """Bytes and exchanges of a keyframe and of the delta after it."""
    exchange = Exchange(world_size)
    rows: list[dict[str, Any]] = []
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            scheme, reference = make(), None
            for kind, state in zip(("keyframe", "delta"), states, strict=True):
                before = exchange.received[rank], exchange.count
                part, specs = shard(state, rank, world_size)
                layout = ShardLayout(specs, CountingCollectives(exchange, rank))
                quantized = plan_shards(scheme, part, reference, layout).quantize(part, reference)
                reference = Reference(dict(quantized.state.tensors), quantized.quantized, dict(part.tensors))
                exchange.barrier.wait()
                row = {"save": kind, "rank": rank, "received": exchange.received[rank] - before[0]}
                rows.append(row | {"exchanges": exchange.count - before[1]})
                exchange.barrier.wait()
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    saves = [[row for row in rows if row["save"] == kind] for kind in ("keyframe", "delta")]
    return [max(save, key=lambda row: row["received"]) for save in saves]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "shard_traffic.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    states = [flatten(state_dicts(SHAPES, tensors)) for tensors in training_states(SHAPES, 2, 10)]
    rows = []
    print(f"{SHAPES.parameters / 1e6:.1f} M parameters; bytes a parameter that the busiest rank receives, exchanges")
    for name, make in SCHEMES.items():
        for world_size in arguments.ranks:
            for row in measure(make, states, world_size):
                rows.append({"scheme": name, "ranks": world_size, **row})
                share = row["received"] / SHAPES.parameters
                print(f"{name:28}{world_size:4} ranks  {row['save']:9} {share:.4f}  {row['exchanges']:4}", flush=True)
    document = {"date": date.today().isoformat(), "parameters": SHAPES.parameters, "rows": rows}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
