"""This process's checkpoint chains: the state of each, and the checkpoints that were restored.

Torch creates a writer for each save where only a path is given, and sends a copy of one to another process for
`async_save` in a process. So the reference of the next delta is kept here, by the name of the chain, and outlives
every writer.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from shrinkpoint.container import FileReader
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.schemes.base import Scheme, SpecMixin, resume_scheme
from shrinkpoint.storage import AnyDirectory, directory_storage, resolve_directory
from shrinkpoint.store import layout
from shrinkpoint.store.decode import decode_payload
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.store.directory import has_committed, note_restored, read_directory_manifest
from shrinkpoint.store.manifest import DirectoryManifest, Payload
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON
from shrinkpoint.threads import ForkSafeLock

MAX_CHAINS = 8
"""Chains whose state a process keeps, each one copy of what this rank writes; the least recently used goes first."""
_MAX_ORIGINS = 64
_log = logging.getLogger("shrinkpoint")
TensorSignature = tuple[str, tuple[int, ...], str]  # Name, shape and dtype of a global tensor


@dataclass(frozen=True)
class RestoreOrigin:
    """A checkpoint that was restored, and from which training may resume."""

    directory: str  # absolute path or URL of the checkpoint
    id: str  # of its manifest
    lossy_restores: int  # number of restores from lossy checkpoints behind the restored state, this one included
    loss: JSON = None  # of its manifest
    # Of every global tensor in it.
    signatures: frozenset[TensorSignature] = field(default=frozenset(), compare=False, repr=False)


@dataclass
class ChainState:
    """The state of one chain on one rank."""

    # Holds the tensors of the last write. They become the reference as soon as they are written, before the rank can
    # know whether the save was committed: `confirm_last_write` finds out at the next save.
    delta_writer: DeltaWriter
    writer_options: tuple[int | None, int | None]  # keyframe_every and threads of the delta writer
    scheme: Scheme | None = None  # the scheme of the last save
    scheme_config: Mapping[str, object] = field(default_factory=dict)  # what it was made with
    mutex: ForkSafeLock = field(default_factory=ForkSafeLock)  # held by the thread that saves
    unconfirmed: tuple[str, Payload] | None = None  # directory and payload of the last write, until it is confirmed
    origin: RestoreOrigin | None = None  # the checkpoint that was restored last
    # The same, once a later save is committed: it is not the parent of the next save any more.
    superseded_origin: RestoreOrigin | None = None

    @property
    def lossy_restores(self) -> int:
        """Number of restores from lossy checkpoints behind the state that is saved."""
        return 0 if self.origin is None else self.origin.lossy_restores

    def confirm_last_write(self) -> None:
        """Drop the reference if the last write did not become a checkpoint, or its checkpoint was deleted since."""
        if self.unconfirmed is not None:
            is_committed = False
            with suppress(ShrinkpointError):
                is_committed = has_committed(*self.unconfirmed)
            if is_committed:
                self.superseded_origin = self.origin
            else:
                self.delta_writer.drop()
        self.unconfirmed = None

    def scheme_for(self, scheme: Scheme, origin: RestoreOrigin | None) -> Scheme:
        """The scheme of the next save: that of the last save if its settings are equal, as it may have learned since.

        Args:
            scheme: the scheme of the writer.
            origin: the checkpoint from which training resumed; None if there is none.
        """
        if scheme is not self.scheme:
            arguments = scheme.arguments if isinstance(scheme, SpecMixin) else {}
            config = {**arguments, "": (type(scheme), repr(scheme))}
            if self.scheme is None or not _are_equal(config, self.scheme_config):
                self.scheme, self.scheme_config = scheme, config
        if origin is not None and origin != self.origin:
            self.origin = origin
            resume_scheme(self.scheme, origin.loss, origin.lossy_restores)
        return self.scheme

    def load_parent(self, origin: RestoreOrigin | None, state: FlatState, rank: int, threads: int | None) -> None:
        """Decode the restored checkpoint as the reference, so that the first save after a restart is a delta, too.

        Only the first: later, a missing reference means that the chain has its maximum length.

        Args:
            origin: the checkpoint that was restored; None: nothing is loaded.
            state: what this rank saves now; a checkpoint with other shards is not loaded.
            rank: the number of this rank.
        """
        if origin is None or origin == self.superseded_origin or self.delta_writer.reference is not None:
            return
        try:
            manifest = read_directory_manifest(origin.directory)
            index = payload_index(manifest, rank)
            if (
                index is not None
                and manifest.id == origin.id
                and _shares_most_tensors(origin.directory, manifest.payloads[index], state)
            ):
                decoded = decode_payload(origin.directory, manifest.payloads[index], threads=threads)
                self.delta_writer.adopt(origin.directory, manifest.payloads[index], decoded)
        except ShrinkpointError as error:  # deleted since, or damaged
            _log.warning("the next checkpoint is a keyframe, as the one that was loaded has changed since: %s", error)


_REGISTRY_LOCK = ForkSafeLock()
_CHAINS: OrderedDict[tuple[str, int], ChainState] = OrderedDict()
_ORIGINS: OrderedDict[str, RestoreOrigin] = OrderedDict()


def default_name(directory: AnyDirectory) -> str:
    """The default name of a directory's chain: its absolute path or URL with a placeholder for every number.

    >>> default_name("/runs/7/step-0100/model"), default_name("/runs/7/step-0200/model")
    ('/runs/#/step-#/model', '/runs/#/step-#/model')
    """
    return re.sub(r"\d+", "#", str(resolve_directory(directory)))


@contextmanager
def acquire_chain(name: str, rank: int, *, keyframe_every: int | None, threads: int | None) -> Iterator[ChainState]:
    """The state of a chain on this rank, locked for the calling thread; a new one if its options have changed."""
    options, key = (keyframe_every, threads), (name, rank)
    with _REGISTRY_LOCK.lock:
        chain = _CHAINS.pop(key, None)
        if chain is None or chain.writer_options != options:
            chain = ChainState(DeltaWriter(keyframe_every=keyframe_every, threads=threads), options)
        _CHAINS[key] = chain
        while len(_CHAINS) > MAX_CHAINS:
            _CHAINS.popitem(last=False)
    with chain.mutex.lock:
        yield chain


def record_restore(
    directory: AnyDirectory, manifest: DirectoryManifest, signatures: Iterable[TensorSignature] = ()
) -> None:
    """Remember that a checkpoint with these signatures of global tensors was restored."""
    lossy_restores = manifest.lossy_restores + manifest.is_lossy
    path = str(resolve_directory(directory))
    note_restored(directory, manifest)
    with _REGISTRY_LOCK.lock:
        name = default_name(directory)
        _ORIGINS.pop(name, None)
        _ORIGINS[name] = RestoreOrigin(path, manifest.id, lossy_restores, manifest.loss, frozenset(signatures))
        while len(_ORIGINS) > _MAX_ORIGINS:
            _ORIGINS.popitem(last=False)


def restored_origins() -> dict[str, RestoreOrigin]:
    """The last checkpoint that was restored, by the default name of its chain, in the order of the restores."""
    with _REGISTRY_LOCK.lock:
        return dict(_ORIGINS)


def find_origin(
    origins: Mapping[str, RestoreOrigin], name: str, signatures: Collection[TensorSignature]
) -> RestoreOrigin | None:
    """The checkpoint from which training resumed: the last one of this chain, else the last with all these tensors.

    Args:
        origins: what `restored_origins` returned.
        name: the default name of the directory that is saved now.
        signatures: of what is saved now.
    """
    if name in origins or not signatures:
        return origins.get(name)
    newest_first = reversed([*origins.values()])
    return next((origin for origin in newest_first if origin.signatures.issuperset(signatures)), None)


def reset_chains() -> None:
    """Forget all chains and free their memory: the next save of each is a keyframe."""
    with _REGISTRY_LOCK.lock:
        _CHAINS.clear()
        _ORIGINS.clear()


def payload_index(manifest: DirectoryManifest, rank: int) -> int | None:
    """The index of the payload that a rank wrote; None if it wrote none."""
    ranks = [layout.rank_of(payload.name) for payload in manifest.payloads]
    return ranks.index(rank) if rank in ranks else None


def _are_equal(config: Mapping[str, object], other: Mapping[str, object]) -> bool:
    if config.keys() != other.keys():
        return False
    # Equality of an arbitrary object may return anything, such as a tensor.
    return all(value is other[name] or (value == other[name]) is True for name, value in config.items())


def _shares_most_tensors(directory: str, payload: Payload, state: FlatState) -> bool:
    """True if most bytes of a state are in a payload as the same shards; with another number of ranks they are not."""
    storage = directory_storage(directory)
    with storage.open(payload.name) as source:
        records = FileReader(source, storage.describe(payload.name)).records
    saved = {(info.name, info.shape, info.dtype) for record in records for info in record.infos}
    common = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in state.tensors.items()
        if (name, tuple(tensor.shape), dtype_name(tensor.dtype)) in saved
    )
    return 2 * common >= state.nbytes > 0
