"""A run whose checkpoints lie in folders of a framework's own, as plain data: what their manifests say."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.record import JSON
from shrinkpoint.report.summary import risen
from shrinkpoint.store.folder import found_in, read_manifest
from shrinkpoint.store.foldermanifest import FolderManifest


@dataclass(frozen=True)
class FolderSummary:
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
        metrics, lossy_restores, loss, note: as in `CheckpointSummary`.
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
        return {**asdict(self), "ratio": ratio, **risen(self.loss), "files": files}


@dataclass(frozen=True)
class RunSummary:
    """Every checkpoint below a directory.

    Attributes:
        where: its path.
        checkpoints: in the order of the numbers in their names.
        broken: (place, reason) of every manifest that cannot be read.
    """

    where: str
    checkpoints: tuple[FolderSummary, ...]
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
            "where": self.where, "checkpoints": rows, "broken": broken, "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
        }  # fmt: skip


def run_summary(root: Path) -> RunSummary:
    """All that is below a directory, or the checkpoint that it is."""
    rows, broken = [], []
    for folder in found_in(root):
        name = folder.relative_to(root).as_posix() if folder != root else folder.name
        try:
            rows.append(folder_summary(read_manifest(folder), name))
        except ShrinkpointError as error:
            broken.append((error.where, error.found))
    return RunSummary(str(root), tuple(rows), tuple(broken))


def folder_summary(manifest: FolderManifest, name: str) -> FolderSummary:
    """What a manifest says, and nothing that needs a look at its files."""
    files = tuple((one.name, one.size, one.digest) for one in manifest.payloads)
    return FolderSummary(
        name, manifest.step, manifest.created, manifest.scheme, manifest.depth, len(files), manifest.raw_bytes,
        manifest.stored_bytes, dict(manifest.metrics), manifest.lossy_restores, manifest.loss, manifest.note, files,
    )  # fmt: skip
