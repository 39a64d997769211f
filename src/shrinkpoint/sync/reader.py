"""Decodes published versions: from the version that is held, or from a keyframe, whichever is fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.reference import Reference, as_decoded
from shrinkpoint.container import FileReader
from shrinkpoint.errors import ChainError, CorruptError, FormatError, MismatchError, NotFoundError, ShrinkpointError
from shrinkpoint.guard import read_guard
from shrinkpoint.storage import Storage, map_requests
from shrinkpoint.store.checkpoint_file import Allowance, decode_records
from shrinkpoint.store.decode import needed_records
from shrinkpoint.sync.live_writes import VersionTensor
from shrinkpoint.sync.local_tensors import LocalTensor, Piece
from shrinkpoint.sync.part_tree import VersionLayout, read_layout
from shrinkpoint.sync.published import KEY, MAX_BYTES, Published, StoredPart, VersionFile
from shrinkpoint.sync.ranks import Ranks
from shrinkpoint.tensors.dtypes import torch_dtype
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.tensors.info import JSON

T = TypeVar("T")
_UNREADABLE = (ChainError, FormatError, NotFoundError)
_DO = "nothing was changed; wait for the next keyframe, or publish with keyframe=True"
_MIN_LONE_NUMEL = 1 << 16
"""Values of a piece that is alone in its record; of a part that is read, all smaller ones are."""
Selection: TypeAlias = Callable[[VersionLayout], Sequence[Collection[str]]]
"""The names of the stored tensors that are needed of each part."""


@dataclass(frozen=True)
class HeldPart:
    """A file of a version, decoded."""

    tree: JSON = field(repr=False)  # Structure of the state; its leaves name tensors
    reference: Reference = field(repr=False)  # The tensors, on the CPU, by name
    wanted: frozenset[str] | None = None  # Names of the tensors that are held; None: all of the file
    nbytes: int = 0  # Bytes that were read for it

    @property
    def num_held_bytes(self) -> int:
        return as_decoded(self.reference.tensors).nbytes


@dataclass(frozen=True)
class HeldVersion:
    """A version, decoded."""

    id: str  # Of the series
    version: int  # Its number
    parts: Sequence[HeldPart] = field(repr=False)  # Its file, or its parts by rank
    layout: VersionLayout | None = field(default=None, repr=False)  # Of its parts; None of one file

    @property
    def nbytes(self) -> int:
        """Bytes that were read for it."""
        return sum(part.nbytes for part in self.parts)

    def tensors(self, where: str) -> dict[str, VersionTensor]:
        """Its tensors by name.

        Raises:
            CorruptError: the structure of its state is damaged.
            MismatchError: the state has something else than tensors.
        """
        if self.layout is None:
            tensors = unflatten(self.parts[0].tree, self.parts[0].reference.tensors, where=where)
            if not isinstance(tensors, Mapping) or not all(isinstance(x, Tensor) for x in tensors.values()):
                raise MismatchError(where, found="no dict of tensors", expected="a published state", do=_DO)
            return {
                name: VersionTensor(tensor.dtype, tuple(tensor.shape), LocalTensor.whole(tensor).pieces)
                for name, tensor in tensors.items()
            }
        held = [part.reference.tensors for part in self.parts]
        return {
            name: VersionTensor(
                torch_dtype(spec.dtype),
                spec.shape,
                [
                    Piece(piece.offsets, held[piece.part][piece.stored_name])
                    for piece in self.layout.pieces_of(name)
                    if piece.stored_name in held[piece.part]
                ],
            )
            for name, spec in self.layout.tensors.items()
        }


class _PartsAllowance(Allowance):
    """Limits what the parts of one version may allocate together."""

    _others = _current = 0

    def admit(self, where: str, stored: int, raw: int) -> None:
        super().admit(where, stored, self._others + raw)
        self._current = max(self._current, raw)

    def begin_part(self) -> None:
        """Count the part that was decoded last, whose tensors stay."""
        self._others, self._current = self._others + self._current, 0


class VersionReader:
    """Reads what is published in a storage.

    Args:
        storage: where.
        threads: native threads for decoding; None: every core.
        max_bytes: limit on the bytes of the tensors of one version; None: as of `shrinkpoint.load`, and at least twice
            what is held.

    Raises:
        PolicyError: an invalid argument.
    """

    def __init__(self, storage: Storage, *, threads: int | None = None, max_bytes: int | None = None) -> None:
        self.storage = storage
        self._threads = validate.check_threads(threads)
        self._max_bytes = validate.check_optional_int("max_bytes", max_bytes, none_meaning="for the default")
        self._data, self._published = b"", None  # type: tuple[bytes, Published | None]
        self._whole: set[int] = set()  # parts of which every tensor is needed, as the needed ones depend on others

    def published(self) -> Published | None:
        """Read what is published now, one small object; None if nothing is.

        Raises:
            FormatError: it is damaged.
            StorageError: the storage cannot be read.
        """
        try:
            with self.storage.open(KEY) as source:
                if source.size > MAX_BYTES:
                    found = f"{source.size} bytes"
                    raise CorruptError(self.storage.describe(KEY), found=found, expected=f"at most {MAX_BYTES}", do=_DO)
                data = bytes(source.read(0, source.size))
        except NotFoundError:
            return None
        if data != self._data or self._published is None:
            self._published = Published.from_bytes(data, self.storage.describe(KEY))
            self._data = data
        return self._published

    def read(self, published: Published, held: HeldVersion | None, select: Selection | None = None) -> HeldVersion:
        """Decode the newest version, and verify every byte and every value of it that is read.

        Where a file is damaged or gone, the next way is tried.

        Args:
            held: the version that deltas may begin with, read with the same selection.
            select: what is needed of the parts, of which nothing else is read; None: everything.

        Raises:
            ChainError, FormatError, NotFoundError: no way leads there; the error of the first.
            StorageError: reading failed.
        """
        num_whole = len(self._whole)
        try:
            return self._follow_routes(published, held, lambda route: self._decode(published, route, held, select))
        except _UNREADABLE:
            if len(self._whole) > num_whole:
                return self.read(published, None, select)
            raise

    def read_newest(
        self,
        published: Published,
        held: HeldVersion | None,
        select: Selection | None = None,
        ranks: Ranks | None = None,
    ) -> HeldVersion:
        """`read` unless the version is held; where its files are pruned meanwhile, the version that is newest then.

        Args:
            ranks: that read the same version together; None: this process alone.
        """
        ranks = Ranks(None) if ranks is None else ranks

        def read(published: Published) -> HeldVersion:
            if held is not None and (held.id, held.version) == (published.id, published.version):
                return held
            return self.read(published, held, select)

        while True:
            try:
                return ranks.run(partial(read, published))
            except _UNREADABLE:
                newer = ranks.from_first(self.published)
                if newer is None or newer == published:
                    raise
                published = newer

    def read_part(self, published: Published, index: int) -> HeldPart:
        """Decode one part of the newest version, or its one file; raises as `read` does."""
        return self._follow_routes(
            published, None, lambda route: self._decode_part(route, index, None, None, Allowance(self._max_bytes))
        )

    def _follow_routes(
        self, published: Published, held: HeldVersion | None, decode: Callable[[Sequence[VersionFile]], T]
    ) -> T:
        """Decode by the first route that can be read; else raise the error of the first of all."""
        first: ShrinkpointError | None = None
        is_base = held is not None and held.id == published.id
        for route in published.routes(held.version if held is not None and is_base else None):
            try:
                return decode(route)
            except _UNREADABLE as error:
                first = first or error
        if first is not None:
            raise first
        where, found = self.storage.describe(), f"no keyframe that leads to version {published.version}"
        raise ChainError(where, found=found, expected="one, and the deltas after it", do=_DO)

    def _decode(
        self,
        published: Published,
        route: Sequence[VersionFile],
        held: HeldVersion | None,
        select: Selection | None,
    ) -> HeldVersion:
        base = None if held is None or (route and route[0].is_keyframe) else held
        layout = self._read_layout(route[0]) if base is None else base.layout
        wanted = self._wanted(layout, base, select)
        # A small delta of a large model is no attack.
        minimum = 0 if held is None else 2 * sum(part.num_held_bytes for part in held.parts)
        allowance = _PartsAllowance(self._max_bytes, minimum=minimum)
        parts = []
        for index, names in enumerate(wanted):
            before = None if base is None else base.parts[index]
            part = self._decode_part(route, index, before, names, allowance)
            if layout is not None and names != frozenset() and part.tree != layout.trees[index]:
                where, found = self.storage.describe(), f"part {index} in other pieces than its base"
                raise ChainError(where, found=found, expected="the same pieces", do=_DO)
            allowance.begin_part()
            parts.append(part)
        return HeldVersion(published.id, published.version, parts, layout)

    def _read_layout(self, file: VersionFile) -> VersionLayout | None:
        """The layout of a keyframe's parts, from the header of each; None of one file."""
        if not file.parts:
            return None

        def read_header(stored: tuple[str, StoredPart]) -> FileReader:
            with self._open(*stored) as reader:
                return reader

        readers = map_requests(self.storage, read_header, file.stored)
        return read_layout([(reader.tree, reader.records) for reader in readers], self.storage.describe())

    def _wanted(
        self, layout: VersionLayout | None, base: HeldVersion | None, select: Selection | None
    ) -> Sequence[frozenset[str] | None]:
        """The names of the tensors that are needed of each part; None: all."""
        if base is not None:
            return [part.wanted for part in base.parts]
        if layout is None:
            return [None]
        if select is None:
            return [None] * len(layout.trees)
        wanted = [set(names) for names in select(layout)]
        for spec in (spec for specs in layout.pieces.values() for spec in specs):
            if wanted[spec.part] and spec.numel < _MIN_LONE_NUMEL:
                wanted[spec.part].add(spec.stored_name)
        return [None if index in self._whole else frozenset(names) for index, names in enumerate(wanted)]

    def _decode_part(
        self,
        route: Sequence[VersionFile],
        index: int,
        base: HeldPart | None,
        wanted: frozenset[str] | None,
        allowance: Allowance,
    ) -> HeldPart:
        """Decode the files of one part, from its keyframe or behind the part that is held."""
        part, nbytes = base, 0
        for file in route:
            if wanted is not None and not wanted:
                return HeldPart(None, Reference({}), wanted)
            with self._open(*file.stored[index], is_whole=wanted is None) as reader:
                reference = None if part is None else part.reference
                if wanted is None:
                    decoded = decode_records(reader, reference, threads=self._threads, allowance=allowance)
                    part, nbytes = HeldPart(decoded.tree, decoded.reference), nbytes + reader.size
                else:
                    part = self._decode_wanted(reader, index, reference, wanted, allowance)
                    nbytes += part.nbytes
        assert part is not None
        return HeldPart(part.tree, part.reference, wanted, nbytes)

    def _decode_wanted(
        self,
        reader: FileReader,
        index: int,
        reference: Reference | None,
        wanted: frozenset[str],
        allowance: Allowance,
    ) -> HeldPart:
        """Decode some tensors of a file; those that did not change are the reference's."""
        held = {} if reference is None else reference.tensors
        with read_guard(reader.where):
            heads = reader.records
            same = {info.name for head in heads if head.recipe == {"kind": "same"} for info in head.infos}
            records, _ = needed_records(reader, wanted - same)
            bases = {info.name for index in records if heads[index].base is not None for info in heads[index].infos}
            if not bases | (wanted & same) <= held.keys():
                self._whole.add(index)
                found = f"tensors of part {index} that depend on tensors that are not held"
                raise ChainError(reader.where, found=found, expected="a keyframe", do=_DO)
            content = decode_records(
                reader, reference, threads=self._threads, allowance=allowance, records=records, verify_others=False
            )
            decoded = content.reference.tensors
            tensors = {name: held[name] if name in same else decoded[name] for name in wanted}
        others = (head for number, head in enumerate(heads) if number not in records)
        unread = sum(entry.size for head in others for entry in head.parts.values())
        return HeldPart(reader.tree, Reference(tensors), wanted, reader.size - unread)

    @contextmanager
    def _open(self, key: str, stored: StoredPart, *, is_whole: bool = False) -> Iterator[FileReader]:
        where = self.storage.describe(key)
        with self.storage.open(key) as source:
            if is_whole and (read_ahead := getattr(source, "read_ahead", None)) is not None:
                read_ahead()  # a file of a bucket whole, so that no record waits for a request of its own
            reader = FileReader(source, where)
            if (source.size, reader.digest) != (stored.size, stored.digest):
                found = f"{source.size} bytes with header digest {reader.digest}"
                expected = f"{stored.size} bytes with {stored.digest}"
                raise ChainError(where, found=found, expected=expected, do=_DO)
            yield reader
