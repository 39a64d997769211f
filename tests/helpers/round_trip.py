"""States that real optimizers made, and the way of a state through a scheme and a container and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from helpers.strategies import bits, from_bytes
from torch import Tensor

from shrinkpoint import Lossless
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.container import FileReader
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import SaveReport
from shrinkpoint.store.checkpoint_file import read_file, write_file
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.tensors.info import EncodedRecord

SCHEME = Lossless()


@dataclass
class Written:
    """A file in memory, and what it was written against."""

    data: bytes
    report: SaveReport
    parent: Reference | None

    def read(self, parent: Reference | None = None, *, threads: int = 1) -> Any:
        """The state in it."""
        decoded = read_file(_source(self.data), "file", parent or self.parent, threads=threads)
        return unflatten(decoded.tree, decoded.reference.tensors)

    def reference(self) -> Reference:
        return read_file(_source(self.data), "file", self.parent, threads=1).reference

    def records(self) -> list[EncodedRecord]:
        reader = FileReader(_source(self.data), "file")
        return [reader.read(head) for head in reader.records]

    def recipes(self) -> dict[str, Any]:
        """The recipe of every tensor."""
        return {info.name: record.recipe for record in self.records() for info in record.infos}

    def bytes_of(self, tensor: str) -> int:
        """Payload of the record that holds a tensor."""
        (record,) = [one for one in self.records() if tensor in [info.name for info in one.infos]]
        return sum(memoryview(part).nbytes for part in record.parts.values())


def write(state: Any, parent: Written | None = None, *, scheme: Lossless = SCHEME, threads: int = 1) -> Written:
    """The file of a state: a keyframe, or a delta against `parent`."""
    storage, reference = MemoryStorage(), None if parent is None else parent.reference()
    where = None if parent is None else {"name": "parent", "digest": parent.report.digest}
    kept = scheme.quantize(flatten(state), reference)
    report = write_file(storage, "file", kept, scheme=scheme, reference=reference, parent=where, threads=threads).report
    return Written(storage.get("file"), report, reference)


def stages(written: Written) -> Iterator[tuple[EncodedRecord, dict[str, Tensor]]]:
    """Every record with the tensors that a reader has when it comes to it."""
    decoded: dict[str, Tensor] = {}
    for record in written.records():
        yield record, dict(decoded)
        decoded.update(decode(record, decoded, written.parent, threads=1).tensors)


def nudged(tensor: Tensor) -> Tensor:
    """The same tensor with the lowest bit of every fifth byte turned."""
    data = bytearray(bits(tensor))
    for i in range(0, 0 if tensor.dtype == torch.bool else len(data), 5):
        data[i] ^= 1
    return from_bytes(bytes(data), dtype_name(tensor.dtype), tuple(tensor.shape))


def _source(data: bytes) -> Any:
    storage = MemoryStorage()
    storage.put("file", data)
    return storage.open("file")


class Loop:
    """A tiny training loop: a convolution and two linear layers under a real optimizer.

    Args:
        width: of the hidden layer.
        settings: of the optimizer.
    """

    def __init__(self, optimizer: Any = torch.optim.AdamW, seed: int = 0, width: int = 96, **settings: Any) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(4, 16, 3), torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, 4)
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=self.random) * 0.1)
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-3, **settings})
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, 20)

    def steps(self, count: int) -> dict[str, Any]:
        """Train on, and return a copy of the state."""
        for _ in range(count):
            self.optimizer.zero_grad()
            batch = torch.randn(16, 4, 4, 4, generator=self.random)
            (self.model(batch) - batch.mean((2, 3))).square().mean().backward()
            self.optimizer.step()
        return self.state()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()})
