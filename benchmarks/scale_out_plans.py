"""What the coordinator and one rank of a save on many ranks do, run for real on plans that are made up: part of
`scale_out.py`.

Plans, messages and manifests are those of R ranks which cut every tensor by rows, as FSDP2 does; no process is started,
and payloads are files of a few hundred bytes. Everything else is the code that runs in training: torch's planner,
`Writer.prepare_global_plan`, `Writer.finish`, `latest_valid`, `Reader`."""

from __future__ import annotations

import gc
import pickle
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from shrinkpoint.guard import no_gc
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.store.directory import commit, verify_directory
from shrinkpoint.store.manifest import Manifest, Payload, encode_directory_manifest, names_payload, utc_timestamp
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.train.dcp import Reader, Writer
from shrinkpoint.train.dcp.checkpoint_metadata import DCP_KEY, metadata_to_json
from shrinkpoint.train.dcp.save_plan import rank_slots
from shrinkpoint.train.dcp.writer import _WriteInfo
from shrinkpoint.train.dcp.written_entries import report_entries
from shrinkpoint_lab.bench.systems import resident_bytes

T = TypeVar("T")
Shapes = Sequence[tuple[str, tuple[int, ...]]]
SLOTS = ("exp_avg", "exp_avg_sq")


def transformer(layers: int, width: int, inner: int, key_values: int, vocabulary: int) -> Shapes:
    """Names and shapes of a Llama: of 8 B, 70 B, and one of 1 T parameters in the same proportions."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed.weight", (vocabulary, width))]
    for layer in range(layers):
        shapes += [
            (f"layers.{layer}.{name}.weight", shape)
            for name, shape in {
                "attention.query": (width, width),
                "attention.key": (key_values, width),
                "attention.value": (key_values, width),
                "attention.output": (width, width),
                "mlp.gate": (inner, width),
                "mlp.up": (inner, width),
                "mlp.down": (width, inner),
                "norm1": (width,),
                "norm2": (width,),
            }.items()
        ]
    return [*shapes, ("norm.weight", (width,)), ("output.weight", (vocabulary, width))]


MODELS: dict[str, Shapes] = {
    "8 B": transformer(32, 4096, 14336, 1024, 128256),
    "70 B": transformer(80, 8192, 28672, 1024, 128256),
    "1 T": transformer(140, 23040, 80640, 2048, 128256),
}


def numel(shapes: Shapes) -> int:
    """The number of parameters."""
    return sum(torch.Size(shape).numel() for _, shape in shapes)


def rows_of(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int]:
    """First row and number of rows of a rank, as FSDP2 cuts them."""
    size = -(-shape[0] // ranks)
    first = min(rank * size, shape[0])
    return first, min(size, shape[0] - first)


@dataclass(frozen=True)
class Job:
    """R ranks that save a model with AdamW's moments."""

    shapes: Shapes
    ranks: int

    def plan(self, rank: int) -> SavePlan:
        """What torch's planner makes on a rank, with what `Writer` adds to it."""
        items = list(self._items(rank))
        paths = {item.index.fqn: _path(item.index.fqn) for item in items}
        plan = SavePlan(items, planner_data=paths)
        return replace(plan, storage_data=rank_slots(plan, "Lossless"))

    def _items(self, rank: int) -> Iterator[WriteItem]:
        for name, shape in self.shapes:
            first, size = rows_of(shape, rank, self.ranks)
            offsets = torch.Size((first, *(0 for _ in shape[1:])))
            for fqn in (f"model.{name}", *(f"optim.state.{name}.{slot}" for slot in SLOTS)):
                chunk = ChunkStorageMetadata(offsets, torch.Size((size, *shape[1:])))
                data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(shape))
                yield WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)
            scalar = ChunkStorageMetadata(torch.Size(()), torch.Size(()))
            data = TensorWriteData(scalar, TensorProperties(dtype=torch.float32), torch.Size(()))
            step = MetadataIndex(f"optim.state.{name}.step", torch.Size(()))
            yield WriteItem(step, WriteItemType.TENSOR, tensor_data=data)
        yield WriteItem(MetadataIndex("optim.param_groups"), WriteItemType.BYTE_IO, BytesIOWriteData(1000))

    @property
    def items(self) -> int:
        """Number of entries that a rank plans to write: weight, moments and step of each parameter, and one object."""
        return (len(SLOTS) + 2) * len(self.shapes) + 1

    def metadata(self) -> Metadata:
        """Torch's metadata of the whole save, as `Writer.finish` makes it share lists, from the plan of one rank."""
        sent = pickle.dumps(replace(self, ranks=1).plan(0))
        _, metadata = DefaultSavePlanner()._create_global_plan([pickle.loads(sent)])
        if self.ranks > 1:  # torch takes the names from one rank's plan and the paths from another's
            metadata = replace(metadata, planner_data=pickle.loads(sent).planner_data)
        chunks: dict[torch.Size, list[ChunkStorageMetadata]] = {}  # shared, as `share_chunks` has them
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata) and entry.size:
                entry.chunks = chunks.setdefault(entry.size, [])
                if not entry.chunks:
                    entry.chunks += self._chunks(entry.size)
        return metadata

    def _chunks(self, shape: torch.Size) -> list[ChunkStorageMetadata]:
        places = dict.fromkeys(rows_of(shape, rank, self.ranks) for rank in range(self.ranks))
        zeros, rest = [0] * (len(shape) - 1), shape[1:]
        return [ChunkStorageMetadata(torch.Size([first, *zeros]), torch.Size([size, *rest])) for first, size in places]

    def manifest(self, depth: int) -> bytes:
        """The manifest of a save with so many bases a rank; digests and sizes are made up."""
        metadata = self.metadata()
        owners = {
            fqn: np.arange(1 if isinstance(entry, BytesStorageMetadata) else len(entry.chunks))
            for fqn, entry in metadata.state_dict_metadata.items()
        }
        bases = tuple((f"{link:032x}", 10**8) for link in range(1, depth + 1))
        payloads = tuple(
            Payload(f"rank-{rank:05d}.safetensors", 10**8, f"{rank + 10**6:032x}", 10**8, bases)
            for rank in range(self.ranks)
        )
        extra = {DCP_KEY: metadata_to_json(metadata, owners)}
        created, stats = utc_timestamp(), {"seconds": 1.2345678}
        fields = {"payloads": payloads, "step": None, "stats": stats, "extra": extra}
        return encode_directory_manifest(Manifest("0" * 16, created, "lossless", **fields))

    def results(self, plans: Sequence[SavePlan], payloads: Sequence[Payload]) -> list[list[WriteResult]]:
        """What the ranks report after writing."""
        return [[_result(plan, payload)] for plan, payload in zip(plans, payloads, strict=True)]


