"""What a journal costs a step, in seconds and bytes, beside a checkpoint after each step.

    python benchmarks/journal.py        # three minutes on two cores

Two gloo ranks train a transformer of two layers on random tokens with AdamW. For each compressor steps with a journal
and steps without one take turns, in pairs of which every other one begins with the journal; medians of both, and of the
difference in a pair. A step is forward, backward and update; files are on the disk that `--folder` names. Bytes are
those that the journal grew by in a step, over all ranks. The same model is trained by FSDP2, whose ranks keep their
shards of the averaged gradients, as they are or rounded. Beside them, of the same model and on rank 0: `torch.save` of
weights and optimizer, a file a step, and `Store.save` as lossless deltas a step apart; both with the fsync that they
make. One rank sends nothing: its journal has gradients as they are. Results: results/journal.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from lossless_speed import machine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shrinkpoint as sp
from shrinkpoint.comm import compress_ddp, compress_fsdp
from shrinkpoint.train import Journal
from shrinkpoint.train.dcp import Manager

SPECS = ("q8:64", "q4:64", "q2:64", "top1.5625:4096:q2:64", "shards as they are", "shards q4:64")
WIDTH, LENGTH, BATCH, VOCABULARY = 256, 64, 8, 256


class Reader(nn.Module):
    """A transformer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def sharded_model() -> nn.Module:
    model = Reader()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Loop:
    """A model that is trained with a journal, a step of which may leave it out."""

    def __init__(self, folder: Path, spec: str, rank: int) -> None:
        kept, is_sharded = spec.removeprefix("shards "), spec.startswith("shards ")
        self.model = sharded_model() if is_sharded else DistributedDataParallel(Reader(), bucket_cap_mb=2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.manager = Manager(folder) if is_sharded else sp.CheckpointManager(folder)
        compression = compress_fsdp(self.model) if is_sharded else compress_ddp(self.model, spec)
        rounded = kept if is_sharded and kept != "as they are" else None
        self.journal = Journal(self.manager, compression, self.update, shard_compressor=rounded)
        self.journal.save(0, model=self.model, optimizer=self.optimizer)
        self.folder, self.rank, self.step = folder / "journal", rank, 0

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, with_journal: bool) -> float:
        """One step; returns its seconds."""
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        dist.barrier()
        begin = time.perf_counter()
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if with_journal:
            self.step += 1
            self.journal.step(self.step)
        else:
            self.update()
        dist.barrier()
        return time.perf_counter() - begin

    def size(self) -> int:
        dist.barrier()
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def close(self) -> None:
        self.journal.close()
        self.manager.wait()


def median(values: list[float]) -> float:
    return statistics.median(values)


def of_spec(spec: str, folder: Path, rank: int, pairs: int) -> dict[str, float]:
    loop = Loop(folder, spec, rank)
    for _ in range(4):
        loop.run(True), loop.run(False)
    before, steps = loop.size(), loop.step
    rows = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        seconds = {with_journal: loop.run(with_journal) for with_journal in order}
        rows.append(seconds)
    grown = (loop.size() - before) / (loop.step - steps)
    numel = sum(parameter.numel() for parameter in loop.model.parameters())
    loop.close()
    return {
        "parameters": numel,
        "bytes a step": grown,
        "bits a parameter": 8 * grown / numel,
        "seconds with": median([row[True] for row in rows]),
        "seconds without": median([row[False] for row in rows]),
        "seconds more": median([row[True] - row[False] for row in rows]),
    }


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def of_checkpoints(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """A checkpoint after each step, by torch.save with fsync and as a lossless delta: bytes and seconds, medians."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    path, rows = folder / "torch.pt", {"torch.save": [], "lossless delta": []}
    numel = sum(parameter.numel() for parameter in model.parameters())

    def plain() -> None:
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    with sp.CheckpointManager(folder / "deltas", keyframe_every=None) as manager:
        for step in range(repeats + 2):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step(), optimizer.zero_grad()
            seconds = timed(plain)
            begin = time.perf_counter()
            report = manager.save(step, model=model, optimizer=optimizer)
            assert report is not None
            if step > 1:  # the keyframe, and the delta that chooses how to code
                rows["torch.save"].append((path.stat().st_size, seconds))
                rows["lossless delta"].append((report.stored_bytes, time.perf_counter() - begin))
    medians = {name: [median(list(column)) for column in zip(*values, strict=True)] for name, values in rows.items()}
    return {
        name: {"bytes a step": size, "bits a parameter": 8 * size / numel, "seconds more": seconds}
        for name, (size, seconds) in medians.items()
    }


def of_rank(rank: int, width: int, folder: str, pairs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{width}", rank=rank, world_size=width)
    rows = {
        spec: of_spec(spec, Path(folder, f"{width}-{spec}"), rank, pairs) for spec in SPECS[: None if width > 1 else 1]
    }
    if rank == 0:
        Path(folder, f"{width}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--bytes-only", action="store_true", help="leave out seconds: for a machine that is not idle")
    parser.add_argument("--folder", help="where files are written; default: that of temporary files")
    parser.add_argument("--out", type=Path, default=Path("results/journal.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for width in (2, 1):
            torch.multiprocessing.spawn(of_rank, (width, folder, args.pairs), nprocs=width)
        two, one = (json.loads(Path(folder, f"{width}.json").read_text()) for width in (2, 1))
        torch.set_num_threads(2)
        checkpoints = of_checkpoints(Path(folder), max(3, args.pairs // 4))
    rows = {**two, "one rank, as they are": one[SPECS[0]]}
    for row in (*rows.values(), *checkpoints.values()) if args.bytes_only else ():
        for name in [name for name in row if name.startswith("seconds")]:
            del row[name]
    result = {"date": date.today().isoformat(), "machine": machine(), "journal": rows, "checkpoints": checkpoints}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))
    for name, row in {**rows, **checkpoints}.items():
        print(f"{name:24}" + "".join(f"  {key} {value:.6g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
