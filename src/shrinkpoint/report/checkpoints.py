"""Reports the checkpoints of a store or a run from their manifests, as plain data; imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store.chain import disk_bytes, file_sizes
from shrinkpoint.store.directory import own_keys, read_directory_manifest
from shrinkpoint.store.history import abandoned_steps, is_abandoned, newest_place, place_of
from shrinkpoint.store.identify import find_checkpoints
from shrinkpoint.store.manifest import DirectoryManifest, Manifest
from shrinkpoint.store.save_report import LossIncrease

_STORE_ONLY = ("id", "chain", "forgotten", "keyframe", "weights_only")
_DIRECTORY_ONLY = ("folder", "ranks")


@dataclass(frozen=True)
class CheckpointReport:
    """The manifest of a checkpoint, and its place in the store or the run."""

    manifest: Manifest | DirectoryManifest
    folder: str | None = None  # path of its directory, relative to the run; None for a checkpoint of a store
    abandoned: bool = False  # the run has gone back to an older step since, and left the checkpoint behind
    forgotten: bool = False  # hidden, and deleted by the next `prune` unless a kept checkpoint depends on it

    @property
    def chain(self) -> tuple[int | None, ...]:
        """The steps that a store's checkpoint is decoded from, keyframe first, its own last."""
        return (*(base.step for base in self.manifest.bases), self.manifest.step)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files that the checkpoint needs, its bases included."""
        return sum(file_sizes([self.manifest]).values())

    def to_json(self, *, loss: bool = True) -> dict[str, Any]:
        """The report as a JSON object, with the fields that a store's or a run's checkpoint has.

        `ratio` is raw bytes for each stored byte, null if there are none. `rise` is the relative rise of the loss,
        null if it was not measured, as `measured` says, or nothing was lost; `predicted` is what the scheme expected
        then, in nats.

        Args:
            loss: include what the scheme recorded of the loss; a store's checkpoint has no entry if nothing was lost.
        """
        manifest, increase = self.manifest, LossIncrease.from_loss(self.manifest.loss)
        document = {
            "folder": self.folder,
            "step": manifest.step,
            "id": manifest.id,
            "created": manifest.created,
            "scheme": manifest.scheme,
            "depth": manifest.depth,
            "chain": self.chain,
            "ranks": len(manifest.payloads),
            "raw_bytes": manifest.raw_bytes,
            "stored_bytes": manifest.stored_bytes,
            "disk_bytes": self.disk_bytes,
            "metrics": dict(manifest.metrics),
            "lossy_restores": manifest.lossy_restores,
            "loss": manifest.loss,
            "note": manifest.note,
            "stats": dict(manifest.stats),
            "weights_only": manifest.weights_only,
            "abandoned": self.abandoned,
            "forgotten": self.forgotten,
            "files": [{"name": file.name, "bytes": file.size, "digest": file.digest} for file in manifest.payloads],
            "keyframe": manifest.depth == 0,
            "ratio": _ratio(manifest.raw_bytes, manifest.stored_bytes),
            "rise": increase.value,
            "measured": increase.is_measured,
            "predicted": increase.predicted,
            "restored_rise": increase.restored,
        }
        omitted = set(_DIRECTORY_ONLY if self.folder is None else _STORE_ONLY)
        if not loss or (manifest.loss is None and self.folder is None):
            omitted.add("loss")
        return {name: value for name, value in document.items() if name not in omitted}


@dataclass(frozen=True)
class StoreReport:
    """Every checkpoint of a store, or below the directory of a framework's run."""

    where: str  # its path or URL
    # A store's by rising step, a run's in the order of the numbers in their names.
    checkpoints: tuple[CheckpointReport, ...]
    broken: tuple[tuple[str, str], ...] = ()  # (place, reason) of every checkpoint whose manifest cannot be read
    is_run: bool = False  # it is the directory of a framework's run
    # Bytes of all payloads that are there, bases of deltas included, a file with several names once.
    stored_bytes: int = 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of the states of as many plain checkpoints.

        There would be none of a forgotten one, which may still be a base, and one of a directory and links to it.
        """
        return sum({row.manifest.id: row.manifest.raw_bytes for row in self.checkpoints if not row.forgotten}.values())

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object; only `show` prints what a scheme recorded of the loss."""
        document: dict[str, Any] = {
            "where": self.where,
            "checkpoints": [checkpoint.to_json(loss=False) for checkpoint in self.checkpoints],
            "broken": [{"where": where, "found": found} for where, found in self.broken],
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
        }
        return document if self.is_run else {**document, "ratio": _ratio(self.raw_bytes, self.stored_bytes)}


def store_report(
    where: str,
    manifests: Iterable[Manifest],
    *,
    forgotten: Collection[int] = frozenset(),
    broken: Iterable[tuple[str, str]] = (),
    stored_bytes: int | None = None,
) -> StoreReport:
    """Reports a store from its manifests, given in any order.

    Args:
        stored_bytes: of all payloads that are there; None: as far as these manifests tell.
    """
    rising = sorted(manifests, key=lambda manifest: manifest.step)
    abandoned = abandoned_steps(manifest for manifest in rising if manifest.step not in forgotten)
    reports = [
        CheckpointReport(manifest, abandoned=manifest.step in abandoned, forgotten=manifest.step in forgotten)
        for manifest in rising
    ]
    if stored_bytes is None:
        stored_bytes = sum(file_sizes(rising).values())
    return StoreReport(where, tuple(reports), tuple(broken), stored_bytes=stored_bytes)


def run_report(root: Path | ObjectUrl) -> StoreReport:
    """Reports every checkpoint below a directory, or the one checkpoint that the directory is."""
    manifests: dict[str, DirectoryManifest] = {}
    broken: list[tuple[str, str]] = []
    folders: Mapping[str, Path | ObjectUrl]
    if isinstance(root, Path):
        folders = {
            path.relative_to(root).as_posix() if path != root else path.name: path for path in find_checkpoints(root)
        }
    else:
        folders = {url.relative_to(root) or url.name: url for url in find_checkpoints(root)}
    for folder, directory in folders.items():
        try:
            manifests[folder] = read_directory_manifest(directory)
        except ShrinkpointError as error:
            broken.append((error.where, error.found))
    newest = newest_place(map(place_of, manifests.values()))
    reports = (
        CheckpointReport(manifest, folder=folder, abandoned=is_abandoned(place_of(manifest), newest))
        for folder, manifest in manifests.items()
    )
    stored_bytes = sum(file_sizes(manifests.values()).values())
    if isinstance(root, Path):
        directories = [path for path in folders.values() if isinstance(path, Path)]
        stored_bytes = disk_bytes(path / key for path in directories for key in own_keys(path))
    return StoreReport(str(root), tuple(reports), tuple(broken), is_run=True, stored_bytes=stored_bytes)


def _ratio(raw: int, stored: int) -> float | None:
    return raw / stored if raw and stored else None