def _result(plan: SavePlan, payload: Payload) -> WriteResult:
    entries = report_entries(item.index for item in plan.items)
    write = _WriteInfo(payload, entries, "lossless", None, 0, {"seconds": 1.2345678})
    return WriteResult(MetadataIndex("~payload"), payload.size, write)


def _path(fqn: str) -> tuple[str, ...]:
    """The path of an entry in the state dict; equal parts are one object, as they are in a program."""
    head, _, rest = fqn.partition(".")
    parts = [head, rest]
    if rest.startswith("state."):
        name, _, slot = rest.removeprefix("state.").rpartition(".")
        parts = [head, "state", name, slot]
    return tuple(map(sys.intern, parts))


class Clock:
    """Processor seconds of each part, and what it leaves resident."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.resident: dict[str, int] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run a part."""
        gc.collect()
        before, start = resident_bytes("VmRSS"), _processor_seconds()
        result = work()
        self.seconds[name] = _processor_seconds() - start
        self.resident[name] = resident_bytes("VmRSS") - before
        return result


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def small_payloads(directory: Path, ranks: int) -> list[Payload]:
    """A payload of a few hundred bytes for each rank."""
    payloads = []
    for rank in range(ranks):
        writer = DeltaWriter(threads=1)
        writer.write(directory, flatten({"x": torch.full((4,), float(rank))}), scheme=Lossless(), rank=rank)
        payloads.append(writer.payload)
    return payloads


