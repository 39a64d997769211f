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

from shrinkpoint.container import Reader
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.record import JSON
from shrinkpoint.schemes import Resuming, Scheme
from shrinkpoint.state import FlatState, dtype_name
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import folder as folders
from shrinkpoint.store.foldermanifest import FolderManifest, Payload
from shrinkpoint.store.tip import Tip
from shrinkpoint.store.unfold import decode

MOST = 8
"""Chains whose last state a process holds, each one copy of what this rank writes; the longest unused goes first."""
_LOADED = 64
_log = logging.getLogger("shrinkpoint")
Kind = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read, and from which training may go on.

    Attributes:
        folder: where it lies.
        lossy_restores: lossy restores behind the state from now on.
        loss: of its manifest.
        kinds: name, shape and dtype of every whole tensor in it.
    """

    folder: str
    id: str
    lossy_restores: int
    loss: JSON = None
    kinds: frozenset[Kind] = field(default=frozenset(), compare=False, repr=False)


@dataclass
class Chain:
    """One rank's end of a chain.

    Attributes:
        tip: what the last write left. It is promoted when it is written, before anybody can know of the commit:
            `settle_accounts` finds out at the next save.
        settings: what the tip was made with.
        scheme, given: of the last save, and how it was set up.
        unconfirmed: the folder and digest of the last write.
        loaded: the checkpoint that was restored last.
        past: the same, once something has been saved after it: nothing more stands on it alone.
    """

    tip: Tip
    settings: tuple[int | None, int | None]
    scheme: Scheme | None = None
    given: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)
    unconfirmed: tuple[str, str] | None = None
    loaded: Loaded | None = None
    past: Loaded | None = None

    def settle_accounts(self) -> None:
        """Where the last write has not become a checkpoint, or is one no longer, nothing may stand on it."""
        if self.unconfirmed is not None:
            if _is_committed(*self.unconfirmed):
                self.past = self.loaded
            else:
                self.tip.drop()
        self.unconfirmed = None

    def wrote(self, folder: Path) -> Payload:
        """The next delta stands on what was just written, should it be committed."""
        payload = self.tip.payload
        self.unconfirmed = (str(folder), payload.digest)
        self.tip.promote()
        return payload

    @property
    def lossy_restores(self) -> int:
        """Lossy restores behind the state that is saved."""
        return 0 if self.loaded is None else self.loaded.lossy_restores

    def resumed(self, scheme: Scheme, loaded: Loaded | None) -> Scheme:
        """The scheme to go on with: the one of the last save where it was set up alike, for it may have learned since.

        Args:
            loaded: the checkpoint that was restored last.
        """
        if scheme is not self.scheme:
            given = _settings(scheme)
            if self.scheme is None or given != self.given:
                self.scheme, self.given = scheme, given
        if loaded is not None and loaded != self.loaded:
            self.loaded = loaded
            if isinstance(self.scheme, Resuming):
                self.scheme.resume(loaded.loss, loaded.lossy_restores)
        return self.scheme

    def stand_on(self, loaded: Loaded | None, flat: FlatState, rank: int, threads: int | None) -> None:
        """With nothing to stand on, decode what was restored: the first save after a restart is a delta as well.

        Only that one: where a chain is as long as it may be, a keyframe is what begins the next.
        """
        if loaded is None or loaded == self.past or self.tip.reference is not None:
            return
        try:
            manifest = folders.read_manifest(loaded.folder)
            at = payload_of(manifest, rank)
            if at is not None and manifest.id == loaded.id and _is_alike(loaded.folder, manifest.payloads[at], flat):
                self.tip.adopt(loaded.folder, decode(loaded.folder, at, threads=threads), at)
        except ShrinkpointError as error:  # deleted since, or damaged
            _log.warning("the next checkpoint is a keyframe, as what was loaded is not there as it was: %s", error)


_GUARD = threading.Lock()
_CHAINS: OrderedDict[tuple[str, int], Chain] = OrderedDict()
_RESTORED: OrderedDict[str, Loaded] = OrderedDict()


def default_name(folder: str | Path) -> str:
    """The chain of a folder, unless a name is given: its path with every number in it left open.

    >>> default_name("/runs/7/step-0100/model"), default_name("/runs/7/step-0200/model")
    ('/runs/#/step-#/model', '/runs/#/step-#/model')
    """
    return re.sub(r"\d+", "#", str(Path(folder).absolute()))


@contextmanager
def chain(name: str, rank: int, *, keyframe_every: int | None, threads: int | None) -> Iterator[Chain]:
    """This rank's end of a chain, ours alone meanwhile."""
    settings, key = (keyframe_every, threads), (name, rank)
    with _GUARD:
        one = _CHAINS.pop(key, None)
        if one is None or one.settings != settings:
            one = Chain(Tip(keyframe_every=keyframe_every, threads=threads), settings)
        _CHAINS[key] = one
        while len(_CHAINS) > MOST:
            _CHAINS.popitem(last=False)
    with one.lock:
        yield one


def remember(folder: Path, manifest: FolderManifest, kinds: Iterable[Kind] = ()) -> None:
    """A checkpoint was restored.

    Args:
        kinds: of all that is in it.
    """
    generation = manifest.lossy_restores + manifest.is_lossy
    with _GUARD:
        name = default_name(folder)
        _RESTORED.pop(name, None)
        _RESTORED[name] = Loaded(str(Path(folder).absolute()), manifest.id, generation, manifest.loss, frozenset(kinds))
        while len(_RESTORED) > _LOADED:
            _RESTORED.popitem(last=False)


def restored() -> dict[str, Loaded]:
    """The last checkpoint that was restored, by the default name of its chain."""
    with _GUARD:
        return dict(_RESTORED)


def origin(restored: Mapping[str, Loaded], name: str, kinds: Collection[Kind]) -> Loaded | None:
    """Which checkpoint training goes on from: the last that was restored of this chain, else of all these tensors.

    Args:
        restored: by default name, the last one last.
        name: the default name of where it is saved now.
        kinds: of what is saved now.
    """
    if name in restored or not kinds:
        return restored.get(name)
    return next((one for one in reversed([*restored.values()]) if one.kinds.issuperset(kinds)), None)


def forget() -> None:
    """Let all chains go and free their memory: the next save of each is a keyframe."""
    with _GUARD:
        _CHAINS.clear()
        _RESTORED.clear()


def payload_of(manifest: FolderManifest, rank: int) -> int | None:
    """Which of the payloads a rank has written; None: none."""
    mine = (at for at, one in enumerate(manifest.payloads) if one.name.startswith(f"rank-{rank:05d}."))
    return next(mine, None)


def _settings(scheme: Scheme) -> str:
    """How a scheme is set up, before it has learned anything."""
    return f"{type(scheme).__qualname__} {sorted(vars(scheme).items())!r}"


def _is_committed(folder: str, digest: str) -> bool:
    try:
        return any(one.digest == digest for one in folders.read_manifest(folder).payloads)
    except ShrinkpointError:
        return False


def _is_alike(folder: str, payload: Payload, flat: FlatState) -> bool:
    """Whether most of a state is there in the same boxes; on another number of ranks it is not."""
    storage = LocalStorage(folder)
    with storage.open(payload.name) as source:
        infos = [info for head in Reader(source, storage.describe(payload.name)).records for info in head.infos]
    saved = {(info.name, info.shape, info.dtype) for info in infos}
    common = sum(
        x.numel() * x.element_size()
        for name, x in flat.tensors.items()
        if (name, tuple(x.shape), dtype_name(x.dtype)) in saved
    )
    return 2 * common >= flat.nbytes > 0
