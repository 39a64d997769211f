"""The ends of this process's chains. They outlive every writer, of which each save may have a new one.

Torch makes a writer for each save where it is given a path only, and sends a copy of one to another process for
`async_save` in a process. So what the next delta stands on is kept here, by the name of the chain.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shrinkpoint.container import FileReader
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.schemes.base import Resumable, Scheme
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import directory as folders
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.store.manifest import DirectoryManifest, Payload
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

MAX_CHAINS = 8
"""Chains whose last state a process holds, each one copy of what this rank writes; the longest unused goes first."""
_MAX_ORIGINS = 64
_log = logging.getLogger("shrinkpoint")
TensorSignature = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class RestoreOrigin:
    """A checkpoint that was read, and from which training may go on.

    Attributes:
        directory: where it lies.
        lossy_restores: lossy restores behind the state from now on.
        loss: of its manifest.
        signatures: name, shape and dtype of every whole tensor in it.
    """

    directory: str
    id: str
    lossy_restores: int
    loss: JSON = None
    signatures: frozenset[TensorSignature] = field(default=frozenset(), compare=False, repr=False)


@dataclass
class ChainState:
    """One rank's end of a chain.

    Attributes:
        delta_writer: what the last write left. It is promoted when it is written, before anybody can know of the
            commit:
            `confirm_last_write` finds out at the next save.
        writer_options: what the tip was made with.
        scheme, given: of the last save, and how it was set up.
        unconfirmed: the folder and digest of the last write.
        origin: the checkpoint that was restored last.
        superseded_origin: the same, once something has been saved after it: nothing more stands on it alone.
    """

    delta_writer: DeltaWriter
    writer_options: tuple[int | None, int | None]
    scheme: Scheme | None = None
    scheme_config: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)
    unconfirmed: tuple[str, str] | None = None
    origin: RestoreOrigin | None = None
    superseded_origin: RestoreOrigin | None = None

    def confirm_last_write(self) -> None:
        """Where the last write has not become a checkpoint, or is one no longer, nothing may stand on it."""
        if self.unconfirmed is not None:
            if _is_committed(*self.unconfirmed):
                self.superseded_origin = self.origin
            else:
                self.delta_writer.drop()
        self.unconfirmed = None

    def record_write(self, directory: Path) -> Payload:
        """The next delta stands on what was just written, should it be committed."""
        payload = self.delta_writer.payload
        self.unconfirmed = (str(directory), payload.digest)
        self.delta_writer.commit_reference()
        return payload

    @property
    def lossy_restores(self) -> int:
        """Lossy restores behind the state that is saved."""
        return 0 if self.origin is None else self.origin.lossy_restores

    def scheme_for(self, scheme: Scheme, origin: RestoreOrigin | None) -> Scheme:
        """The scheme to go on with: the one of the last save where it was set up alike, for it may have learned since.

        Args:
            origin: the checkpoint that was restored last.
        """
        if scheme is not self.scheme:
            given = _scheme_config(scheme)
            if self.scheme is None or given != self.scheme_config:
                self.scheme, self.scheme_config = scheme, given
        if origin is not None and origin != self.origin:
            self.origin = origin
            if isinstance(self.scheme, Resumable):
                self.scheme.resume(origin.loss, origin.lossy_restores)
        return self.scheme

    def load_parent(self, origin: RestoreOrigin | None, state: FlatState, rank: int, threads: int | None) -> None:
        """With nothing to stand on, decode what was restored: the first save after a restart is a delta as well.

        Only that one: where a chain is as long as it may be, a keyframe is what begins the next.
        """
        if origin is None or origin == self.superseded_origin or self.delta_writer.reference is not None:
            return
        try:
            manifest = folders.read_directory_manifest(origin.directory)
            at = payload_index(manifest, rank)
            if (
                at is not None
                and manifest.id == origin.id
                and _shares_most_tensors(origin.directory, manifest.payloads[at], state)
            ):
                self.delta_writer.adopt(origin.directory, decode_directory(origin.directory, at, threads=threads), at)
        except ShrinkpointError as error:  # deleted since, or damaged
            _log.warning("the next checkpoint is a keyframe, as what was loaded is not there as it was: %s", error)


_REGISTRY_LOCK = threading.Lock()
_CHAINS: OrderedDict[tuple[str, int], ChainState] = OrderedDict()
_ORIGINS: OrderedDict[str, RestoreOrigin] = OrderedDict()


def default_name(directory: str | Path) -> str:
    """The chain of a folder, unless a name is given: its path with every number in it left open.

    >>> default_name("/runs/7/step-0100/model"), default_name("/runs/7/step-0200/model")
    ('/runs/#/step-#/model', '/runs/#/step-#/model')
    """
    return re.sub(r"\d+", "#", str(Path(directory).absolute()))


@contextmanager
def acquire_chain(name: str, rank: int, *, keyframe_every: int | None, threads: int | None) -> Iterator[ChainState]:
    """This rank's end of a chain, ours alone meanwhile."""
    settings, key = (keyframe_every, threads), (name, rank)
    with _REGISTRY_LOCK:
        one = _CHAINS.pop(key, None)
        if one is None or one.writer_options != settings:
            one = ChainState(DeltaWriter(keyframe_every=keyframe_every, threads=threads), settings)
        _CHAINS[key] = one
        while len(_CHAINS) > MAX_CHAINS:
            _CHAINS.popitem(last=False)
    with one.lock:
        yield one


