"""One container file <-> one flat state. The seam where codec, scheme and container meet."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shrinkpoint.codec import Reference, decode_all
from shrinkpoint.container import Reader, Writer
from shrinkpoint.record import JSON
from shrinkpoint.schemes import Scheme
from shrinkpoint.state import FlatState
from shrinkpoint.storage import Source, Storage


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
    """

    path: str
    scheme: str
    keyframe: bool
    raw_bytes: int
    stored_bytes: int
    seconds: float
    roles: dict[str, RoleBytes] = field(default_factory=dict)
    digest: str = ""

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored byte."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0


@dataclass(frozen=True)
class Decoded:
    """A file's content: the tree, and the tensors it refers to."""

    tree: JSON
    reference: Reference


def write_file(
    storage: Storage,
    key: str,
    flat: FlatState,
    *,
    scheme: Scheme,
    reference: Reference | None,
    parent: JSON,
    threads: int | None = None,
) -> SaveReport:
    """Write `flat` under `key`, durably and all or nothing.

    Args:
        reference: the parent's decoded tensors; None writes a keyframe.
        parent: how a reader finds the parent (name, digest, ...); stored as given, None for a keyframe.

    Raises:
        StorageError: writing failed; nothing is left under `key`.
    """
    began = time.perf_counter()
    roles: dict[str, RoleBytes] = {}
    with storage.create(key) as sink:
        writer = Writer(sink, scheme=scheme.id, parent=parent, tree=flat.tree, expected=list(flat.infos.values()))
        for encoded in scheme.encode(flat, reference, threads=threads):
            stored = writer.add(encoded)
            role = encoded.infos[0].role.value
            raw = sum(info.nbytes for info in encoded.infos)
            roles[role] = roles.get(role, RoleBytes()).plus(raw, stored, len(encoded.infos))
        summary = writer.finish({name: [r.raw, r.stored, r.tensors] for name, r in roles.items()})
    return SaveReport(
        path=storage.describe(key),
        scheme=scheme.id,
        keyframe=parent is None,
        raw_bytes=sum(role.raw for role in roles.values()),
        stored_bytes=summary.size,
        seconds=time.perf_counter() - began,
        roles=roles,
        digest=summary.digest,
    )


def read_file(
    source: Source,
    where: str,
    reference: Reference | None,
    *,
    threads: int | None = None,
) -> Decoded:
    """Decode a file; `reference` must be the parent's tensors where the file is a delta.

    Raises:
        FormatError: the bytes are at fault.
        ChainError: `reference` is missing or is not the one the file was made against.
    """
    reader = Reader(source, where)
    heads = reader.records
    recipes = [(head.recipe, len(head.infos), sum(info.nbytes for info in head.infos)) for head in heads]
    tensors = decode_all(recipes, lambda index: reader.read(heads[index]), reference, where=where, threads=threads)
    return Decoded(reader.tree, Reference(tensors))
