"""Imports checkpoints that others wrote into a store, one at a time in the order of their steps, as one chain."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shrinkpoint.container import FileReader
from shrinkpoint.convert.discover import SourceCheckpoint
from shrinkpoint.convert.part import origin_info
from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError, StateError
from shrinkpoint.schemes.base import Scheme, resume_scheme
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage import Storage
from shrinkpoint.store import Store
from shrinkpoint.store.checkpoint_file import DecodedFile, write_file
from shrinkpoint.store.decode import iter_checkpoints
from shrinkpoint.store.file_place import place_file
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.single_file import decode_file
from shrinkpoint.tensors.compare import describe_structure_difference, same_bits
from shrinkpoint.tensors.flat_state import FlatState, flatten

_HOW_TO_REPLACE = "convert into another store, or add --force to save it again"


@dataclass(frozen=True)
class ImportRow:
    """One checkpoint that was imported, as a row of the report.

    Attributes:
        step: its training step.
        name: its name in the run.
        raw: bytes of its tensors.
        before: bytes that the source takes.
        after: bytes that it takes in the store.
        keyframe: it has no base.
        seconds: time to read, compress and write it.
        done: it was in the store already, from a conversion that was interrupted.
        opaque: files kept as their bytes, since they cannot be read without running them.
        unchecked: files whose format has no checksum, so that damage from before the conversion is not found.
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
    unchecked: tuple[str, ...] = ()


class Importer:
    """Imports checkpoints into a store; a context manager that closes the store at the end.

    Args:
        storage: the store's storage; if it has checkpoints of the same run, the import continues after them.
        scheme: how to compress every checkpoint; None: lossless.
        keyframe_every: greatest number of checkpoints in a chain, its keyframe included; a chain ends earlier where its
            files have four times the bytes of the state. None: one chain.
        force: save again what is in the store and differs.
        opaque: keep files that cannot be read without running them as their bytes, however large.
    """

    def __init__(
        self,
        storage: Storage,
        scheme: Scheme | None = None,
        keyframe_every: int | None = 20,
        *,
        force: bool = False,
        opaque: bool = False,
    ) -> None:
        self._storage, self._scheme, self._force, self._opaque = storage, scheme or Lossless(), force, opaque
        self._store = Store(storage, keyframe_every=keyframe_every)
        self._parent_step: int | None = None  # the step that the next delta can be written against

    def __enter__(self) -> Importer:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def import_checkpoint(self, checkpoint: SourceCheckpoint) -> ImportRow:
        """Saves a checkpoint; if the same one is stored already, it stays unchanged.

        Raises:
            PolicyError: another checkpoint of this step is stored, and it is not forced.
            StateError, FormatError, NotFoundError, StorageError: the checkpoint cannot be read, or not be written.
        """
        began = time.perf_counter()
        state, opaque, unchecked = read_flat(checkpoint, self._opaque)
        manifest = self._store.scan().visible.get(checkpoint.step)
        done = manifest is not None and self._is_stored(checkpoint, state, manifest)
        if manifest is None or not done:
            # the newest earlier checkpoint, if an interrupted conversion left one, so that its chain continues
            earlier = [step for step in self._store.steps() if step < checkpoint.step]
            if earlier and self._parent_step != earlier[-1]:
                self._store.load(earlier[-1])
                resume_scheme(self._scheme, self._store.manifest(earlier[-1]).loss)
            note = f"converted from {checkpoint.name}"
            self._store.save(checkpoint.step, state, scheme=self._scheme, note=note, fill_in=True)
            self._parent_step = checkpoint.step
            manifest = self._store.manifest(checkpoint.step)
        return ImportRow(
            step=checkpoint.step,
            name=checkpoint.name,
            raw=state.nbytes,
            before=checkpoint.nbytes,
            after=manifest.stored_bytes,
            keyframe=not manifest.bases,
            seconds=time.perf_counter() - began,
            done=done,
            opaque=opaque,
            unchecked=unchecked,
        )

    def _is_stored(self, checkpoint: SourceCheckpoint, state: FlatState, manifest: Manifest) -> bool:
        """True if a stored checkpoint is that of a state; raises `PolicyError` if its structure differs.

        If forced, nothing is raised and values are compared too; else `verify_import` compares them.
        """
        key = manifest.key(manifest.payloads[0].name)
        try:
            with self._storage.open(key) as source:
                reader = FileReader(source, self._storage.describe(key))
            shapes = {info.name: info.shape for head in reader.records for info in head.infos}
            difference = describe_structure_difference(state, reader.tree, shapes)
        except ShrinkpointError as error:
            difference = str(error)
        if self._force:
            return not difference and self._has_values(state, manifest)
        if difference:
            found, expected = f"a checkpoint that differs ({difference})", f"what {checkpoint.name} holds"
            where = f"{self._storage.describe()}, step {checkpoint.step}"
            raise PolicyError(where, found=found, expected=expected, do=_HOW_TO_REPLACE)
        return True

    def _has_values(self, state: FlatState, manifest: Manifest) -> bool:
        """True if a stored checkpoint has the values of a state; of a lossy one, or one that is broken, never."""
        if manifest.scheme != Lossless.id:
            return False
        try:
            ((_, decoded),) = iter_checkpoints(self._storage, self._store.list(), steps=[manifest.step])
            return not describe_difference(state, decoded)
        except ShrinkpointError:
            return False


