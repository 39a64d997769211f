"""`Publisher`: the trainer's side of weight sync."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint import humanize, validate
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError, StorageError
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage import Storage, object_size
from shrinkpoint.store.checkpoint_file import write_file
from shrinkpoint.sync.group import open_place
from shrinkpoint.sync.local_tensors import AnyModel, LocalTensor, local_tensors
from shrinkpoint.sync.part_plan import PartPlanner, Row, describe
from shrinkpoint.sync.published import (
    KEY,
    MAX_VERSION,
    Published,
    StoredPart,
    VersionFile,
    file_key,
    is_own_key,
    new_token,
)
from shrinkpoint.sync.ranks import Ranks
from shrinkpoint.sync.reader import HeldPart, VersionReader
from shrinkpoint.tensors.dtypes import DTYPE_NAMES, dtype_name, empty
from shrinkpoint.tensors.flat_state import FlatState, copy_tensors, flatten
from shrinkpoint.tensors.info import DTYPES, JSON
from shrinkpoint.tensors.memory import host_by_default, wait_for_devices

_log = logging.getLogger("shrinkpoint")
_CAST_FROM = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PublishReport:
    """The size and the time of a version that was published.

    Attributes:
        version: its number.
        raw_bytes: bytes of its tensors, on all ranks together, as all sizes are.
        delta_bytes: bytes of its delta against the version before; None if it has none.
        keyframe_bytes: bytes of its keyframe; None if it has none.
        seconds: of the whole call.
    """

    version: int
    raw_bytes: int
    delta_bytes: int | None
    keyframe_bytes: int | None
    seconds: float

    def __str__(self) -> str:
        parts = [("delta", self.delta_bytes), ("keyframe", self.keyframe_bytes)]
        sizes = ", ".join(f"{name} of {humanize.size(size)}" for name, size in parts if size is not None)
        return f"version {self.version}: {sizes}, of {humanize.size(self.raw_bytes)} of weights"


class Publisher:
    """Publishes versions of a model's weights, each as a lossless delta against the one before.

    A version is there as a whole or not at all: its files are written, durably, before `published.json` names it, which
    is replaced atomically. One process publishes in one place; it holds the storage's lock until `close`. Killed and
    started again, it goes on behind the last version.

    Ranks that shard a model publish together, with `ranks=`: each codes its own shards, and writes them as its part of
    the version. The first rank commits the version when every part is written. An error on one rank is raised by all.

    Memory: two copies of the published weights on the CPU, on each rank of its own part.

    Args:
        where: a directory (in /dev/shm: shared memory), a URL such as "s3://bucket/weights", or a storage.
        group: a torch.distributed group, in place of `where`: `publish` and `close` are collective operations then, in
            which every other rank takes part with `Subscriber.update`. What is sent is a delta, or a keyframe where a
            rank lacks the version before; `keyframe_every` and `keep` do not matter.
        ranks: the process group of all ranks that shard the model, which may have DTensors then. Each rank makes a
            `Publisher` of the same place, which all of them reach, and calls `publish` as the others do. What several
            ranks have is written by one of them.
        dtype: what floating-point tensors of 16 bits and more are cast to, such as `torch.bfloat16`; None: none is.
        keyframe_every: a keyframe is written beside the delta at least every so many versions, and whenever the deltas
            behind the last one have more bytes than it: so joining reads at most two keyframes' worth, and a delta.
        keep: deltas of so many versions are kept, for processes that are behind; others are kept as long as the newest
            keyframe needs them.
        threads: native threads for coding; None: every core.

    Attributes:
        version: the newest version; None if there is none.

    Raises:
        LockedError: another process publishes here.
        PolicyError: an invalid argument.
        MissingExtraError: a URL, and what reaches it is not installed.
        StorageError: the place cannot be read or written.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Storage | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        ranks: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        keyframe_every: int = 32,
        keep: int = 32,
        threads: int | None = None,
    ) -> None:
        do = "pass torch.bfloat16, or leave it out"
        validate.check_instance("dtype", dtype, torch.dtype, expected="a torch.dtype", do=do, allow_none=True)
        if dtype is not None and (dtype not in DTYPE_NAMES or DTYPES[DTYPE_NAMES[dtype]].kind != "float"):
            raise PolicyError("dtype", found=f"{dtype}", expected="a dtype of single floating-point values", do=do)
        self._dtype = dtype
        self._keyframe_every = validate.check_int("keyframe_every", keyframe_every)
        self._keep = validate.check_int("keep", keep)
        self._threads = validate.check_threads(threads)
        self._ranks = Ranks(ranks)
        self._storage, self._link = self._ranks.run(lambda: open_place(where, group, ranks))
        self._planner = PartPlanner(self._ranks)
        self._keyframe_scheme, self._delta_scheme = Lossless(), Lossless()  # each remembers what codes best
        self._published: Published | None = None
        self._reference: dict[str, Tensor] | None = None  # of this rank's part
        self._tree: JSON = None  # of the reference
        self._spare: dict[str, Tensor] = {}
        self._next = 0
        self._keys: set[str] = set()
        self._own_keys: list[str] = []  # of the version that is being written, of this rank
        self._dropped: list[str] = []  # keys that `published.json` has just ceased to name: somebody may read them
        self._is_closed = False
        self._stack = ExitStack()
        try:
            self._ranks.from_first(lambda: self._stack.enter_context(self._storage.lock()))
            self._resume()
        except BaseException:
            self._stack.close()
            raise

    def __repr__(self) -> str:
        return f"Publisher({(self._link or self._storage).describe()!r})"

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process publish here; in a group, tell the other ranks that nothing more is published."""
        self._is_closed, self._reference, self._spare = True, None, {}
        self._stack.close()
        if self._link is not None:
            self._link.close()

    @property
    def version(self) -> int | None:
        return None if self._published is None else self._published.version

    @torch.inference_mode(False)  # a publish outside that mode writes over the copies of this one
    @torch.no_grad()
    @host_by_default()
    def publish(self, model: AnyModel, version: int | None = None, *, keyframe: bool = False) -> PublishReport:
        """Publish the weights as they are now; when this returns, subscribers can have them.

        Args:
            model: a module, or its `state_dict()`; it is copied at once and not changed. Tied tensors are sent once.
            version: its number, above the last; None: the next.
            keyframe: write a keyframe besides.

        Raises:
            StateError: a tensor is no plain one, such as a DTensor without `ranks=`.
            MismatchError: the ranks' tensors do not make up one model, or plain ones of one name differ.
            PolicyError: a version that is not above the last; ranks with different arguments; a closed publisher.
            StorageError: writing failed; the last version is still the newest.
            MembershipError: a rank has died.
        """
        began = time.perf_counter()
        state = self._capture(model, version, keyframe)
        self._begin_anew_if_lost()
        number, self._spare, last = self._next if version is None else version, {}, self._published
        is_base = self._reference is not None and (not self._ranks.is_sharded or state.tree == self._tree)
        nbytes, has_base = zip(*self._ranks.gather(lambda: (state.nbytes, is_base)), strict=True)
        written: list[VersionFile] = []
        try:
            if all(has_base):
                written.append(self._write(state, number, self._reference))
            is_lacking = self._link is not None and self._link.ask_versions(self._published)
            if keyframe or is_lacking or self._needs_keyframe(written):
                written.append(self._write(state, number))
            # no delta that is as large as the keyframe beside it
            files = written[1:] if len(written) == 2 and written[0].size >= written[1].size else written
            published = self._publish(files)
        except BaseException:
            if self._published is last:  # else they may be named
                self._delete(self._own_keys)
            self._own_keys.clear()
            raise
        if self._link is not None:
            self._link.send(published, self._storage)
        self._forget_old(published, written)
        self._spare, self._reference, self._tree = self._reference or {}, dict(state.tensors), state.tree
        sizes = {file.is_keyframe: file.size for file in files}
        report = PublishReport(number, sum(nbytes), sizes.get(False), sizes.get(True), time.perf_counter() - began)
        _log.info("published %s, in %.2f s", report, report.seconds)
        return report

    def _capture(self, model: AnyModel, version: int | None, keyframe: bool) -> FlatState:
        """Check what all ranks pass, and copy the state of this rank's part."""
        arguments, *others = self._ranks.gather(lambda: self._check(version, keyframe))
        if any(other != arguments for other in others):
            found, do = f"{sorted({str(arguments), *map(str, others)})}", "pass the same arguments on all ranks"
            raise PolicyError("publish", found=found, expected="the same version and settings", do=do)
        if not self._ranks.is_sharded:
            tensors = {name: local.tensor for name, local in local_tensors(model).items()}
            tensors = tensors if self._dtype is None else _separate_views(tensors)
            return _copy(flatten(tensors), self._dtype, self._spare)
        local, rows = self._ranks.run(lambda: self._describe(model))
        plan = self._planner.plan(rows)
        self._planner.check_equal(plan, local)
        return self._ranks.run(lambda: _copy(plan.state(local), self._dtype, self._spare))

    def _check(self, version: int | None, keyframe: bool) -> tuple[object, ...]:
        """Everything on which ranks must agree."""
        if self._is_closed:
            raise PolicyError(repr(self), found="a closed publisher", expected="an open one", do="make a new one")
        if version is not None:
            do = "pass a higher version, or leave it out"
            validate.check_int("version", version, minimum=self._next, maximum=MAX_VERSION - 1, do=do)
        validate.check_bool("keyframe", keyframe)
        return version, keyframe, str(self._dtype), self._keyframe_every, self._keep

    def _begin_anew_if_lost(self) -> None:
        """Begin another series where somebody has deleted or replaced what is published: a delta would need it."""
        if self._published is None or not self._ranks.from_first(self._is_lost):
            return
        _log.warning("%s: what was published is gone, so the next version is a keyframe", self._storage.describe())
        self._stack.close()  # the lock may be gone, too, and another process may have taken its place
        self._ranks.from_first(lambda: self._stack.enter_context(self._storage.lock()))
        self._published = self._reference = None

    def _is_lost(self) -> bool:
        assert self._published is not None
        try:
            is_same = self._storage.get(KEY) == self._published.to_bytes()
        except NotFoundError:
            return True
        return not (is_same and {key for file in self._published.files for key in file.keys} <= {*self._storage.list()})

    def _describe(self, model: AnyModel) -> tuple[dict[str, LocalTensor], list[Row]]:
        local = local_tensors(model, is_sharded=True)
        return local, describe(
            local, {name: _published_dtype(x.tensor.dtype, self._dtype) for name, x in local.items()}
        )

    def _needs_keyframe(self, written: list[VersionFile]) -> bool:
        if self._published is None or not written:
            return True
        if self._link is not None:
            return False
        keyframe = max((file for file in self._published.files if file.is_keyframe), default=None)
        deltas = [*self._published.deltas_behind_keyframe(), *written]
        if keyframe is None or len(deltas) >= self._keyframe_every:
            return True
        return sum(file.size for file in deltas) > keyframe.size

    def _write(self, state: FlatState, version: int, reference: dict[str, Tensor] | None = None) -> VersionFile:
        """Write a keyframe, or a delta against the reference, which is the newest version: each rank its part."""
        base, parent = -1, None
        if reference is not None:
            assert self._published is not None
            base = self._published.version
            file = min(file for file in self._published.files if file.version == base)  # its keyframe, if there is one
            key, stored = file.stored[self._ranks.rank]
            parent = {"name": key, "digest": stored.digest}
        # A rank of a job that was given up may still write: no two parts have one name.
        token = secrets.token_hex(8) if self._ranks.is_sharded else new_token(self._storage)
        key = file_key(version, base, token, self._ranks.rank if self._ranks.is_sharded else None)
        self._own_keys.append(key)

        def write() -> StoredPart:
            written = write_file(
                self._storage,
                key,
                QuantizedState(state),
                scheme=self._keyframe_scheme if reference is None else self._delta_scheme,
                reference=None if reference is None else Reference(reference),
                parent=parent,
                threads=self._threads,
            )
            return StoredPart(written.report.stored_bytes, written.report.digest, token)

        parts = self._ranks.gather(write)
        if self._ranks.is_sharded:
            return VersionFile.from_parts(version, base, parts)
        return VersionFile(version, base, *parts[0])

    def _publish(self, files: list[VersionFile]) -> Published:
        """Name the files of a version in `published.json`: from then on it exists."""
        last = self._published or Published(self._ranks.from_first(lambda: secrets.token_hex(8)), -1, ())
        published = replace(last, version=files[-1].version, files=(*last.files, *files)).without_old(self._keep)
        if self._link is not None:  # nobody reads an older one
            published = replace(published, files=tuple(files))
        self._ranks.from_first(lambda: self._check_parts(files))
        try:
            self._ranks.from_first(lambda: self._storage.put(KEY, published.to_bytes()))
        except BaseException:
            # It may be there nevertheless: so this number is used up, and what follows is another series.
            self._published, self._reference, self._next = None, None, published.version + 1
            raise
        self._published, self._next = published, published.version + 1
        return published

    def _check_parts(self, files: list[VersionFile]) -> None:
        """Raise a StorageError unless the first rank sees the parts of all others."""
        for key, part in (stored for file in files if file.parts for stored in file.stored[1:]):
            try:
                size = object_size(self._storage, key)
            except NotFoundError:
                size = -1
            if size != part.size:
                where, found = self._storage.describe(key), f"{max(size, 0)} bytes on the first rank"
                expected, do = f"the {part.size} that another rank wrote", "publish in a place that all ranks share"
                raise StorageError(where, found=found, expected=expected, do=do)

    def _forget_old(self, published: Published, written: Sequence[VersionFile]) -> None:
        """Delete the files that have not been named for a version; those that are no longer named, next time."""
        self._own_keys.clear()
        if self._ranks.rank > 0:
            return
        named = {key for file in published.files for key in file.keys}
        self._delete(
            key for key in (*self._dropped, *(key for file in written for key in file.keys)) if key not in named
        )
        self._dropped = sorted(self._keys - named)
        self._keys = named

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(ShrinkpointError):  # it is in nobody's way; the next process removes it
                self._storage.delete(key)

    def _resume(self) -> None:
        """Go on behind what is published here already, and remove what a process that died has left."""
        reader = VersionReader(self._storage, threads=self._threads)
        published = self._published = self._ranks.from_first(partial(self._clean_up, reader))
        if published is None:
            return
        self._next = published.version + 1
        file = min(file for file in published.files if file.version == published.version)
        if len(file.parts) != (self._ranks.count if self._ranks.is_sharded else 0):
            return  # a keyframe comes next
        part = self._ranks.run(lambda: self._load_last(reader, published))
        if part is not None:
            self._reference, self._tree = dict(part.reference.tensors), part.tree

    def _load_last(self, reader: VersionReader, published: Published) -> HeldPart | None:
        try:
            return reader.read_part(published, self._ranks.rank)
        except ShrinkpointError as error:
            _log.warning("the next version is a keyframe, the last one does not load: %s", error)
            return None

    def _clean_up(self, reader: VersionReader) -> Published | None:
        published = reader.published()
        self._storage.remove_stale()
        self._keys = set() if published is None else {key for file in published.files for key in file.keys}
        self._delete(key for key in self._storage.list() if is_own_key(key) and key not in self._keys)
        return published