def record_restore(directory: Path, manifest: DirectoryManifest, signatures: Iterable[TensorSignature] = ()) -> None:
    """A checkpoint was restored.

    Args:
        signatures: of all that is in it.
    """
    generation = manifest.lossy_restores + manifest.is_lossy
    with _REGISTRY_LOCK:
        name = default_name(directory)
        _ORIGINS.pop(name, None)
        _ORIGINS[name] = RestoreOrigin(
            str(Path(directory).absolute()), manifest.id, generation, manifest.loss, frozenset(signatures)
        )
        while len(_ORIGINS) > _MAX_ORIGINS:
            _ORIGINS.popitem(last=False)


def restored_origins() -> dict[str, RestoreOrigin]:
    """The last checkpoint that was restored, by the default name of its chain."""
    with _REGISTRY_LOCK:
        return dict(_ORIGINS)


def find_origin(
    origins: Mapping[str, RestoreOrigin], name: str, signatures: Collection[TensorSignature]
) -> RestoreOrigin | None:
    """Which checkpoint training goes on from: the last that was restored of this chain, else of all these tensors.

    Args:
        origins: by default name, the last one last.
        name: the default name of where it is saved now.
        signatures: of what is saved now.
    """
    if name in origins or not signatures:
        return origins.get(name)
    return next((one for one in reversed([*origins.values()]) if one.signatures.issuperset(signatures)), None)


def reset_chains() -> None:
    """Let all chains go and free their memory: the next save of each is a keyframe."""
    with _REGISTRY_LOCK:
        _CHAINS.clear()
        _ORIGINS.clear()


def payload_index(manifest: DirectoryManifest, rank: int) -> int | None:
    """Which of the payloads a rank has written; None: none."""
    mine = (at for at, one in enumerate(manifest.payloads) if one.name.startswith(f"rank-{rank:05d}."))
    return next(mine, None)


def _scheme_config(scheme: Scheme) -> str:
    """How a scheme is set up, before it has learned anything."""
    return f"{type(scheme).__qualname__} {sorted(vars(scheme).items())!r}"


def _is_committed(directory: str, digest: str) -> bool:
    try:
        return any(one.digest == digest for one in folders.read_directory_manifest(directory).payloads)
    except ShrinkpointError:
        return False


def _shares_most_tensors(directory: str, payload: Payload, state: FlatState) -> bool:
    """Whether most of a state is there in the same boxes; on another number of ranks it is not."""
    storage = LocalStorage(directory)
    with storage.open(payload.name) as source:
        infos = [info for head in FileReader(source, storage.describe(payload.name)).records for info in head.infos]
    saved = {(info.name, info.shape, info.dtype) for info in infos}
    common = sum(
        x.numel() * x.element_size()
        for name, x in state.tensors.items()
        if (name, tuple(x.shape), dtype_name(x.dtype)) in saved
    )
    return 2 * common >= state.nbytes > 0
