"""Imports checkpoints that others wrote into a store, one at a time in the order of their steps, as one chain."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shrinkpoint.container import FileReader
from shrinkpoint.convert.source import SourceCheckpoint, origin_info
from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import Resumable, Scheme
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage import Storage
from shrinkpoint.store import Store, chain
from shrinkpoint.store.checkpoint_file import DecodedFile
from shrinkpoint.store.decode import iter_chain
from shrinkpoint.store.manifest import ChainLink, Manifest
from shrinkpoint.tensors.compare import describe_difference, describe_structure_difference
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.flatten import flatten
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class ImportRow:
    """One checkpoint that is in the store now.

    Attributes:
        step, name: as in its run.
        raw: bytes of its tensors.
        before: bytes that it takes where it is.
        after: bytes that it takes in the store.
        keyframe: it stands alone.
        seconds: to read, compress and write it.
        done: it was there already, from a conversion that was interrupted.
        opaque: files that were taken along as they are, since they cannot be read without running them.
    """

    step: int
    name: str
    raw: int
    before: int
    after: int
    keyframe: bool
    seconds: float
    done: bool = False
    opaque: tuple[str, ...] = ()

    def to_json(self) -> dict[str, JSON]:
        return dict(vars(self))


class Importer:
    """A store that is filled.

    Args:
        storage: where to; with checkpoints of the same run, it is gone on with.
        scheme: one for all; None: lossless.
        force: save again what is there and differs.
        opaque: see `folder.read`.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        scheme: Scheme | None = None,
        keyframe_every: int | None = 20,
        force: bool = False,
        opaque: bool = False,
    ) -> None:
        self._storage, self._scheme, self._force, self._opaque = storage, scheme or Lossless(), force, opaque
        self._store = Store(storage, keyframe_every=keyframe_every)
        self._parent_step: int | None = None  # the step that the next delta can stand on

    def __enter__(self) -> Importer:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def import_checkpoint(self, checkpoint: SourceCheckpoint) -> ImportRow:
        """Save a checkpoint; one that is there and is the same stays as it is.

        Raises:
            PolicyError: another checkpoint of this step is there.
            StateError, FormatError, NotFoundError, StorageError: it cannot be read, or not be written.
        """
        began = time.perf_counter()
        flat, opaque = read_flat_with_opaque(checkpoint, self._opaque)
        before = self._store.scan().visible.get(checkpoint.step)
        if before is not None and self._is_stored(checkpoint, flat, before):
            return _import_row(checkpoint, flat, before, opaque, time.perf_counter() - began, done=True)
        self._load_parent(checkpoint.step)
        note = f"converted from {checkpoint.name}"
        self._store.save(checkpoint.step, flat, scheme=self._scheme, note=note)
        self._parent_step = checkpoint.step
        return _import_row(checkpoint, flat, self._store.manifest(checkpoint.step), opaque, time.perf_counter() - began)

    def _is_stored(self, checkpoint: SourceCheckpoint, state: FlatState, manifest: Manifest) -> bool:
        key = manifest.key(manifest.payloads[0].name)
        try:
            with self._storage.open(key) as source:
                reader = FileReader(source, self._storage.describe(key))
            shapes = {info.name: info.shape for head in reader.records for info in head.infos}
            what = describe_structure_difference(state, reader.tree, shapes)
        except ShrinkpointError as error:
            what = str(error)
        if what and not self._force:
            where = f"{self._storage.describe()}, step {checkpoint.step}"
            expected, do = (
                f"what {checkpoint.name} holds",
                "convert into another store, or add --force to save it again",
            )
            raise PolicyError(where, found=f"a checkpoint that differs ({what})", expected=expected, do=do)
        return not what

    def _load_parent(self, step: int) -> None:
        """Load the checkpoint before, where an interrupted conversion has left it, so that the chain goes on."""
        steps = [known for known in self._store.steps() if known < step]
        if not steps or self._parent_step == steps[-1]:
            return
        self._store.load(steps[-1])
        if isinstance(self._scheme, Resumable):
            self._scheme.resume(self._store.manifest(steps[-1]).loss)


def verify_import(
    storage: Storage, checkpoints: Sequence[SourceCheckpoint], *, opaque: bool = False
) -> Iterator[tuple[int, bool]]:
    """Decode checkpoints from what is stored, and compare them with their sources.

    Yields:
        each step, and whether every bit of it was compared; what a lossy scheme wrote is compared but for its values.

    Raises:
        CorruptError: a difference.
    """
    wanted = {one.step: one for one in checkpoints}
    for manifest, decoded in _decode_steps(Store(storage), wanted):
        flat = read_flat(wanted[manifest.step], opaque=opaque)
        shapes = {name: tensor.shape for name, tensor in decoded.reference.tensors.items()}
        lossy = manifest.scheme != Lossless.id
        what = (
            describe_structure_difference(flat, decoded.tree, shapes) if lossy else describe_difference(flat, decoded)
        )
        if what:
            where = f"{storage.describe()}, step {manifest.step}"
            name = wanted[manifest.step].name
            do = f"see that nothing writes to {name}, keep it, and report this"
            raise CorruptError(where, found=what, expected=f"what {name} holds", do=do)
        yield manifest.step, not lossy


def read_flat(checkpoint: SourceCheckpoint, *, opaque: bool = False) -> FlatState:
    """A checkpoint, read and taken apart; what cannot be stored is named with its file."""
    return read_flat_with_opaque(checkpoint, opaque)[0]


def read_flat_with_opaque(checkpoint: SourceCheckpoint, opaque: bool) -> tuple[FlatState, tuple[str, ...]]:
    """The same, and the names of files that were taken along as they are."""
    gc.collect()  # torch.load leaves what it mapped in a cycle, and that of the checkpoint before is not needed now
    try:
        state = checkpoint.read(opaque=opaque)
        parts = (origin_info(state) or {}).get("parts", {})
        return flatten(state), tuple(name for name, said in parts.items() if said.get("opaque"))
    except ShrinkpointError as error:
        if str(checkpoint.path) in error.where:
            raise
        where = f"{checkpoint.path}: {error.where}"
        raise type(error)(where, found=error.found, expected=error.expected, do=error.do) from error


def _decode_steps(store: Store, steps: Mapping[int, object]) -> Iterator[tuple[Manifest, DecodedFile]]:
    """Every wanted step, along each chain once."""
    manifests = {one.id: one for one in store.list()}
    below = {base.id for one in manifests.values() for base in one.bases}
    seen: set[int] = set()
    for tip in sorted((one for one in manifests.values() if one.id not in below), key=lambda one: one.step):
        if not any(_is_requested(base, manifests, steps) for base in chain.chain_links(tip)):
            continue
        for file, decoded in iter_chain(chain.store_chain(store.storage, tip)):
            manifest = manifests.get(file.id)
            if manifest is not None and manifest.step in steps and manifest.step not in seen:
                seen.add(manifest.step)
                yield manifest, decoded


def _is_requested(base: ChainLink, manifests: Mapping[str, Manifest], steps: Mapping[int, object]) -> bool:
    return base.id in manifests and base.step in steps


def _import_row(
    checkpoint: SourceCheckpoint,
    state: FlatState,
    manifest: Manifest,
    opaque: tuple[str, ...],
    seconds: float,
    *,
    done: bool = False,
) -> ImportRow:
    after, keyframe = manifest.stored_bytes, not manifest.bases
    return ImportRow(
        checkpoint.step, checkpoint.name, state.nbytes, checkpoint.nbytes, after, keyframe, seconds, done, opaque
    )
