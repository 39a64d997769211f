"""`Subscriber`: the generating side of weight sync."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shrinkpoint import humanize, validate
from shrinkpoint.errors import ChainError, FormatError, NotFoundError
from shrinkpoint.storage import Storage
from shrinkpoint.sync.group import open_place
from shrinkpoint.sync.model_tensors import AnyModel, check_own_memory, model_tensors, plan_writes, write_all
from shrinkpoint.sync.published import Published
from shrinkpoint.sync.reader import HeldVersion, VersionReader
from shrinkpoint.tensors.flat_state import unflatten


@dataclass(frozen=True)
class Update:
    """The result of an update.

    Attributes:
        version: that the model has now.
        previous: the version that it had; None: none of this place.
        nbytes: bytes that were read.
        changed: number of values that were written.
        seconds: of the whole update, without waiting.
        pause: seconds for which the model was neither the one version nor the other.
    """

    version: int
    previous: int | None
    nbytes: int
    changed: int
    seconds: float
    pause: float

    def __str__(self) -> str:
        read, pause = f"{humanize.size(self.nbytes)} read", 1000 * self.pause
        return f"version {self.version} from {self.previous}: {read}, {self.changed} values written in {pause:.1f} ms"


class Subscriber:
    """Follows the versions that a `Publisher` writes, and puts the newest into a live model.

    What a version decodes to is verified completely before the model is touched; then only what changed is written, in
    place. An update that is interrupted gives the model its old values back.

    Memory: a copy of the published weights on the CPU, and another one while an update decodes.

    Args:
        where: as the publisher's.
        group: as the publisher's, in place of `where`: every rank but the publisher's calls `update` as often as that
            one calls `publish`, and waits for it.
        poll: seconds between two looks while `update` and `follow` wait.
        threads: native threads for decoding; None: every core.
        max_bytes: limit on the bytes of a version's tensors; None: as of `shrinkpoint.load`, or twice what is
            held if that is more.

    Attributes:
        version: of the model that was updated last; None before the first update.

    Raises:
        PolicyError: an invalid argument.
        MissingExtraError: a URL, and what reaches it is not installed.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Storage | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        poll: float = 0.1,
        threads: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._poll = validate.check_float("poll", poll)
        threads = validate.check_threads(threads)
        max_bytes = validate.check_optional_int("max_bytes", max_bytes, none_meaning="for the default")
        storage, self._link = open_place(where, group)
        self._where = (self._link or storage).describe()
        self._open_reader = partial(VersionReader, threads=threads, max_bytes=max_bytes)
        self._reader = self._open_reader(storage)
        self._held: HeldVersion | None = None
        self._applied: tuple[str, int] | None = None  # id of the series and version
        self._written: list[_Written] = []  # the tensors that have it

    def __repr__(self) -> str:
        return f"Subscriber({self._where!r}, version={self.version})"

    @property
    def version(self) -> int | None:
        return None if self._applied is None else self._applied[1]

    def latest(self) -> int | None:
        """The newest version that is published; None if none is. Reads one small file. In a group, the last received.

        Raises:
            FormatError: it is damaged.
            StorageError: the place cannot be read.
        """
        published = self._reader.published()
        return None if published is None else published.version

    def update(self, model: AnyModel, *, wait: float = 0.0) -> Update | None:
        """Bring a model to the newest version; it keeps its memory.

        It is read from the version before or from a keyframe, whichever is fewer bytes. Nobody else may use the model
        meanwhile: of a model that generates in another thread, hold the lock that it generates under.

        Args:
            model: a module, or its `state_dict()`; with the names, shapes and dtypes that are published.
            wait: seconds to wait for a version that the model does not have; in a group, it is waited for anyway.

        Returns:
            what was done; None if the model has the newest version, in a group: if the publisher is closed.

        Raises:
            MismatchError: the model has other tensors than are published, or sharded ones; it is unchanged.
            ChainError, FormatError: files are damaged or gone, and no others lead to the version; it is unchanged.
            StorageError: the place cannot be read; it is unchanged.
        """
        wait = validate.check_float("wait", wait, exclusive=False)
        live = model_tensors(model)
        check_own_memory(model, live)
        published = self._wait_for_newer(live, wait) if self._link is None else self._receive()
        if published is None:
            return None
        began = time.perf_counter()
        held = self._held
        new = self._decode(published)
        tensors = unflatten(new.tree, new.reference.tensors, where=self._where)
        writes = plan_writes(live, tensors, self._where)
        previous = self.version
        self._written = []
        pause = write_all(live, writes)
        self._applied, self._written = (new.id, new.version), [_Written(tensor) for tensor in live.values()]
        nbytes = 0 if new is held else new.nbytes
        changed = sum(write.num_changed for write in writes)
        return Update(new.version, previous, nbytes, changed, time.perf_counter() - began, pause)

    def follow(self, model: AnyModel, *, wait: float | None = None) -> Iterator[Update]:
        """Update a model again and again, and yield what each update did; between two the model is the caller's.

        Args:
            wait: seconds to wait for the next version, after which the iteration ends; None: for ever.
        """
        while True:
            update = self.update(model, wait=1e9 if wait is None else wait)
            if update is None:
                return
            yield update

    def _receive(self) -> Published | None:
        """Receive what the publisher of the group sends next; None if it has closed."""
        assert self._link is not None
        held = self._held
        storage = self._link.receive(None if held is None else held.version, "" if held is None else held.id)
        if storage is None:
            return None
        self._reader = self._open_reader(storage)
        return self._reader.published()

    def _wait_for_newer(self, live: dict[str, Tensor], wait: float) -> Published | None:
        """Wait for a version that the model does not have; None if that takes too long."""
        deadline = time.monotonic() + wait
        while True:
            published = self._reader.published()
            if published is not None and not self._has(published, live):
                return published
            if (rest := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(self._poll, rest))

    def _has(self, published: Published, live: dict[str, Tensor]) -> bool:
        """True if the tensors have this version, and nobody has written into them since."""
        if self._applied != (published.id, published.version) or len(live) != len(self._written):
            return False
        return all(written.is_as_left(tensor) for written, tensor in zip(self._written, live.values(), strict=True))

    def _decode(self, published: Published) -> HeldVersion:
        """The newest version, decoded; files may be pruned meanwhile, and then a newer one is there."""
        held = self._held
        while True:
            if held is not None and (held.id, held.version) == (published.id, published.version):
                return held
            try:
                self._held = self._reader.read(published, held)
                return self._held
            except (ChainError, FormatError, NotFoundError):
                newer = self._reader.published()
                if newer is None or newer == published:
                    raise
                published = newer


class _Written:
    """A tensor that an update has written, known again by its memory, which another one may get once it is freed."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._address = _memory_of(tensor), tensor.data_ptr()
        self._changes = _count_changes(tensor)

    def is_as_left(self, tensor: Tensor) -> bool:
        """True if a tensor is this one, unchanged, as far as torch counts changes (not those through `.data`)."""
        is_same = tensor.data_ptr() == self._address and _memory_of(tensor) == self._storage
        return is_same and _count_changes(tensor) == self._changes


def _memory_of(tensor: Tensor) -> StorageWeakRef:
    """A reference that keeps no memory, and is equal for tensors that share theirs and for no later ones."""
    return StorageWeakRef(tensor.untyped_storage())


def _count_changes(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
