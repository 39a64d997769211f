"""What a checkpoint is: it exists when its manifest does. `Manifest` is of a store's step, `DirectoryManifest` of a
directory that a framework names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import pairwise

from shrinkpoint.container.strict_json import shorten
from shrinkpoint.guard import read_guard
from shrinkpoint.store import layout
from shrinkpoint.store.digest_json import (
    check_format,
    check_time,
    dump_with_digest,
    expect_count,
    expect_digest,
    expect_json_type,
    expect_payload_name,
    json_number,
    json_safe,
    load_with_digest,
    manifest_error,
)
from shrinkpoint.store.layout import MAX_STEP
from shrinkpoint.tensors.info import JSON

FORMAT = 1


@dataclass(frozen=True)
class FileRef:
    """A payload: its name inside the step's directory, its size in bytes, its header digest."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Parent:
    """The checkpoint a delta was made against, and the header digest of its payload at that time."""

    step: int
    id: str
    digest: str


@dataclass(frozen=True)
class ChainLink:
    """One file of the chain below a delta.

    Attributes:
        step, id: the checkpoint it belonged to when the delta was made.
        digest: its header digest; what decides whether a file found later is the right one.
        size: its bytes.
        file: its name in the directory of `step`.
        name: the name of a hard link to it in the delta's own directory; "" where links are impossible.
    """

    step: int
    id: str
    digest: str
    size: int
    file: str
    name: str = ""

    @property
    def sibling_key(self) -> str:
        return f"{layout.step_dir(self.step)}/{self.file}"


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        id: random hex, and with it the state: a step saved again gets a new one, a file written again does not.
        step: counts training steps; names the directory.
        created: UTC, ISO 8601 with milliseconds.
        scheme: the id of the scheme that was asked for.
        files: the payloads, one a rank.
        bases: the chain below, keyframe first, each one step below the next; empty for a keyframe.
        metrics: what the loop measured, by name.
        raw_bytes: bytes of the state's tensors.
        stored_bytes: bytes of the payloads.
        lossy_restores: how many restores from lossy checkpoints lie behind this state.
        loss: what this checkpoint lost, and what was tried and measured to decide it; None: nothing.
        note: free text.
    """

    id: str
    step: int
    created: str
    scheme: str
    files: tuple[FileRef, ...]
    bases: tuple[ChainLink, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    raw_bytes: int = 0
    stored_bytes: int = 0
    lossy_restores: int = 0
    loss: JSON = None
    note: str = ""

    @property
    def is_lossy(self) -> bool:
        """Whether a restore gives other values than were saved."""
        return isinstance(self.loss, dict) and self.loss.get("chosen") is not None

    @property
    def depth(self) -> int:
        """Deltas to apply on top of the keyframe; 0 for a keyframe."""
        return len(self.bases)

    @property
    def parent(self) -> Parent | None:
        """What this delta was made against; None for a keyframe."""
        return Parent(self.bases[-1].step, self.bases[-1].id, self.bases[-1].digest) if self.bases else None

    @property
    def digest(self) -> str:
        """The header digest of the payload, by which children know this checkpoint."""
        return self.files[0].digest

    @property
    def created_at(self) -> datetime:
        return datetime.fromisoformat(self.created)

    def key(self, name: str) -> str:
        """The key of a file named relative to this checkpoint's directory."""
        return f"{layout.step_dir(self.step)}/{name}"

    def to_json(self) -> bytes:
        """Canonical bytes: one manifest has one spelling, and its digest stands inside."""
        document: dict[str, JSON] = {one.name: getattr(self, one.name) for one in fields(self)}
        document["format"] = FORMAT
        document["loss"] = json_safe(self.loss)
        if self.loss is None:
            del document["loss"]
        document["files"] = [[f.name, f.size, f.digest] for f in self.files]
        document["bases"] = [[b.step, b.id, b.digest, b.size, b.file, b.name] for b in self.bases]
        document["metrics"] = {name: json_number(value) for name, value in self.metrics.items()}
        return dump_with_digest(document)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            TruncatedError: the bytes end before the closing brace.
            CorruptError: the bytes contradict their digest or themselves.
            VersionError: a newer release wrote them.
        """
        with read_guard(where):
            document = load_with_digest(data, where)
            check_format(document, where, FORMAT)
            try:
                return _manifest_from_json(document)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise manifest_error(where, f"a manifest that contradicts itself ({shorten(str(error))})") from error


def _manifest_from_json(document: dict[str, JSON]) -> Manifest:
    manifest = Manifest(
        id=expect_json_type(document["id"], str),
        step=layout.check_step(expect_json_type(document["step"], int)),
        created=expect_json_type(document["created"], str),
        scheme=expect_json_type(document["scheme"], str),
        files=tuple(_file_ref_from_json(one) for one in expect_json_type(document["files"], list)),
        bases=tuple(_chain_link_from_json(one) for one in expect_json_type(document["bases"], list)),
        metrics={name: float(value) for name, value in expect_json_type(document["metrics"], dict).items()},
        raw_bytes=expect_count(document["raw_bytes"]),
        stored_bytes=expect_count(document["stored_bytes"]),
        lossy_restores=expect_count(document["lossy_restores"]),
        loss=_loss_from_json(document),
        note=expect_json_type(document["note"], str),
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    check_time(manifest.created)
    if not manifest.files or len({one.name for one in manifest.files}) < len(manifest.files):
        raise ValueError("no payload, or one twice")
    steps = [base.step for base in manifest.bases] + [manifest.step]
    if any(low >= high for low, high in pairwise(steps)):  # so no chain can be a circle
        raise ValueError("a chain whose steps do not rise")


def _loss_from_json(document: Mapping[str, JSON]) -> JSON:
    if "loss" in document and document["loss"] is None:
        raise ValueError("a loss of nothing, which has another spelling")
    return document.get("loss")


def _file_ref_from_json(row: JSON) -> FileRef:
    name, size, digest = expect_json_type(row, list)
    return FileRef(expect_payload_name(name), expect_count(size), expect_digest(digest))


def _chain_link_from_json(row: JSON) -> ChainLink:
    step, id, digest, size, file, name = expect_json_type(row, list)
    if name and name != layout.base_name(digest):
        raise ValueError(f"a base named {name!r}")
    step, file = layout.check_step(expect_json_type(step, int)), expect_payload_name(file)
    return ChainLink(
        step, expect_json_type(id, str), expect_digest(digest), expect_count(size), file, expect_json_type(name, str)
    )


DIRECTORY_FORMAT = 1
MAX_DIRECTORY_MANIFEST_BYTES = 256 << 20
"""A reader refuses a larger manifest before it allocates; `extra` of a run on thousands of ranks takes megabytes."""


@dataclass(frozen=True)
class Payload:
    """The file of one rank, and the chain below it.

    Attributes:
        name: in the folder.
        size: in bytes.
        digest: header digest, which vouches for every other byte.
        raw_bytes: of the tensors in it.
        bases: header digest and size of each file below, the keyframe first; empty: it stands alone.
    """

    name: str
    size: int
    digest: str
    raw_bytes: int
    bases: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class DirectoryManifest:
    """A checkpoint.

    Attributes:
        id: random hex.
        created: UTC, ISO 8601 with milliseconds.
        scheme: the id of the scheme that was asked for.
        payloads: one a rank, in the order of the ranks.
        step: counts training steps; None: nobody said.
        metrics: what the loop measured, by name.
        lossy_restores: how many restores from lossy checkpoints lie behind this state.
        loss: what this checkpoint lost, and what was tried and measured to decide it; None: nothing.
        note: free text.
        extra: what the framework's own reader needs.
    """

    id: str
    created: str
    scheme: str
    payloads: tuple[Payload, ...]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    lossy_restores: int = 0
    loss: JSON = None
    note: str = ""
    extra: JSON = None

    @property
    def raw_bytes(self) -> int:
        """Bytes of the state's tensors."""
        return sum(one.raw_bytes for one in self.payloads)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payloads, without what they stand on."""
        return sum(one.size for one in self.payloads)

    @property
    def depth(self) -> int:
        """Deltas to apply on top of the keyframe, of the rank that has most."""
        return max(len(one.bases) for one in self.payloads)

    @property
    def is_lossy(self) -> bool:
        """Whether a restore gives other values than were saved."""
        return isinstance(self.loss, dict) and self.loss.get("chosen") is not None

    def to_json(self) -> bytes:
        """Canonical bytes: one manifest has one spelling, and its digest stands inside."""
        payloads = [[p.name, p.size, p.digest, p.raw_bytes, [list(base) for base in p.bases]] for p in self.payloads]
        return dump_with_digest(
            {
                "format": DIRECTORY_FORMAT,
                "id": self.id,
                "created": self.created,
                "scheme": self.scheme,
                "payloads": payloads,
                "step": self.step,
                "metrics": {name: json_number(value) for name, value in self.metrics.items()},
                "lossy_restores": self.lossy_restores,
                "loss": json_safe(self.loss),
                "note": self.note,
                "extra": json_safe(self.extra),
            }
        )

    @classmethod
    def from_json(cls, data: bytes, where: str) -> DirectoryManifest:
        """Read what `to_json` wrote.

        Raises:
            TruncatedError: the bytes end before the closing brace.
            CorruptError: the bytes contradict their digest or themselves.
            VersionError: a newer release wrote them.
        """
        with read_guard(where):
            document = load_with_digest(data, where)
            check_format(document, where, DIRECTORY_FORMAT)
            try:
                return _directory_manifest_from_json(document)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise manifest_error(where, f"a manifest that contradicts itself ({shorten(str(error))})") from error


def _directory_manifest_from_json(document: Mapping[str, JSON]) -> DirectoryManifest:
    payloads = tuple(_payload_from_json(row) for row in expect_json_type(document["payloads"], list))
    step, created = document["step"], expect_json_type(document["created"], str)
    if not payloads or len({one.name for one in payloads}) < len(payloads):
        raise ValueError("no payload, or one twice")
    if step is not None and not 0 <= expect_json_type(step, int) < MAX_STEP:
        raise ValueError(f"step {step}")
    check_time(created)
    return DirectoryManifest(
        id=expect_json_type(document["id"], str),
        created=created,
        scheme=expect_json_type(document["scheme"], str),
        payloads=payloads,
        step=step,
        metrics={name: float(value) for name, value in expect_json_type(document["metrics"], dict).items()},
        lossy_restores=_expect_restores(document["lossy_restores"]),
        loss=document["loss"],
        note=expect_json_type(document["note"], str),
        extra=document["extra"],
    )


def _expect_restores(value: JSON) -> int:
    """A count of restores, which schemes make seeds of."""
    if expect_count(value) >= 1 << 31:
        raise ValueError(f"{value} restores")
    return expect_count(value)


def _payload_from_json(row: JSON) -> Payload:
    name, size, digest, raw_bytes, bases = expect_json_type(row, list)
    pairs = tuple(_base_from_json(base) for base in expect_json_type(bases, list))
    known = {digest, *(one for one, _ in pairs)}
    if len(known) < len(pairs) + 1:
        raise ValueError("a chain that leads back to itself")
    return Payload(expect_payload_name(name), expect_count(size), expect_digest(digest), expect_count(raw_bytes), pairs)


def _base_from_json(row: JSON) -> tuple[str, int]:
    digest, size = expect_json_type(row, list)
    return expect_digest(digest), expect_count(size)