def _published_dtype(dtype: torch.dtype, cast: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published: the floating-point ones of 16 bits and more are cast."""
    return dtype if cast is None or dtype not in _CAST_FROM else cast


def _separate_views(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those that view memory as other dtypes in memory of their own: a cast would change the views."""
    places = {name: (tensor.device, tensor.untyped_storage().data_ptr()) for name, tensor in tensors.items()}
    dtypes = Counter(place for place, _ in {(places[name], tensor.dtype) for name, tensor in tensors.items()})
    return {name: tensor.clone() if dtypes[places[name]] > 1 else tensor for name, tensor in tensors.items()}


def _copy(state: FlatState, cast: torch.dtype | None, old: Mapping[str, Tensor]) -> FlatState:
    """A copy of a state in CPU memory of its own; that of old tensors is overwritten where it fits."""
    infos = dict(state.infos)
    casts = {name for name, x in state.tensors.items() if _published_dtype(x.dtype, cast) != x.dtype}
    copies = copy_tensors({name: tensor for name, tensor in state.tensors.items() if name not in casts}, old)
    with torch.no_grad():
        for name in casts:
            assert cast is not None
            source, target = state.tensors[name], old.get(name)
            if target is None or target.dtype != cast or target.shape != source.shape:
                target = empty(tuple(source.shape), cast, pin=source.is_cuda)
            copies[name] = target.copy_(source)
            infos[name] = replace(infos[name], dtype=dtype_name(cast))
    wait_for_devices(state.tensors.values())
    return replace(state, tensors={name: copies[name] for name in state.tensors}, infos=infos)
