"""A store, or a framework's run, as plain data: what the manifests of its checkpoints say."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.store.directory import find_checkpoints, read_directory_manifest
from shrinkpoint.store.loss_increase import LossIncrease
from shrinkpoint.store.manifest import DirectoryManifest, Manifest
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class CheckpointReport:
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
        out = {**asdict(self), "keyframe": self.keyframe, **ratio, **rise_json(self.loss), "files": files}
        return {name: value for name, value in out.items() if name != "loss" or value is not None}


@dataclass(frozen=True)
class StoreReport:
    """Every checkpoint of a store.

    Attributes:
        where: its path or URL.
        checkpoints: rising by step.
        broken: (place, reason) of whatever looks like a checkpoint and cannot be read.
    """

    where: str
    checkpoints: tuple[CheckpointReport, ...]
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
            "checkpoints": [{**replace(one, loss=None).to_json(), **rise_json(one.loss)} for one in self.checkpoints],
            "broken": [{"where": where, "found": found} for where, found in self.broken],
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "ratio": _ratio(self.raw_bytes, self.stored_bytes),
        }


def rise_json(loss: JSON) -> dict[str, Any]:
    """What JSON says of the loss: by how much it rises, and whether that was measured."""
    known = LossIncrease.from_loss(loss)
    return {"rise": known.value, "measured": known.is_measured}


def checkpoint_report(manifest: Manifest, *, forgotten: bool = False) -> CheckpointReport:
    """What a manifest says, and nothing that needs a look at its files."""
    return CheckpointReport(
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
        files=tuple((payload.name, payload.size, payload.digest) for payload in manifest.payloads),
    )


def store_report(
    where: str,
    manifests: Iterable[Manifest],
    *,
    forgotten: Collection[int] = frozenset(),
    broken: Iterable[tuple[str, str]] = (),
) -> StoreReport:
    """A store, from its manifests in any order."""
    rows = sorted(manifests, key=lambda one: one.step)
    return StoreReport(
        where, tuple(checkpoint_report(one, forgotten=one.step in forgotten) for one in rows), tuple(broken)
    )


def _ratio(raw: int, stored: int) -> float | None:
    return raw / stored if raw and stored else None


@dataclass(frozen=True)
class DirectoryReport:
    """One checkpoint, from its manifest.

    Attributes:
        folder: its path, relative to the run's.
        step: the training step it was saved at; None: nobody said.
        created: UTC, ISO 8601.
        scheme: which scheme wrote it.
        depth: deltas above the keyframe, of the rank that has most.
        ranks: how many wrote it.
        raw_bytes: bytes of the tensors of the state.
        stored_bytes: bytes of its own payloads, without the links to what they stand on.
        metrics, lossy_restores, loss, note: as in `CheckpointReport`.
        files: (name, bytes, header digest) of its payloads.
    """

    folder: str
    step: int | None
    created: str
    scheme: str
    depth: int
    ranks: int
    raw_bytes: int
    stored_bytes: int
    metrics: dict[str, float] = field(default_factory=dict)
    lossy_restores: int = 0
    loss: JSON = None
    note: str = ""
    files: tuple[tuple[str, int, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        files = [{"name": name, "bytes": size, "digest": digest} for name, size, digest in self.files]
        ratio = self.raw_bytes / self.stored_bytes if self.raw_bytes and self.stored_bytes else None
        return {**asdict(self), "ratio": ratio, **rise_json(self.loss), "files": files}


@dataclass(frozen=True)
class RunReport:
    """Every checkpoint below a directory.

    Attributes:
        where: its path.
        checkpoints: in the order of the numbers in their names.
        broken: (place, reason) of every manifest that cannot be read.
    """

    where: str
    checkpoints: tuple[DirectoryReport, ...]
    broken: tuple[tuple[str, str], ...] = ()

    @property
    def raw_bytes(self) -> int:
        return sum(one.raw_bytes for one in self.checkpoints)

    @property
    def stored_bytes(self) -> int:
        return sum(one.stored_bytes for one in self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; what a scheme lost is left to the single checkpoint."""
        rows = [{name: x for name, x in one.to_json().items() if name != "loss"} for one in self.checkpoints]
        broken = [{"where": where, "found": found} for where, found in self.broken]
        return {
            "where": self.where,
            "checkpoints": rows,
            "broken": broken,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
        }


def run_report(root: Path) -> RunReport:
    """All that is below a directory, or the checkpoint that it is."""
    rows, broken = [], []
    for folder in find_checkpoints(root):
        name = folder.relative_to(root).as_posix() if folder != root else folder.name
        try:
            rows.append(directory_report(read_directory_manifest(folder), name))
        except ShrinkpointError as error:
            broken.append((error.where, error.found))
    return RunReport(str(root), tuple(rows), tuple(broken))


def directory_report(manifest: DirectoryManifest, name: str) -> DirectoryReport:
    """What a manifest says, and nothing that needs a look at its files."""
    files = tuple((one.name, one.size, one.digest) for one in manifest.payloads)
    return DirectoryReport(
        name,
        manifest.step,
        manifest.created,
        manifest.scheme,
        manifest.depth,
        len(files),
        manifest.raw_bytes,
        manifest.stored_bytes,
        dict(manifest.metrics),
        manifest.lossy_restores,
        manifest.loss,
        manifest.note,
        files,
    )
