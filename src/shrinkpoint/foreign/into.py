"""Checkpoints that others wrote, into a store of ours: one at a time, in the order of their steps, as one chain."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shrinkpoint.container import Reader
from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError
from shrinkpoint.foreign.checkpoint import Checkpoint, source_of
from shrinkpoint.foreign.compare import difference, outline_difference
from shrinkpoint.record import JSON
from shrinkpoint.schemes import Lossless, Scheme
from shrinkpoint.schemes.base import Resuming
from shrinkpoint.state import FlatState, flatten
from shrinkpoint.storage import Storage
from shrinkpoint.store import Store, chain
from shrinkpoint.store.file import Decoded
from shrinkpoint.store.manifest import Base, Manifest
from shrinkpoint.store.walk import walk


@dataclass(frozen=True)
class Row:
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


class Into:
    """A store that is filled.

    Args:
        storage: where to; with checkpoints of the same run, it is gone on with.
        scheme: one for all; None: lossless.
        force: save again what is there and differs.
        opaque: see `folder.read`.
    """

    def __init__(
        self, storage: Storage, *, scheme: Scheme | None = None, keyframe_every: int | None = 20,
        force: bool = False, opaque: bool = False,
    ) -> None:  # fmt: skip
        self._storage, self._scheme, self._force, self._opaque = storage, scheme or Lossless(), force, opaque
        self._store = Store(storage, keyframe_every=keyframe_every)
        self._ready: int | None = None  # the step that the next delta can stand on

    def __enter__(self) -> Into:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def add(self, one: Checkpoint) -> Row:
        """Save a checkpoint; one that is there and is the same stays as it is.

        Raises:
            PolicyError: another checkpoint of this step is there.
            StateError, FormatError, NotFoundError, StorageError: it cannot be read, or not be written.
        """
        began = time.perf_counter()
        flat, opaque = taken(one, self._opaque)
        before = self._store.scan().shown.get(one.step)
        if before is not None and self._same(one, flat, before):
            return _row(one, flat, before, opaque, time.perf_counter() - began, done=True)
        self._stand_on(one.step)
        note = f"converted from {one.name}"
        self._store.save(one.step, flat, scheme=self._scheme, note=note)
        self._ready = one.step
        return _row(one, flat, self._store.manifest(one.step), opaque, time.perf_counter() - began)

    def _same(self, one: Checkpoint, flat: FlatState, before: Manifest) -> bool:
        key = before.key(before.files[0].name)
        try:
            with self._storage.open(key) as source:
                reader = Reader(source, self._storage.describe(key))
            shapes = {info.name: info.shape for head in reader.records for info in head.infos}
            what = outline_difference(flat, reader.tree, shapes)
        except ShrinkpointError as error:
            what = str(error)
        if what and not self._force:
            where = f"{self._storage.describe()}, step {one.step}"
            expected, do = f"what {one.name} holds", "convert into another store, or add --force to save it again"
            raise PolicyError(where, found=f"a checkpoint that differs ({what})", expected=expected, do=do)
        return not what

    def _stand_on(self, step: int) -> None:
        """Load the checkpoint before, where an interrupted conversion has left it, so that the chain goes on."""
        steps = [known for known in self._store.steps() if known < step]
        if not steps or self._ready == steps[-1]:
            return
        self._store.load(steps[-1])
        if isinstance(self._scheme, Resuming):
            self._scheme.resume(self._store.manifest(steps[-1]).loss)


def verify(storage: Storage, checkpoints: Sequence[Checkpoint], *, opaque: bool = False) -> Iterator[tuple[int, bool]]:
    """Decode checkpoints from what is stored, and compare them with their sources.

    Yields:
        each step, and whether every bit of it was compared; what a lossy scheme wrote is compared but for its values.

    Raises:
        CorruptError: a difference.
    """
    wanted = {one.step: one for one in checkpoints}
    for manifest, decoded in _decoded(Store(storage), wanted):
        flat = flat_of(wanted[manifest.step], opaque=opaque)
        shapes = {name: tensor.shape for name, tensor in decoded.reference.tensors.items()}
        lossy = manifest.scheme != Lossless.id
        what = outline_difference(flat, decoded.tree, shapes) if lossy else difference(flat, decoded)
        if what:
            where = f"{storage.describe()}, step {manifest.step}"
            name = wanted[manifest.step].name
            do = f"see that nothing writes to {name}, keep it, and report this"
            raise CorruptError(where, found=what, expected=f"what {name} holds", do=do)
        yield manifest.step, not lossy


def flat_of(one: Checkpoint, *, opaque: bool = False) -> FlatState:
    """A checkpoint, read and taken apart; what cannot be stored is named with its file."""
    return taken(one, opaque)[0]


def taken(one: Checkpoint, opaque: bool) -> tuple[FlatState, tuple[str, ...]]:
    """The same, and the names of files that were taken along as they are."""
    gc.collect()  # torch.load leaves what it mapped in a cycle, and that of the checkpoint before is not needed now
    try:
        state = one.read(opaque=opaque)
        parts = (source_of(state) or {}).get("parts", {})
        return flatten(state), tuple(name for name, said in parts.items() if said.get("opaque"))
    except ShrinkpointError as error:
        if str(one.path) in error.where:
            raise
        where = f"{one.path}: {error.where}"
        raise type(error)(where, found=error.found, expected=error.expected, do=error.do) from error


def _decoded(store: Store, wanted: Mapping[int, object]) -> Iterator[tuple[Manifest, Decoded]]:
    """Every wanted step, along each chain once."""
    manifests = {one.id: one for one in store.list()}
    below = {base.id for one in manifests.values() for base in one.bases}
    seen: set[int] = set()
    for tip in sorted((one for one in manifests.values() if one.id not in below), key=lambda one: one.step):
        if not any(_is(base, manifests, wanted) for base in chain.files(tip)):
            continue
        for base, decoded in walk(store.storage, tip):
            manifest = manifests.get(base.id)
            if manifest is not None and manifest.step in wanted and manifest.step not in seen:
                seen.add(manifest.step)
                yield manifest, decoded


def _is(base: Base, manifests: Mapping[str, Manifest], wanted: Mapping[int, object]) -> bool:
    return base.id in manifests and base.step in wanted


def _row(
    one: Checkpoint, flat: FlatState, made: Manifest, opaque: tuple[str, ...], seconds: float, *, done: bool = False
) -> Row:
    after, keyframe = made.stored_bytes, not made.bases
    return Row(one.step, one.name, flat.nbytes, one.bytes, after, keyframe, seconds, done, opaque)
