"""What a checkpoint is: it exists when its manifest does.

One class, two encodings: that of a step of a store (`manifest.json`), and that of a directory which a framework names
(`shrinkpoint.json`). A new field goes into `Manifest`, `_shared_to_json` and `_shared_from_json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

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
from shrinkpoint.tensors.info import JSON

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    StepT = TypeVar("StepT", bound=int | None, default=int, covariant=True)
else:
    from typing import TypeVar

    StepT = TypeVar("StepT")

T = TypeVar("T")
FORMAT = 1
DIRECTORY_FORMAT = 1
MAX_DIRECTORY_MANIFEST_BYTES = 256 << 20
"""A reader refuses a larger manifest before it allocates; `extra` of a run on thousands of ranks takes megabytes."""
MAX_LOSSY_RESTORES = (1 << 31) - 1
"""In a directory's manifest: schemes derive seeds from this number."""


@dataclass(frozen=True)
class ChainLink:
    """One file that a delta of a store depends on.

    Attributes:
        step, id: the checkpoint it belonged to when the delta was made.
        digest: its header digest, which decides whether a file found later is the right one.
        size: in bytes.
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
        """Its key in the directory of the step it belonged to."""
        return f"{layout.step_dir(self.step)}/{self.file}"


@dataclass(frozen=True)
class Payload:
    """The file of one rank.

    Attributes:
        name: in the checkpoint's directory.
        size: in bytes.
        digest: header digest, which authenticates every other byte.
        raw_bytes: bytes of the tensors in it.
        bases: in a framework's directory, the header digest and the size of each file it depends on, keyframe first;
            empty for a keyframe. (A store's manifest has `Manifest.bases` instead.)
    """

    name: str
    size: int
    digest: str
    raw_bytes: int = 0
    bases: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Manifest(Generic[StepT]):
    """A checkpoint. `Manifest` alone is that of a store, which always has a step.

    Attributes:
        id: random hex, and with it the state: a step saved again gets a new one, a file written again keeps its own.
        created: UTC, ISO 8601 with milliseconds.
        scheme: the id of the scheme that was asked for.
        payloads: one for each rank, in the order of the ranks.
        step: counts training steps; names the directory in a store. None if unknown, which only a framework's
            directory allows.
        metrics: what the loop measured, by name.
        lossy_restores: how many restores from lossy checkpoints lie behind this state.
        loss: what this checkpoint lost, and what was tried and measured to decide it; None: nothing.
        note: free text.
        bases: the files that a store's delta depends on, keyframe first, by rising step; empty for a keyframe.
        extra: what a framework's own reader needs; None in a store.
        stored_bytes: bytes of the payloads, without the files they depend on; computed unless given, as a store's
            manifest records it.
    """

    id: str
    created: str
    scheme: str
    payloads: tuple[Payload, ...]
    step: StepT
    metrics: Mapping[str, float] = field(default_factory=dict)
    lossy_restores: int = 0
    loss: JSON = None
    note: str = ""
    bases: tuple[ChainLink, ...] = ()
    extra: JSON = None
    stored_bytes: int = -1

    def __post_init__(self) -> None:
        if self.stored_bytes < 0:
            object.__setattr__(self, "stored_bytes", sum(payload.size for payload in self.payloads))

    @property
    def raw_bytes(self) -> int:
        """Bytes of the state's tensors."""
        return sum(payload.raw_bytes for payload in self.payloads)

    @property
    def depth(self) -> int:
        """Deltas to apply on top of the keyframe, of the rank that has most; 0 for a keyframe."""
        return max(len(self.bases), *(len(payload.bases) for payload in self.payloads))

    @property
    def is_lossy(self) -> bool:
        """Whether a restore gives other values than were saved."""
        return isinstance(self.loss, dict) and self.loss.get("chosen") is not None

    @property
    def digest(self) -> str:
        """The header digest of the first payload, by which deltas of a store know this checkpoint."""
        return self.payloads[0].digest

    @property
    def created_at(self) -> datetime:
        return datetime.fromisoformat(self.created)

    def key(self: Manifest, name: str) -> str:
        """The key of a file in this checkpoint's directory of a store."""
        return f"{layout.step_dir(self.step)}/{name}"


DirectoryManifest: TypeAlias = "Manifest[int | None]"
"""For annotations: the manifest of a framework's directory, whose step may be unknown."""


def encode_store_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes of a step's manifest: one manifest has one encoding, with its digest inside."""
    document = _shared_to_json(manifest)
    if manifest.loss is None:
        del document["loss"]
    document["format"] = FORMAT
    document["files"] = [[payload.name, payload.size, payload.digest] for payload in manifest.payloads]
    document["bases"] = [[b.step, b.id, b.digest, b.size, b.file, b.name] for b in manifest.bases]
    document["raw_bytes"], document["stored_bytes"] = manifest.raw_bytes, manifest.stored_bytes
    return dump_with_digest(document)


def decode_store_manifest(data: bytes, where: str) -> Manifest:
    """Read what `encode_store_manifest` wrote.

    Raises:
        TruncatedError: the bytes end before the closing brace.
        CorruptError: the bytes contradict their digest or themselves.
        VersionError: a newer release wrote them.
    """
    return _decode(data, where, FORMAT, _store_manifest_from_json)


def encode_directory_manifest(manifest: DirectoryManifest) -> bytes:
    """Canonical bytes of a directory's manifest: one manifest has one encoding, with its digest inside."""
    document = _shared_to_json(manifest)
    document["format"] = DIRECTORY_FORMAT
    document["payloads"] = [
        [payload.name, payload.size, payload.digest, payload.raw_bytes, [list(base) for base in payload.bases]]
        for payload in manifest.payloads
    ]
    document["extra"] = json_safe(manifest.extra)
    return dump_with_digest(document)


def decode_directory_manifest(data: bytes, where: str) -> DirectoryManifest:
    """Read what `encode_directory_manifest` wrote; raises as `decode_store_manifest` does."""
    return _decode(data, where, DIRECTORY_FORMAT, _directory_manifest_from_json)


def _decode(data: bytes, where: str, supported: int, from_json: Callable[[Mapping[str, JSON]], T]) -> T:
    with read_guard(where):
        document = load_with_digest(data, where)
        check_format(document, where, supported)
        try:
            return from_json(document)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise manifest_error(where, f"a manifest that contradicts itself ({shorten(str(error))})") from error


def _shared_to_json(manifest: DirectoryManifest) -> dict[str, JSON]:
    """The fields that both encodings have under the same keys."""
    return {
        "id": manifest.id,
        "created": manifest.created,
        "scheme": manifest.scheme,
        "step": manifest.step,
        "metrics": {name: json_number(value) for name, value in manifest.metrics.items()},
        "lossy_restores": manifest.lossy_restores,
        "loss": json_safe(manifest.loss),
        "note": manifest.note,
    }


def _shared_from_json(document: Mapping[str, JSON]) -> dict[str, Any]:
    """The arguments of `Manifest` that both encodings have; `step` and `loss` are checked by the caller."""
    created = expect_json_type(document["created"], str)
    check_time(created)
    return {
        "id": expect_json_type(document["id"], str),
        "created": created,
        "scheme": expect_json_type(document["scheme"], str),
        "step": document["step"],
        "metrics": {name: float(value) for name, value in expect_json_type(document["metrics"], dict).items()},
        "lossy_restores": expect_count(document["lossy_restores"]),
        "loss": document.get("loss"),
        "note": expect_json_type(document["note"], str),
    }


def _store_manifest_from_json(document: Mapping[str, JSON]) -> Manifest:
    if "loss" in document and document["loss"] is None:
        raise ValueError("a loss of nothing, which has another spelling")
    raw_bytes = expect_count(document["raw_bytes"])
    payloads = tuple(
        _store_payload_from_json(row, 0 if index else raw_bytes)
        for index, row in enumerate(expect_json_type(document["files"], list))
    )
    manifest: Manifest = Manifest(
        **_shared_from_json(document),
        payloads=payloads,
        bases=tuple(_chain_link_from_json(row) for row in expect_json_type(document["bases"], list)),
        stored_bytes=expect_count(document["stored_bytes"]),
    )
    _check_payload_names(payloads)
    steps = [*(base.step for base in manifest.bases), layout.check_step(expect_json_type(manifest.step, int))]
    if any(low >= high for low, high in pairwise(steps)):  # so no chain can be a circle
        raise ValueError("a chain whose steps do not rise")
    return manifest


def _directory_manifest_from_json(document: Mapping[str, JSON]) -> DirectoryManifest:
    payloads = tuple(_payload_from_json(row) for row in expect_json_type(document["payloads"], list))
    manifest: DirectoryManifest = Manifest(**_shared_from_json(document), payloads=payloads, extra=document["extra"])
    _check_payload_names(payloads)
    if "loss" not in document:
        raise KeyError("loss")
    if manifest.step is not None and not 0 <= expect_json_type(manifest.step, int) < layout.MAX_STEP:
        raise ValueError(f"step {manifest.step}")
    if manifest.lossy_restores > MAX_LOSSY_RESTORES:
        raise ValueError(f"{manifest.lossy_restores} restores")
    return manifest


def _check_payload_names(payloads: tuple[Payload, ...]) -> None:
    if not payloads or len({payload.name for payload in payloads}) < len(payloads):
        raise ValueError("no payload, or the same one twice")


def _store_payload_from_json(row: JSON, raw_bytes: int) -> Payload:
    name, size, digest = expect_json_type(row, list)
    return Payload(expect_payload_name(name), expect_count(size), expect_digest(digest), raw_bytes)


def _chain_link_from_json(row: JSON) -> ChainLink:
    step, id, digest, size, file, name = expect_json_type(row, list)
    if name and name != layout.base_name(digest):
        raise ValueError(f"a base named {name!r}")
    step, file = layout.check_step(expect_json_type(step, int)), expect_payload_name(file)
    return ChainLink(
        step, expect_json_type(id, str), expect_digest(digest), expect_count(size), file, expect_json_type(name, str)
    )


def _payload_from_json(row: JSON) -> Payload:
    name, size, digest, raw_bytes, bases = expect_json_type(row, list)
    pairs = tuple(_base_from_json(base) for base in expect_json_type(bases, list))
    if len({digest, *(base for base, _ in pairs)}) < len(pairs) + 1:
        raise ValueError("a chain that leads back to itself")
    return Payload(expect_payload_name(name), expect_count(size), expect_digest(digest), expect_count(raw_bytes), pairs)


def _base_from_json(row: JSON) -> tuple[str, int]:
    digest, size = expect_json_type(row, list)
    return expect_digest(digest), expect_count(size)
