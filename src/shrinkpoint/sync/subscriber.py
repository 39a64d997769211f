"""`Subscriber`: the generating side of weight sync."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shrinkpoint import humanize, validate
from shrinkpoint.storage import Storage
from shrinkpoint.sync.group import open_place
from shrinkpoint.sync.live_writes import VersionTensor, plan_writes, write_all
from shrinkpoint.sync.local_tensors import AnyModel, LocalTensor, check_own_memory, local_tensors
from shrinkpoint.sync.part_tree import VersionLayout
from shrinkpoint.sync.published import Published
from shrinkpoint.sync.ranks import Ranks
from shrinkpoint.sync.reader import HeldVersion, VersionReader
from shrinkpoint.tensors.memory import host_by_default
from shrinkpoint.tensors.wrappers import match_names, match_state_keys


@dataclass(frozen=True)
class Update:
    """The result of an update.

    Attributes:
        version: that the model has now.
        previous: the version that it had; None: none of this place.
        nbytes: bytes that were read, on this rank.
        changed: number of values that were written, on this rank.
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

    Memory: a copy of the published weights on the CPU, and another one while an update decodes. A rank of a sharded
    model holds the pieces that overlap its shards.

    Args:
        where: as the publisher's.
        group: as the publisher's, in place of `where`: every rank but the publisher's calls `update` as often as that
            one calls `publish`, and waits for it.
        ranks: the process group of the ranks that hold the model, which may have DTensors then; they need not be those
            of the publisher. Every rank makes a `Subscriber` and calls `update` as often as the others: all of them
            get the same version, or none does.
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
        ranks: dist.ProcessGroup | None = None,
        poll: float = 0.1,
        threads: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._poll = validate.check_float("poll", poll)
        storage, self._link = open_place(where, group, ranks)
        self._ranks = Ranks(ranks)
        self._where = (self._link or storage).describe()
        self._open_reader = partial(VersionReader, threads=threads, max_bytes=max_bytes)
        self._reader = self._open_reader(storage)
        self._held: HeldVersion | None = None
        self._applied: tuple[str, int] | None = None  # id of the series and version
        self._written: dict[str, _Written] = {}  # the tensors that have it
        self._boxes: object = None  # of the model that was updated last
        self._names: set[str] = set()  # of its tensors on all ranks

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

    @host_by_default()
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
            MismatchError: the model has other tensors than are published; it is unchanged.
            StateError: a tensor is no plain one, such as a DTensor without `ranks=`; it is unchanged.
            MembershipError: a rank has died.
            ChainError, FormatError: files are damaged or gone, and no others lead to the version; it is unchanged.
            StorageError: the place cannot be read; it is unchanged.
        """
        wait = validate.check_float("wait", wait, exclusive=False)
        live = self._ranks.run(lambda: self._local_tensors(model))
        self._names = {name for names in self._ranks.gather(lambda: [*live]) for name in names}
        if self._link is None:
            published = self._wait_for_newer(live, wait)
        else:  # what the publisher of the group sends next; None if it has closed
            held = self._held
            storage = self._link.receive(None if held is None else held.version, "" if held is None else held.id)
            if storage is None:
                return None
            self._reader = self._open_reader(storage)
            published = self._reader.published()
        if published is None:
            return None
        began = time.perf_counter()
        held = self._held
        known = self._known_values(live)
        select = partial(_overlapping, live, self._names) if self._ranks.is_sharded else None
        new = self._held = self._reader.read_newest(published, held, select, self._ranks)
        writes = self._ranks.run(lambda: plan_writes(live, new.tensors(self._where), self._where, known, self._names))
        previous = self.version
        self._written = {}
        pause = write_all(live, writes, self._ranks.run)
        self._applied = new.id, new.version
        self._written = {name: _Written(local) for name, local in live.items()}
        nbytes = 0 if new is held else new.nbytes
        changed = sum(write.new.numel() for write in writes)
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

    def _local_tensors(self, model: AnyModel) -> dict[str, LocalTensor]:
        live = local_tensors(model, is_sharded=self._ranks.is_sharded)
        check_own_memory(model, live)
        boxes = {name: [(piece.offsets, piece.sizes) for piece in local.pieces] for name, local in live.items()}
        if self._ranks.is_sharded and boxes != self._boxes:
            self._held, self._boxes = None, boxes  # other pieces than those that are held may be needed
        return live

    def _wait_for_newer(self, live: Mapping[str, LocalTensor], wait: float) -> Published | None:
        """Wait for a version that the model does not have, on all ranks; None if that takes too long."""
        deadline = time.monotonic() + wait
        while True:
            published, is_late = self._ranks.from_first(
                lambda: (self._reader.published(), time.monotonic() >= deadline)
            )
            if published is not None and not all(self._ranks.gather(partial(self._has, published, live))):
                return published
            if is_late:
                return None
            time.sleep(min(self._poll, max(0, deadline - time.monotonic())))

    def _has(self, published: Published, live: Mapping[str, LocalTensor]) -> bool:
        """True if the tensors have this version, and nobody has written into them since."""
        if self._applied != (published.id, published.version) or live.keys() != self._written.keys():
            return False
        return all(written.is_as_left(live[name]) for name, written in self._written.items())

    def _known_values(self, live: Mapping[str, LocalTensor]) -> Mapping[str, VersionTensor]:
        """The values of the model's tensors, by their names there, but those that somebody else may have changed."""
        held = self._held
        if held is None or self._applied != (held.id, held.version):
            return {}
        values = match_state_keys(held.tensors(self._where), dict.fromkeys(self._names))
        return {
            name: values[name]
            for name, written in self._written.items()
            if name in live and written.is_tracked and written.is_as_left(live[name])
        }


def _overlapping(live: Mapping[str, LocalTensor], all_names: Collection[str], layout: VersionLayout) -> list[set[str]]:
    """The names of the stored tensors that overlap this process's share of the model, of each part."""
    names = match_names(layout.tensors, all_names)
    wanted: list[set[str]] = [set() for _ in layout.trees]
    for name, local in live.items():
        published_name = names.get(name, name)
        if published_name not in layout.tensors or layout.tensors[published_name].shape != local.shape:
            continue  # an error, which the plan of the writes explains
        for piece in layout.pieces_of(published_name):
            if any(mine.overlap(piece.offsets, piece.sizes) for mine in local.pieces):
                wanted[piece.part].add(piece.stored_name)
    return wanted


class _Written:
    """A tensor that an update has written, known again by its memory, which another one may get once it is freed."""

    def __init__(self, local: LocalTensor) -> None:
        self._storage, self._address = _memory_of(local.tensor), local.tensor.data_ptr()
        self._changes = _count_changes(local)

    @property
    def is_tracked(self) -> bool:
        """True if torch counts the changes of the tensor, which it does not in inference mode."""
        return self._changes >= 0

    def is_as_left(self, local: LocalTensor) -> bool:
        """True if a tensor is this one, unchanged, as far as torch counts changes (not those through `.data`)."""
        is_same = local.tensor.data_ptr() == self._address and _memory_of(local.tensor) == self._storage
        return is_same and _count_changes(local) == self._changes


def _memory_of(tensor: Tensor) -> StorageWeakRef:
    """A reference that keeps no memory, and is equal for tensors that share theirs and for no later ones."""
    return StorageWeakRef(tensor.untyped_storage())


def _count_changes(local: LocalTensor) -> int:
    """The number of changes that torch has counted: those of a DTensor, and those of its shard, apart."""
    if local.tensor.is_inference():
        return -1
    return local.tensor._version + (0 if local.owner is None else local.owner._version)
