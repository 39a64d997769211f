"""shrinkpoint itself on the same checkpoints, through the same codec and container that `save` uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.lossless.series import Checkpoint
from shrinkpoint.codec.coder import NUMBER_FORMATS, CodingContext
from shrinkpoint.codec.parallel import decode_all
from shrinkpoint.codec.recipe import CodedRecipe, from_json
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store.checkpoint_file import read_file, write_file
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import EncodedRecord

ROLES = {"W": "parameter", "m": "moment1", "v": "moment2"}
PARENT = {"name": "parent.safetensors", "digest": "0" * 32}


@dataclass(frozen=True)
class Saved:
    """What one checkpoint took.

    Attributes:
        stored, raw: bytes by role, without the file's header.
        file: bytes of the whole file, header and everything else in the state included.
        file_raw: bytes of all tensors of the state.
        reference: what a reader holds after it; every bit of it was compared with the state.
    """

    stored: dict[str, float]
    raw: dict[str, int]
    file: int
    file_raw: int
    reference: Reference = field(repr=False)


def save(checkpoint: Checkpoint, reference: Reference | None = None) -> Saved:
    """Encode, write to memory, read back and compare. A `reference` makes it a delta."""
    flat = flatten(checkpoint.state)
    stored: dict[str, float] = {}
    raw: dict[str, int] = {}
    for encoded in Lossless().encode(flat, reference):
        for role, share, size in _shares(encoded):
            stored[role] = stored.get(role, 0) + share
            raw[role] = raw.get(role, 0) + size
    storage = MemoryStorage()
    report = write_file(
        storage,
        "file",
        QuantizedState(flat),
        scheme=Lossless(),
        reference=reference,
        parent=PARENT if reference else None,
    ).report
    back = read_file(storage.open("file"), "file", reference)
    compare(flat.tensors, back.reference.tensors)
    return Saved(stored, raw, report.stored_bytes, report.raw_bytes, back.reference)


def _shares(encoded: EncodedRecord) -> Iterator[tuple[str, float, int]]:
    """(role, its part of the stored bytes, its raw bytes); a record of several roles is divided by raw size."""
    total = sum(info.nbytes for info in encoded.infos)
    stored = sum(len(part) for part in encoded.parts.values())
    for info in encoded.infos:
        yield info.role.value, stored * info.nbytes / total if total else 0.0, info.nbytes


def compare(expected: Any, found: Any) -> None:
    """Raises AssertionError at the first tensor that is not the same bit by bit."""
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        same = torch.equal(_bytes(tensor), _bytes(found[name]))
        assert same and tensor.shape == found[name].shape and tensor.dtype == found[name].dtype, name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def only(flat: FlatState, *roles: str) -> FlatState:
    """The same flat state with the tensors of these roles alone."""
    names = [name for name, info in flat.infos.items() if info.role.value in roles]
    facts = flat.optimizer_info if "moment1" in roles else {}
    return replace(
        flat,
        tensors={name: flat.tensors[name] for name in names},
        infos={name: flat.infos[name] for name in names},
        optimizer_info=facts,
    )


@dataclass(frozen=True)
class Job:
    """One thing to time: encode and decode these tensors with so many threads."""

    flat: FlatState
    reference: Reference | None = None

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.flat.infos.values())

    def encode(self, threads: int) -> Callable[[], list[EncodedRecord]]:
        return lambda: list(Lossless().encode(self.flat, self.reference, threads=threads))

    def decode(self, records: list[EncodedRecord], threads: int) -> Callable[[], dict[str, Tensor]]:
        recipes = [(one.recipe, len(one.infos), sum(info.nbytes for info in one.infos)) for one in records]
        return lambda: decode_all(recipes, records.__getitem__, self.reference, threads=threads)


class Core:
    """The native core alone, on an array, into memory that has been written to before: no digests, no fresh pages."""

    def __init__(self, values: torch.Tensor) -> None:
        flat = flatten({"w": values})
        (record,) = Lossless().encode(flat, None)
        recipe = from_json(record.recipe, 1)
        assert isinstance(recipe, CodedRecipe)
        self._run = recipe.runs[0]
        self._values = tensor_bytes(values)
        self._out = self._values.copy()
        self.nbytes = self._values.nbytes

    def encode(self, threads: int) -> Callable[[], Any]:
        return lambda: self._run.encode(NUMBER_FORMATS["F32"], self._values, CodingContext(), threads)

    def decode(self, coded: Any, threads: int) -> Callable[[], Any]:
        return lambda: self._run.decode(NUMBER_FORMATS["F32"], *coded, self._out, CodingContext(), threads)


def jobs(base: Checkpoint, new: Checkpoint) -> dict[str, Job | Core]:
    """What is timed, by name: streams that stand alone, and whole states."""
    flat = flatten(new.state)
    reference = save(base).reference
    return {
        "W, core alone": Core(torch.from_numpy(new.flat("W"))),
        "W in one piece": Job(flatten({"w": torch.from_numpy(new.flat("W"))})),
        "W": Job(only(flat, "parameter")),
        "v": Job(only(flat, "moment2")),
        "m + v": Job(only(flat, "moment1", "moment2")),
        "W delta alone": Job(only(flat, "parameter"), reference),
        "W + m + v": Job(flat),
        "W + m + v delta": Job(flat, reference),
    }
