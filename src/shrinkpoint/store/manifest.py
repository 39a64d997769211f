"""What one checkpoint is: a checkpoint exists when its manifest does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from shrinkpoint._native import xxh3_128
from shrinkpoint.errors import CorruptError, TruncatedError, VersionError
from shrinkpoint.record import JSON
from shrinkpoint.store import layout

FORMAT = 1
MAX_BYTES = 16 << 20
"""A reader refuses a larger manifest before it allocates; ours stay below 300 bytes per file of the chain."""


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
        document["loss"] = _plain(self.loss)
        if self.loss is None:
            del document["loss"]
        document["files"] = [[f.name, f.size, f.digest] for f in self.files]
        document["bases"] = [[b.step, b.id, b.digest, b.size, b.file, b.name] for b in self.bases]
        document["metrics"] = {name: _number(value) for name, value in self.metrics.items()}
        return _sealed(document)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            TruncatedError: the bytes end before the closing brace.
            CorruptError: the bytes contradict their digest or themselves.
            VersionError: a newer release wrote them.
        """
        document = _unsealed(data, where)
        if document.get("format") != FORMAT:
            raise VersionError(
                where,
                found=f"manifest format {document.get('format')!r}",
                expected=f"at most {FORMAT}",
                do="read it with the release that wrote it, or a newer one",
            )
        try:
            return _manifest(document)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _corrupt(where, f"a manifest that contradicts itself ({error})") from error


def now() -> str:
    """This moment, as manifests spell it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _corrupt(where: str, found: str, expected: str = "") -> CorruptError:
    do = "this checkpoint cannot be trusted: restore another, then `forget` and `prune` it"
    return CorruptError(where, found=found, expected=expected, do=do)


def _number(value: float) -> float | str:
    """JSON has no nan and no infinities; a loss of a diverged run must not stop its checkpoint."""
    return float(value) if math.isfinite(value) else str(float(value))


def _plain(value: JSON) -> JSON:
    """As `_number`, of whatever a scheme measured."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _number(value) if isinstance(value, float) else value


def _canonical(document: Mapping[str, JSON]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _sealed(document: dict[str, JSON]) -> bytes:
    return _canonical({**document, "digest": xxh3_128(_canonical(document))})


def _unsealed(data: bytes, where: str) -> dict[str, JSON]:
    """The document, once its digest is right and its spelling is the canonical one."""
    if not data.endswith(b"}"):
        do = "restore another checkpoint, then `forget` and `prune` this one"
        raise TruncatedError(where, found=f"{len(data)} bytes without an end", expected="a whole manifest", do=do)
    try:
        document = json.loads(data)
        found = document.pop("digest")
        canonical = _sealed(document)
        expected = json.loads(canonical)["digest"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(where, f"no manifest ({type(error).__name__})", "a JSON object with its digest") from error
    if found != expected:
        raise _corrupt(where, f"digest {str(found)[:40]}", expected)
    if canonical != data:
        raise _corrupt(where, "another spelling of this manifest", "canonical JSON")
    return dict(document)


def _manifest(document: dict[str, JSON]) -> Manifest:
    manifest = Manifest(
        id=_is(document["id"], str),
        step=layout.checked_step(_is(document["step"], int)),
        created=_is(document["created"], str),
        scheme=_is(document["scheme"], str),
        files=tuple(_file(one) for one in _is(document["files"], list)),
        bases=tuple(_base(one) for one in _is(document["bases"], list)),
        metrics={name: float(value) for name, value in _is(document["metrics"], dict).items()},
        raw_bytes=_count(document["raw_bytes"]),
        stored_bytes=_count(document["stored_bytes"]),
        lossy_restores=_count(document["lossy_restores"]),
        loss=_loss(document),
        note=_is(document["note"], str),
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    if manifest.created_at.tzinfo is None:
        raise ValueError("a time without a zone")
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
    name, size, digest = _is(row, list)
    return FileRef(_matching(layout.PAYLOAD, name), _count(size), _digest(digest))


def _base(row: JSON) -> Base:
    step, id, digest, size, file, name = _is(row, list)
    if name and name != layout.base_name(digest):
        raise ValueError(f"a base named {name!r}")
    file = _matching(layout.PAYLOAD, file)
    return Base(layout.checked_step(_is(step, int)), _is(id, str), _digest(digest), _count(size), file, _is(name, str))


def _digest(value: JSON) -> str:
    layout.base_name(_is(value, str))
    _matching(layout.BASE, layout.base_name(value))
    return str(value)


def _matching(pattern: Any, name: JSON) -> str:
    """A name that stays inside its directory; `..` and `/` match no pattern of ours."""
    if not pattern.fullmatch(_is(name, str)):
        raise ValueError(f"a file named {name!r}")
    return str(name)


def _count(value: JSON) -> int:
    if _is(value, int) < 0:
        raise ValueError(f"a negative count {value}")
    return int(value)


def _is(value: JSON, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where {kind.__name__} should be")
    return value
