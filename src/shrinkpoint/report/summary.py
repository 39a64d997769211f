"""A store as plain data: what its manifests say."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shrinkpoint.record import JSON
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.rise import Rise


@dataclass(frozen=True)
class CheckpointSummary:
    """One checkpoint, from its manifest.

    Attributes:
        step: the training step it was saved at.
        id: random hex; a step that is saved again gets a new one.
        created: UTC, ISO 8601.
        scheme: which scheme wrote it.
        depth: deltas above the keyframe; 0 for a keyframe.
        chain: the steps it is decoded from, keyframe first, itself last.
        raw_bytes: bytes of the tensors of the state.
        stored_bytes: bytes of its own files.
        metrics: what the loop measured.
        lossy_restores: lossy restores behind this state.
        loss: what was lost, and what was measured to decide it; None: nothing.
        note: free text.
        forgotten: hidden, and deleted by the next `prune` unless something stands on it.
        files: (name, bytes, header digest) of its payloads.
    """

    step: int
    id: str
    created: str
    scheme: str
    depth: int
    chain: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    metrics: dict[str, float] = field(default_factory=dict)
    lossy_restores: int = 0
    loss: JSON = None
    note: str = ""
    forgotten: bool = False
    files: tuple[tuple[str, int, str], ...] = ()

    @property
    def keyframe(self) -> bool:
        return self.depth == 0

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `ratio` is raw bytes for each stored byte, null if that means nothing; `loss` may lack.

        `rise` is that of the loss, relative; null where it was not measured, as `measured` says, or nothing was lost.
        """
        files = [{"name": name, "bytes": size, "digest": digest} for name, size, digest in self.files]
        ratio = {"ratio": _ratio(self.raw_bytes, self.stored_bytes)}
        out = {**asdict(self), "keyframe": self.keyframe, **ratio, **risen(self.loss), "files": files}
        return {name: value for name, value in out.items() if name != "loss" or value is not None}


@dataclass(frozen=True)
class StoreSummary:
    """Every checkpoint of a store.

    Attributes:
        where: its path or URL.
        checkpoints: rising by step.
        broken: (place, reason) of whatever looks like a checkpoint and cannot be read.
    """

    where: str
    checkpoints: tuple[CheckpointSummary, ...]
    broken: tuple[tuple[str, str], ...] = ()

    @property
    def raw_bytes(self) -> int:
        return sum(one.raw_bytes for one in self.checkpoints)

    @property
    def stored_bytes(self) -> int:
        return sum(one.stored_bytes for one in self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "checkpoints": [{**replace(one, loss=None).to_json(), **risen(one.loss)} for one in self.checkpoints],
            "broken": [{"where": where, "found": found} for where, found in self.broken],
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "ratio": _ratio(self.raw_bytes, self.stored_bytes),
        }


def risen(loss: JSON) -> dict[str, Any]:
    """What JSON says of the loss: by how much it rises, and whether that was measured."""
    known = Rise.of(loss)
    return {"rise": known.value, "measured": known.measured}


def checkpoint_summary(manifest: Manifest, *, forgotten: bool = False) -> CheckpointSummary:
    """What a manifest says, and nothing that needs a look at its files."""
    return CheckpointSummary(
        step=manifest.step,
        id=manifest.id,
        created=manifest.created,
        scheme=manifest.scheme,
        depth=manifest.depth,
        chain=(*(base.step for base in manifest.bases), manifest.step),
        raw_bytes=manifest.raw_bytes,
        stored_bytes=manifest.stored_bytes,
        metrics=dict(manifest.metrics),
        lossy_restores=manifest.lossy_restores,
        loss=manifest.loss,
        note=manifest.note,
        forgotten=forgotten,
        files=tuple((one.name, one.size, one.digest) for one in manifest.files),
    )


def store_summary(
    where: str,
    manifests: Iterable[Manifest],
    *,
    forgotten: Collection[int] = frozenset(),
    broken: Iterable[tuple[str, str]] = (),
) -> StoreSummary:
    """A store, from its manifests in any order."""
    rows = sorted(manifests, key=lambda one: one.step)
    return StoreSummary(
        where, tuple(checkpoint_summary(one, forgotten=one.step in forgotten) for one in rows), tuple(broken)
    )


def _ratio(raw: int, stored: int) -> float | None:
    return raw / stored if raw and stored else None
