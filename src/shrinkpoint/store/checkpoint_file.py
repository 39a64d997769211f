"""One container file <-> one flat state. The seam where codec, scheme and container meet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from shrinkpoint.codec.coder import default_threads
from shrinkpoint.codec.parallel import decode_all
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.container import FileReader, FileWriter
from shrinkpoint.errors import PolicyError
from shrinkpoint.guard import read_guard
from shrinkpoint.schemes.base import QuantizedState, Scheme
from shrinkpoint.schemes.select import summarize_reasons
from shrinkpoint.storage import Source, Storage
from shrinkpoint.store.allowance import Allowance
from shrinkpoint.store.loss_increase import LossIncrease
from shrinkpoint.tensors.flatten import unflatten
from shrinkpoint.tensors.info import JSON, EncodedRecord, Role


@dataclass(frozen=True)
class RoleBytes:
    """What the tensors of one role cost."""

    raw: int = 0
    stored: int = 0
    tensors: int = 0

    def plus(self, raw: int, stored: int, tensors: int) -> RoleBytes:
        return RoleBytes(self.raw + raw, self.stored + stored, self.tensors + tensors)


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: where the checkpoint went.
        scheme: which scheme wrote it.
        keyframe: True when it needs no other checkpoint.
        raw_bytes: bytes of the tensors of the state, each storage once.
        stored_bytes: bytes of the whole file, header included.
        seconds: from the first tensor to the durable file.
        roles: bytes by role name.
        digest: the file's header digest, which vouches for every other byte.
        retention: of the weights' progress since the checkpoint before, how much this one has (see `progress`); None:
            nothing was lost, or there is none before.
        exact: why tensors of floats stayed exact, by name, where the scheme is a lossy one; of shards nothing is said.
        loss_report: what a scheme that searches tried, measured and chose; None: nothing was searched.
    """

    path: str
    scheme: str
    keyframe: bool
    raw_bytes: int
    stored_bytes: int
    seconds: float
    roles: dict[str, RoleBytes] = field(default_factory=dict)
    digest: str = ""
    retention: float | None = None
    loss_report: JSON = None
    exact: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def loss_increase(self) -> float | None:
        """Of the loss where this checkpoint is restored, as measured: relative to it, so that .01 is one per cent.

        Of a score: its fall. 0 where nothing was lost, of the weights at least; None: not measured.
        """
        known = LossIncrease.from_loss(self.loss_report)
        return known.value if known.is_lossy else 0.0

    @property
    def is_measured(self) -> bool:
        """Whether the loss was measured; True where nothing was lost."""
        return LossIncrease.from_loss(self.loss_report).is_measured

    def __str__(self) -> str:
        """One line: what was written, how small, and what that costs.

        >>> str(SaveReport("a", "fisher", True, 2200, 100, 1.0, search={"chosen": {}, "measured": False}))
        'a: fisher, keyframe, 100 bytes of 2,200 (22x), loss not measured'
        """
        kind = "keyframe" if self.keyframe else "delta"
        known = str(LossIncrease.from_loss(self.loss_report))
        lost = f"loss {known}" if known else "nothing lost"
        sizes = f"{self.stored_bytes:,} bytes of {self.raw_bytes:,} ({self.ratio:.3g}x)"
        return f"{self.path}: {self.scheme}, {kind}, {sizes}, {lost}"

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored byte, of the whole state and the whole file."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    @property
    def weights_ratio(self) -> float:
        """Raw bytes for each stored byte, of the weights alone, the file's header left out.

        Master copies are weights: what is a cast of them costs nothing by itself. Infinite where all are references.
        """
        weights = [self.roles[role.value] for role in (Role.PARAMETER, Role.MASTER) if role.value in self.roles]
        raw, stored = sum(one.raw for one in weights), sum(one.stored for one in weights)
        return raw / stored if stored else float("inf") if raw else 1.0


@dataclass(frozen=True)
class WriteResult:
    """A file that has been written: what the save did, and what a reader of it holds."""

    report: SaveReport
    reference: Reference


@dataclass(frozen=True)
class DecodedFile:
    """A file's content: the tree, and the tensors it refers to.

    Attributes:
        max_copy_bytes: bytes that copies in the tree may take; None: nobody counted.
    """

    tree: JSON
    reference: Reference
    max_copy_bytes: int | None = None


