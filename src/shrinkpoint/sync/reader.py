"""Decodes published versions: from the version that is held, or from a keyframe, whichever is fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shrinkpoint.codec.reference import Reference, as_decoded
from shrinkpoint.container import FileReader
from shrinkpoint.errors import ChainError, CorruptError, FormatError, NotFoundError, ShrinkpointError
from shrinkpoint.storage import Storage
from shrinkpoint.store.checkpoint_file import Allowance, decode_records
from shrinkpoint.sync.published import KEY, MAX_BYTES, Published, VersionFile
from shrinkpoint.tensors.info import JSON

_DO = "nothing was changed; wait for the next keyframe, or publish with keyframe=True"


@dataclass(frozen=True)
class HeldVersion:
    """A version, decoded.

    Attributes:
        id: of the series.
        version: its number.
        tree: structure of the published state; its leaves name tensors.
        reference: the tensors, on the CPU, by name.
        nbytes: bytes that were read for it.
    """

    id: str
    version: int
    tree: JSON = field(repr=False)
    reference: Reference = field(repr=False)
    nbytes: int = 0


class VersionReader:
    """Reads what is published in a storage.

    Args:
        storage: where.
        threads: native threads for decoding; None: every core.
        max_bytes: limit on the bytes of the tensors of one version; None: as of `shrinkpoint.load`, and at least twice
            what is held.
    """

    def __init__(self, storage: Storage, *, threads: int | None = None, max_bytes: int | None = None) -> None:
        self.storage = storage
        self._threads, self._max_bytes = threads, max_bytes
        self._data, self._published = b"", None  # type: tuple[bytes, Published | None]

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

    def read(self, published: Published, held: HeldVersion | None) -> HeldVersion:
        """Decode the newest version, and verify every byte and every value of it.

        Where a file is damaged or gone, the next way is tried.

        Raises:
            ChainError, FormatError, NotFoundError: no way leads there; the error of the first.
            StorageError: reading failed.
        """
        base = held if held is not None and held.id == published.id else None
        first: ShrinkpointError | None = None
        for route in published.routes(None if base is None else base.version):
            try:
                return self._decode(published, route, base)
            except (ChainError, FormatError, NotFoundError) as error:
                first = first or error
        if first is not None:
            raise first
        where, found = self.storage.describe(), f"no keyframe that leads to version {published.version}"
        raise ChainError(where, found=found, expected="one, and the deltas behind it", do=_DO)

    def _decode(self, published: Published, route: Sequence[VersionFile], base: HeldVersion | None) -> HeldVersion:
        is_delta = not route or not route[0].is_keyframe
        reference = base.reference if is_delta and base is not None else None
        nbytes = sum(file.size for file in route)
        held = 0 if base is None else as_decoded(base.reference.tensors).nbytes
        allowance = Allowance(self._max_bytes, minimum=2 * held)  # a small delta of a large model is no attack
        tree = None if base is None else base.tree
        for file in route:
            where = self.storage.describe(file.key)
            with self.storage.open(file.key) as source:
                if (read_ahead := getattr(source, "read_ahead", None)) is not None:
                    read_ahead()  # a file of a bucket whole, so that no record waits for a request of its own
                reader = FileReader(source, where)
                if (source.size, reader.digest) != (file.size, file.digest):
                    found = f"{source.size} bytes with header digest {reader.digest}"
                    expected = f"{file.size} bytes with {file.digest}"
                    raise ChainError(where, found=found, expected=expected, do=_DO)
                decoded = decode_records(reader, reference, threads=self._threads, allowance=allowance)
            tree, reference = decoded.tree, decoded.reference
        assert reference is not None
        return HeldVersion(published.id, published.version, tree, reference, nbytes)
