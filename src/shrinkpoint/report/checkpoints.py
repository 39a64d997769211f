"""What manifests say of the checkpoints of a store or a run, as plain data; imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.storage import LocalStorage, ObjectUrl, Storage
from shrinkpoint.store.chain import file_sizes
from shrinkpoint.store.directory import find_checkpoints, own_keys, read_directory_manifest
from shrinkpoint.store.history import abandoned_steps, is_abandoned, newest_place, place_of
from shrinkpoint.store.listing import Listing
from shrinkpoint.store.loss_increase import LossIncrease
from shrinkpoint.store.manifest import DirectoryManifest, Manifest
from shrinkpoint.tensors.info import JSON

_STORE_ONLY = ("id", "chain", "forgotten", "keyframe", "weights_only")
_DIRECTORY_ONLY = ("folder", "ranks")


@dataclass(frozen=True)
class CheckpointReport:
    """One checkpoint of a store or of a framework's run, from its manifest.

    Attributes:
        folder: path of its directory, relative to the run; None for a checkpoint of a store.
        step: the training step it was saved at; None if unknown.
        id: random hex; a step that is saved again gets a new one; "" for a checkpoint of a run.
        created: UTC, ISO 8601.
        scheme: which scheme wrote it.
        depth: deltas above the keyframe, on the rank that has most; 0 for a keyframe.
        chain: the steps it is decoded from, keyframe first, itself last; empty for a checkpoint of a run.
        ranks: how many processes wrote it.
        raw_bytes: bytes of the tensors of the state.
        stored_bytes: bytes of its own files, without links to its bases.
        disk_bytes: bytes of all files that it needs, its bases included.
        metrics: what the training loop measured.
        lossy_restores: how many lossy restores the state has behind it.
        loss: what was lost, and what was measured to decide it; None: nothing.
        note: free text.
        stats: what the save measured of itself: `seconds`, `stall`, `retention`, as far as known.
        weights_only: retention has deleted what the optimizers kept for each parameter.
        abandoned: the run has gone back to an older step since, and left it behind.
        forgotten: hidden, and deleted by the next `prune` unless a kept checkpoint depends on it.
        files: (name, bytes, header digest) of its payloads.
    """

    folder: str | None
    step: int | None
    id: str
    created: str
    scheme: str
    depth: int
    chain: tuple[int, ...]
    ranks: int
    raw_bytes: int
    stored_bytes: int
    disk_bytes: int
    metrics: dict[str, float]
    lossy_restores: int
    loss: JSON
    note: str
    stats: dict[str, float]
    weights_only: bool
    abandoned: bool
    forgotten: bool
    files: tuple[tuple[str, int, str], ...]

    @property
    def keyframe(self) -> bool:
        return self.depth == 0

    @property
    def kind(self) -> str:
        """What people call it: a keyframe, or a delta with its depth; and whether it has weights only."""
        kind = "keyframe" if self.keyframe else f"delta {self.depth}"
        return f"{kind}, weights only" if self.weights_only else kind

    def to_json(self, *, loss: bool = True) -> dict[str, Any]:
        """The report as a JSON object, with the fields that a store's or a run's checkpoint has.

        `ratio` is raw bytes for each stored byte, null if there are none. `rise` is the relative increase of the loss,
        null if it was not measured, as `measured` says, or nothing was lost; `predicted` is what the scheme expected
        then, in nats.

        Args:
            loss: include what the scheme recorded of the loss; a store's checkpoint has no entry if nothing was lost.
        """
        increase = LossIncrease.from_loss(self.loss)
        document = {
            **asdict(self),
            "files": [{"name": name, "bytes": size, "digest": digest} for name, size, digest in self.files],
            "keyframe": self.keyframe,
            "ratio": _ratio(self.raw_bytes, self.stored_bytes),
            "rise": increase.value,
            "measured": increase.is_measured,
            "predicted": increase.predicted,
        }
        omitted = set(_DIRECTORY_ONLY if self.folder is None else _STORE_ONLY)
        if not loss or (self.loss is None and self.folder is None):
            omitted.add("loss")
        return {name: value for name, value in document.items() if name not in omitted}


@dataclass(frozen=True)
class StoreReport:
    """Every checkpoint of a store, or below the directory of a framework's run.

    Attributes:
        where: its path or URL.
        checkpoints: a store's by rising step, a run's in the order of the numbers in their names.
        broken: (place, reason) of every checkpoint whose manifest cannot be read.
        is_run: it is the directory of a framework's run.
        stored_bytes: bytes of all payloads that are there, bases of deltas included, a file with several names once.
    """

    where: str
    checkpoints: tuple[CheckpointReport, ...]
    broken: tuple[tuple[str, str], ...] = ()
    is_run: bool = False
    stored_bytes: int = 0

    @property
    def raw_bytes(self) -> int:
        return sum(checkpoint.raw_bytes for checkpoint in self.checkpoints)

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


def checkpoint_report(
    manifest: Manifest | DirectoryManifest,
    *,
    folder: str | None = None,
    abandoned: bool = False,
    forgotten: bool = False,
) -> CheckpointReport:
    """Reports what the manifest of a checkpoint says, without looking at its files.

    Args:
        folder: path of the directory of a framework's checkpoint; None for one of a store.
        abandoned: the present line of history left it behind.
    """
    chain: tuple[int, ...] = ()
    if folder is None and manifest.step is not None:
        chain = (*(base.step for base in manifest.bases), manifest.step)
    return CheckpointReport(
        folder=folder,
        step=manifest.step,
        id=manifest.id if folder is None else "",
        created=manifest.created,
        scheme=manifest.scheme,
        depth=manifest.depth,
        chain=chain,
        ranks=1 if folder is None else len(manifest.payloads),
        raw_bytes=manifest.raw_bytes,
        stored_bytes=manifest.stored_bytes,
        disk_bytes=sum(file_sizes([manifest]).values()),
        metrics=dict(manifest.metrics),
        lossy_restores=manifest.lossy_restores,
        loss=manifest.loss,
        note=manifest.note,
        stats=dict(manifest.stats),
        weights_only=manifest.weights_only,
        abandoned=abandoned,
        forgotten=forgotten,
        files=tuple((payload.name, payload.size, payload.digest) for payload in manifest.payloads),
    )


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
        checkpoint_report(manifest, abandoned=manifest.step in abandoned, forgotten=manifest.step in forgotten)
        for manifest in rising
    ]
    if stored_bytes is None:
        stored_bytes = sum(file_sizes(rising).values())
    return StoreReport(where, tuple(reports), tuple(broken), stored_bytes=stored_bytes)


def payload_bytes(storage: Storage, listing: Listing) -> int:
    """Bytes of all payloads in a store, bases of deltas included, a file with several names once."""
    if isinstance(storage, LocalStorage):
        return _disk_bytes(storage.path / key for key in listing.keys if key.endswith(".safetensors"))
    return sum(file_sizes(listing.manifests.values()).values())


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
        checkpoint_report(manifest, folder=folder, abandoned=is_abandoned(place_of(manifest), newest))
        for folder, manifest in manifests.items()
    )
    stored_bytes = sum(file_sizes(manifests.values()).values())
    if isinstance(root, Path):
        directories = [path for path in folders.values() if isinstance(path, Path)]
        stored_bytes = _disk_bytes(path / key for path in directories for key in own_keys(path))
    return StoreReport(str(root), tuple(reports), tuple(broken), is_run=True, stored_bytes=stored_bytes)


def _disk_bytes(paths: Iterable[Path]) -> int:
    """Bytes of files, each once whatever number of names it has."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _ratio(raw: int, stored: int) -> float | None:
    return raw / stored if raw and stored else None