def write_file(
    storage: Storage,
    key: str,
    quantized: QuantizedState,
    *,
    scheme: Scheme,
    reference: Reference | None,
    parent: JSON,
    threads: int | None = None,
) -> WriteResult:
    """Write what a scheme kept of a state under `key`, durably and all or nothing.

    Args:
        reference: the parent's decoded tensors; None writes a keyframe.
        parent: how a reader finds the parent (name, digest, ...); stored as given, None for a keyframe.

    Raises:
        StorageError: writing failed; nothing is left under `key`.
    """
    began = time.perf_counter()
    flat = quantized.state
    roles: dict[str, RoleBytes] = {}
    symbols: dict[str, QuantizedTensor] = {}
    with storage.create(key) as sink:
        writer = FileWriter(sink, scheme=scheme.id, parent=parent, tree=flat.tree, expected=list(flat.infos.values()))
        for encoded in scheme.encode(flat, reference, quantized=quantized.quantized, threads=threads):
            _count_roles(roles, encoded, writer.add(encoded))
            symbols.update(_record_symbols(encoded, quantized, reference))
        summary = writer.finish({name: [r.raw, r.stored, r.tensors] for name, r in roles.items()})
    report = SaveReport(
        path=storage.describe(key),
        scheme=scheme.id,
        keyframe=parent is None,
        raw_bytes=sum(role.raw for role in roles.values()),
        stored_bytes=summary.size,
        seconds=time.perf_counter() - began,
        roles=roles,
        digest=summary.digest,
        loss_report=_loss_report(quantized),
        exact=quantized.exact,
    )
    return WriteResult(report, Reference(flat.tensors, symbols))


def _loss_report(quantized: QuantizedState) -> JSON:
    """What was lost, and what stayed exact for which reason."""
    if not isinstance(quantized.loss, dict) or not quantized.exact:
        return quantized.loss
    return quantized.loss | {"stayed_exact": summarize_reasons(quantized.exact, quantized.state.infos)}


def _count_roles(roles: dict[str, RoleBytes], encoded: EncodedRecord, stored: int) -> None:
    """A record of several roles (references to other tensors) has next to no bytes of its own."""
    raw: dict[Role, int] = {}
    for info in encoded.infos:
        raw[info.role] = raw.get(info.role, 0) + info.nbytes
    tensors = Counter([info.role for info in encoded.infos])
    for role, nbytes in raw.items():
        held = roles.get(role.value, RoleBytes())
        roles[role.value] = held.plus(nbytes, stored if role is encoded.infos[0].role else 0, tensors[role])


def _record_symbols(
    encoded: EncodedRecord, quantized: QuantizedState, reference: Reference | None
) -> Mapping[str, QuantizedTensor]:
    """The symbols that a reader of this record goes on with."""
    held = reference.quantized if encoded.recipe == {"kind": "same"} and reference is not None else quantized.quantized
    return {info.name: held[info.name] for info in encoded.infos if info.name in held}


def read_file(
    source: Source,
    where: str,
    reference: Reference | None,
    *,
    threads: int | None = None,
    allowance: Allowance | None = None,
) -> DecodedFile:
    """Decode a file; `reference` must be the parent's tensors where the file is a delta.

    Args:
        allowance: counts the files of the chain so far; None: this one alone.

    Raises:
        FormatError: the bytes are at fault, or ask for more memory than they may.
        ChainError: `reference` is missing or is not the one the file was made against.
    """
    return decode_records(FileReader(source, where), reference, threads=threads, allowance=allowance)


def decode_records(
    reader: FileReader, reference: Reference | None, *, threads: int | None = None, allowance: Allowance | None = None
) -> DecodedFile:
    """As `read_file`, of a file whose header has been read."""
    allowance = allowance or Allowance()
    workers = default_threads(threads)
    with read_guard(reader.where):
        heads = reader.records
        recipes = [(head.recipe, len(head.infos), sum(info.nbytes for info in head.infos)) for head in heads]
        allowance.admit(reader.where, reader.size, sum(nbytes for _, _, nbytes in recipes))
        read = partial(_read, reader)
        found = decode_all(recipes, read, reference, where=reader.where, threads=workers)
        return DecodedFile(reader.tree, found, allowance.max_copy_bytes)


def _read(reader: FileReader, index: int) -> EncodedRecord:
    return reader.read(reader.records[index])


def build_state(decoded: DecodedFile, where: str, *, tie: bool = True) -> Any:
    """The state that a file's content stands for.

    Raises:
        CorruptError: no release writes such a tree, or it asks for more memory than it may.
    """
    return unflatten(decoded.tree, decoded.reference.tensors, tie=tie, where=where, max_bytes=decoded.max_copy_bytes)


Device: TypeAlias = str | torch.device | None


def to_device(tensors: Mapping[str, torch.Tensor], device: Device, *, copy: bool) -> dict[str, torch.Tensor]:
    """Tensors on a device, the CPU where none is named.

    Raises:
        PolicyError: the device is not there, or is full.
    """
    try:
        return {name: tensor.to(device or "cpu", copy=copy) for name, tensor in tensors.items()}
    except (AssertionError, RuntimeError, TypeError) as error:  # torch has no error of its own for "no such device"
        do = "name a device that is here, or make room on it"
        raise PolicyError(
            f"device {device!r}", found=str(error)[:200], expected="a place for the state", do=do
        ) from error
