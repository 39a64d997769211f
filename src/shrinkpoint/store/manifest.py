"""What one checkpoint is: a checkpoint exists when its manifest does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import pairwise

from shrinkpoint.container.strict import shorten
from shrinkpoint.guard import guarded
from shrinkpoint.record import JSON
from shrinkpoint.store import layout
from shrinkpoint.store.sealed import (
    check_format,
    check_time,
    corrupt,
    count,
    expect,
    header_digest,
    number,
    payload_name,
    plain,
    sealed,
    unsealed,
)

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
class Base:
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
        return f"{layout.directory(self.step)}/{self.file}"


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
    bases: tuple[Base, ...] = ()
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
        return f"{layout.directory(self.step)}/{name}"

    def to_json(self) -> bytes:
        """Canonical bytes: one manifest has one spelling, and its digest stands inside."""
        document: dict[str, JSON] = {one.name: getattr(self, one.name) for one in fields(self)}
        document["format"] = FORMAT
        document["loss"] = plain(self.loss)
        if self.loss is None:
            del document["loss"]
        document["files"] = [[f.name, f.size, f.digest] for f in self.files]
        document["bases"] = [[b.step, b.id, b.digest, b.size, b.file, b.name] for b in self.bases]
        document["metrics"] = {name: number(value) for name, value in self.metrics.items()}
        return sealed(document)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            TruncatedError: the bytes end before the closing brace.
            CorruptError: the bytes contradict their digest or themselves.
            VersionError: a newer release wrote them.
        """
        with guarded(where):
            document = unsealed(data, where)
            check_format(document, where, FORMAT)
            try:
                return _manifest(document)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise corrupt(where, f"a manifest that contradicts itself ({shorten(str(error))})") from error


def _manifest(document: dict[str, JSON]) -> Manifest:
    manifest = Manifest(
        id=expect(document["id"], str),
        step=layout.checked_step(expect(document["step"], int)),
        created=expect(document["created"], str),
        scheme=expect(document["scheme"], str),
        files=tuple(_file(one) for one in expect(document["files"], list)),
        bases=tuple(_base(one) for one in expect(document["bases"], list)),
        metrics={name: float(value) for name, value in expect(document["metrics"], dict).items()},
        raw_bytes=count(document["raw_bytes"]),
        stored_bytes=count(document["stored_bytes"]),
        lossy_restores=count(document["lossy_restores"]),
        loss=_loss(document),
        note=expect(document["note"], str),
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


def _loss(document: Mapping[str, JSON]) -> JSON:
    if "loss" in document and document["loss"] is None:
        raise ValueError("a loss of nothing, which has another spelling")
    return document.get("loss")


def _file(row: JSON) -> FileRef:
    name, size, digest = expect(row, list)
    return FileRef(payload_name(name), count(size), header_digest(digest))


def _base(row: JSON) -> Base:
    step, id, digest, size, file, name = expect(row, list)
    if name and name != layout.base_name(digest):
        raise ValueError(f"a base named {name!r}")
    step, file = layout.checked_step(expect(step, int)), payload_name(file)
    return Base(step, expect(id, str), header_digest(digest), count(size), file, expect(name, str))