def coordinate(job: Job, folder: Path, *, collect: bool = True) -> dict[str, Any]:
    """What the coordinator does in a save: processor seconds, memory, and the bytes of each message.

    Args:
        collect: leave Python's automatic garbage collection on; some training programs turn it off.
    """
    with nullcontext() if collect else no_gc():
        return _coordinate(job, folder)


def _coordinate(job: Job, folder: Path) -> dict[str, Any]:
    clock, place = Clock(), folder / "step-1"
    pickle.loads(pickle.dumps(replace(job, ranks=1).plan(0)))  # what is imported once
    sent = [pickle.dumps(job.plan(rank)) for rank in range(job.ranks)]
    plans = clock.run("unpickle plans", lambda: [pickle.loads(data) for data in sent])
    planner, writer = DefaultSavePlanner(), Writer(place)
    plans, metadata = clock.run("torch's global plan", lambda: planner._create_global_plan(plans))
    plans = clock.run("our global plan", lambda: writer.prepare_global_plan(plans))
    answers = clock.run("pickle plans", lambda: [pickle.dumps(plan) for plan in plans])
    payloads = small_payloads(place, job.ranks)
    messages = [pickle.dumps(result) for result in job.results(plans, payloads)]
    results = clock.run("unpickle results", lambda: [pickle.loads(data) for data in messages])
    clock.run("finish", lambda: writer.finish(metadata, results))
    sizes = {
        "plan": max(map(len, sent)),
        "answer": max(map(len, answers)),
        "result": max(map(len, messages)),
        "metadata": len(clock.run("pickle metadata", lambda: pickle.dumps(metadata))),
        "manifest": (place / "shrinkpoint.json").stat().st_size,
    }
    return _report(job, clock, sizes)


def look_at_directory(job: Job, folder: Path) -> dict[str, Any]:
    """What one rank does with a checkpoint of many ranks, of which the files are small: processor seconds."""
    clock, place = Clock(), folder / "step-1"
    payloads = small_payloads(place, job.ranks)
    metadata = job.metadata()
    owners = {
        fqn: np.arange(1 if isinstance(entry, BytesStorageMetadata) else len(entry.chunks))
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    extra = clock.run("metadata to JSON", lambda: {DCP_KEY: metadata_to_json(metadata, owners)})
    clock.run("commit", lambda: commit(place, payloads, scheme="lossless", extra=extra))
    data = (place / "shrinkpoint.json").read_bytes()
    clock.run("confirm the last write", lambda: names_payload(data, payloads[-1]))
    clock.run("read metadata", Reader(place).read_metadata)
    clock.run("verify all files", lambda: verify_directory(place))
    clock.run("verify a share", lambda: verify_directory(place, share=(0, job.ranks)))
    clock.run("torch's load plan", lambda: _load_plan(job, metadata))
    sizes = {"manifest": len(data), "metadata": len(pickle.dumps(metadata))}
    return _report(job, clock, sizes)


def _report(job: Job, clock: Clock, sizes: dict[str, int]) -> dict[str, Any]:
    """What was measured, for JSON."""
    return {
        "ranks": job.ranks,
        "items": job.items,
        "seconds": clock.seconds,
        "resident": clock.resident,
        "bytes": sizes,
    }


def _load_plan(job: Job, metadata: Metadata) -> None:
    """The items that the planner of the last rank makes of all tensors."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            create_read_items_for_chunk_list(fqn, entry, entry.chunks[-1:])