def import_to_file(checkpoint: SourceCheckpoint, out: Path, scheme: Scheme, *, opaque: bool, verify: bool) -> ImportRow:
    """Writes a checkpoint as a single file of this library.

    Args:
        out: its path, or a URL of object storage.
        opaque: keep files that cannot be read without running them as their bytes, however large.
        verify: decode the file and, if the scheme is lossless, compare it with the checkpoint.

    Raises:
        CorruptError: what was decoded differs from the checkpoint.
        StateError, FormatError, NotFoundError, StorageError: the checkpoint cannot be read, or not be written.
    """
    began = time.perf_counter()
    state, opaque_names, unchecked = read_flat(checkpoint, opaque)
    place, quantized = place_file(out), scheme.quantize(state, None)
    written = write_file(place.storage, place.key, quantized, scheme=scheme, reference=None, parent=None)
    if verify:
        decoded, _ = decode_file(place)
        difference = describe_difference(state, decoded) if scheme.id == Lossless.id else ""
        if difference:
            raise CorruptError(str(place), found=difference, expected=f"what {checkpoint.name} holds", do="report this")
    return ImportRow(
        step=checkpoint.step,
        name=checkpoint.name,
        raw=state.nbytes,
        before=checkpoint.nbytes,
        after=written.report.stored_bytes,
        keyframe=True,
        seconds=time.perf_counter() - began,
        opaque=opaque_names,
        unchecked=unchecked,
    )


def verify_import(
    storage: Storage, checkpoints: Sequence[SourceCheckpoint], *, opaque: bool = False
) -> Iterator[tuple[int, bool]]:
    """Decodes checkpoints of a store and compares them with their sources.

    Yields:
        each step, and whether it was compared bit for bit; a lossy checkpoint is compared except for tensor values.

    Raises:
        CorruptError: a checkpoint differs from its source.
    """
    sources = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    for manifest, decoded in iter_checkpoints(storage, Store(storage).list(), steps=sources):
        source = sources[manifest.step]
        state, _, _ = read_flat(source, opaque)
        is_exact = manifest.scheme == Lossless.id
        if is_exact:
            difference = describe_difference(state, decoded)
        else:
            shapes = {name: tensor.shape for name, tensor in decoded.reference.tensors.items()}
            difference = describe_structure_difference(state, decoded.tree, shapes)
        if difference:
            where = f"{storage.describe()}, step {manifest.step}"
            do = f"make sure that nothing writes to {source.name}; if the stored one is older, {_HOW_TO_REPLACE}"
            raise CorruptError(where, found=difference, expected=f"what {source.name} holds", do=do)
        yield manifest.step, is_exact


def describe_difference(source: FlatState, decoded: DecodedFile) -> str:
    """Return the first difference between a decoded checkpoint and its source; "" if there is none."""
    tensors = decoded.reference.tensors
    difference = describe_structure_difference(source, decoded.tree, {name: x.shape for name, x in tensors.items()})
    if difference:
        return difference
    for name, tensor in source.tensors.items():
        other = tensors[name]
        if other.dtype != tensor.dtype:
            return f"{name} is {other.dtype} and was {tensor.dtype}"
        if not same_bits(tensor, other):
            return f"{name} has other values"
    return ""


def read_flat(checkpoint: SourceCheckpoint, opaque: bool) -> tuple[FlatState, tuple[str, ...], tuple[str, ...]]:
    """Reads and flattens a checkpoint; also returns the names of files that were kept as their bytes, and of those
    that have no checksum.

    Errors name the file of a value that cannot be stored.
    """
    gc.collect()  # torch.load leaves its maps in reference cycles, those of the previous checkpoint among them
    try:
        state, unchecked = checkpoint.read_with_unchecked(opaque=opaque)
        parts = (origin_info(state) or {}).get("parts", {})
        names = tuple(name for name, description in parts.items() if description.get("opaque"))
        return flatten(state), names, unchecked
    except MemoryError as error:
        do = "convert it where there is more memory"
        raise StateError(str(checkpoint.path), found="out of memory while the state was read", do=do) from error
    except ShrinkpointError as error:
        if str(checkpoint.path) in error.where:
            raise
        where = f"{checkpoint.path}: {error.where}"
        raise type(error)(where, found=error.found, expected=error.expected, do=error.do) from error
