"""The chain of files that a checkpoint is decoded from: which files, where each may be, and that each is the right one.
No torch: `decode.decode_chain` decodes a chain.

A chain is a sequence of `ChainFile`, keyframe first, the checkpoint's own payload last. It comes from a store's
manifest (`store_chain`), from a directory's (`directory_chain`), or from the names that single files have of their
bases (`file_chain`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shrinkpoint.container import FileReader
from shrinkpoint.errors import (
    BASE_ADVICE,
    VERIFY_ADVICE,
    ChainError,
    CorruptError,
    FormatError,
    NotFoundError,
    ShrinkpointError,
    StorageError,
    TruncatedError,
)
from shrinkpoint.storage import AnyDirectory, LocalStorage, Source, Storage, directory_storage
from shrinkpoint.store import layout
from shrinkpoint.store.file_place import AnyPlace, FilePlace, place_file
from shrinkpoint.store.identify import identify
from shrinkpoint.store.manifest import ChainLink, DirectoryManifest, Manifest, Payload

if TYPE_CHECKING:
    from shrinkpoint.store.listing import Listing

M = TypeVar("M")
T = TypeVar("T")
MAX_READS = 100  # How often a checkpoint that is written again and again is read, until the error is raised


def use_current(read: Callable[[], M], use: Callable[[M], T], identify: Callable[[M], object]) -> T:
    """Call `use` with what `read` returns; again, while that fails and `read` has something else to return.

    A writer that saves a checkpoint again, compacts it or prunes its moments deletes files as soon as the new manifest
    is there. A reader that has the old manifest then misses a file, and finds the new manifest.

    Args:
        read: reads a manifest, or finds a chain.
        use: decodes it; may be called several times.
        identify: what tells the files of two from each other.

    Raises:
        Exception: whatever `read` and `use` raise.
    """
    current = read()
    for _ in range(MAX_READS):
        try:
            return use(current)
        except (ChainError, FormatError, StorageError, NotFoundError):
            previous, current = identify(current), read()
            if identify(current) == previous:
                raise
    return use(current)


def manifest_identity(manifest: Manifest[Any]) -> object:
    """Key that differs if two manifests name different files."""
    return manifest.id, manifest.payloads, manifest.bases


def chain_identity(files: Sequence[ChainFile]) -> object:
    """Key that differs if two chains differ: digests, keys and checkpoints of the files.

    A step that is saved twice with the same values has its first digest and its first name again, and another id.
    """
    return tuple((file.digest, file.keys, file.id) for file in files)


@dataclass(frozen=True)
class ChainFile:
    """One file of a chain, and where it may be found."""

    digest: str  # its header digest, which authenticates every other byte
    storage: Storage  # what holds it
    keys: tuple[str, ...]  # its possible keys, in the order in which to try them
    expected: str  # what it is to the checkpoint, for messages: "the base of step 3 from step 2"
    size: int | None = None  # in bytes; None: not compared
    is_payload: bool = False  # it is the checkpoint's own file, and not one that it depends on
    # `step`, `id`: the checkpoint of a store that it belongs to; None and "" elsewhere.
    step: int | None = None
    id: str = ""
    header: FileReader | None = None  # of this very file, if it has been read and verified already
    source: Source | None = None  # this very file, open: `read` uses and closes it
    advice: str = VERIFY_ADVICE  # what to do where it is missing

    def open_ahead(self) -> ChainFile:
        """This file, open and with its header; raises as `read`."""

        def open_file(source: Source, where: str) -> ChainFile:
            try:
                return replace(self, header=self.verify(source, where), source=source)
            except BaseException:
                source.close()
                raise

        return self.try_keys(open_file)

    def close(self) -> ChainFile:
        """This file, no longer open."""
        if self.source is not None:
            self.source.close()
        return replace(self, source=None)

    def read(self, use: Callable[[FileReader], T]) -> T:
        """Call `use` with the file, once its header is verified, from the first key under which that succeeds.

        A damaged file is passed over, since there may be an intact copy under the next key; not so if it is open.

        Raises:
            ChainError, FormatError, StorageError: no key leads to the file; the error of the first that has one.
        """
        if self.source is not None and self.header is not None:
            with self.source:
                return use(self.header)

        def use_source(source: Source, where: str) -> T:
            with source:
                return use(self.verify(source, where))

        return self.try_keys(use_source)

    def read_header(self) -> FileReader:
        """The header of the file; raises as `read`."""
        return self.read(lambda reader: reader)

    def try_keys(self, use: Callable[[Source, str], T]) -> T:
        """Call `use` with the open file, which it closes or returns, and its name: from the first key under which that
        succeeds; raises as `read`."""
        error: ShrinkpointError | None = None
        error_class: type[ShrinkpointError]
        for key in self.keys:
            try:
                return use(self.storage.open(key), self.storage.describe(key))
            except NotFoundError:
                continue
            except (ChainError, FormatError, StorageError) as other:
                error = error or other
        if error is not None:
            raise error
        where = ", ".join(self.storage.describe(key) for key in self.keys)
        error_class, expected = ChainError, f"{self.expected}, with header digest {self.digest}"
        if self.is_payload:
            error_class, expected = CorruptError, "the payload its manifest names"
        raise error_class(where, found="no such file", expected=expected, do=self.advice)

    def verify(self, source: Source, where: str) -> FileReader:
        """The header of an open file, once it is known to be the one of this chain.

        Raises:
            ChainError: it is another file; CorruptError where a store's manifest names it as its payload.
            FormatError: the header is damaged, or the file too short.
        """
        if self.header is not None:
            return self.header.reopen(source)
        reader = FileReader(source, where)
        if reader.digest == self.digest and self.size in (None, source.size):
            return reader
        if self.size is not None:
            found = f"{source.size} bytes with header digest {reader.digest}"
            raise ChainError(where, found=found, expected=f"{self.size} bytes with {self.digest}", do=VERIFY_ADVICE)
        error_class = CorruptError if self.is_payload else ChainError
        found = f"header digest {reader.digest}"
        raise error_class(where, found=found, expected=f"{self.digest}, {self.expected}", do=VERIFY_ADVICE)


def check_parent(file: FileReader, base: FileReader | None) -> None:
    """Make sure that a file was made against `base`, or is a keyframe where that is None.

    Raises:
        ChainError: it was made against another file.
    """
    if file.parent is None and base is None:
        return
    digest = None if file.parent is None else file.parent.get("digest")
    if base is None or file.parent is None or digest != base.digest:
        found = "no base" if base is None else f"a base with header digest {base.digest}"
        expected = "none: it is a keyframe" if file.parent is None else f"the file with header digest {digest!a:.60}"
        raise ChainError(file.where, found=found, expected=expected, do=VERIFY_ADVICE)


def chain_links(manifest: Manifest) -> tuple[ChainLink, ...]:
    """Every file that decoding a checkpoint of a store needs, keyframe first, its own payload last."""
    own = manifest.payloads[0]
    return (*manifest.bases, ChainLink(manifest.step, manifest.id, own.digest, own.size, own.name, own.name))


def file_sizes(manifests: Iterable[Manifest | DirectoryManifest]) -> dict[str, int]:
    """Bytes of all files that checkpoints need, by header digest; deltas with one base share it."""
    sizes: dict[str, int] = {}
    for manifest in manifests:
        sizes.update({base.digest: base.size for base in manifest.bases})
        for payload in manifest.payloads:
            sizes.update({**dict(payload.bases), payload.digest: payload.size})
    return sizes


def payload_bytes(storage: Storage, listing: Listing) -> int:
    """Bytes of all payloads in a store, bases of deltas included, a file with several names once."""
    if isinstance(storage, LocalStorage):
        return disk_bytes(storage.path / key for key in listing.keys if key.endswith(".safetensors"))
    return sum(file_sizes(listing.manifests.values()).values())


def disk_bytes(paths: Iterable[Path]) -> int:
    """Bytes of files, each once whatever number of names it has; one that is gone meanwhile has none."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def candidate_keys(manifest: Manifest, link: ChainLink) -> tuple[str, ...]:
    """The keys under which a file of a checkpoint's chain may be, in the order in which to try them."""
    own = (manifest.key(link.name),) if link.name else ()
    return own if link.step == manifest.step else (*own, link.sibling_key)


def store_chain(storage: Storage, manifest: Manifest) -> tuple[ChainFile, ...]:
    """The files that a checkpoint of a store is decoded from: its own hard links first, then its siblings' files."""
    files, advice = [], getattr(storage, "missing_base_advice", VERIFY_ADVICE)
    for link in chain_links(manifest):
        is_payload, keys = link.step == manifest.step, candidate_keys(manifest, link)
        expected = f"the base of step {manifest.step}: the file of step {link.step}"
        if is_payload:
            expected = "which its manifest records"
        file = ChainFile(link.digest, storage, keys, expected, is_payload=is_payload, step=link.step, id=link.id)
        file = file if is_payload else replace(file, advice=advice)
        files.append(file)
    return tuple(files)


def is_current(manifests: Mapping[int, Manifest], base: ChainLink) -> bool:
    """True if the step a base came from still holds that very file, and was not saved again or deleted since."""
    manifest = manifests.get(base.step)
    return manifest is not None and manifest.digest == base.digest


def is_orphaned(manifests: Mapping[int, Manifest], manifest: Manifest) -> bool:
    """True if a delta depends on a file of a checkpoint that is not there: forgotten, deleted, saved again."""
    return not all(is_current(manifests, base) for base in manifest.bases)


def orphaned_deltas(manifests: Mapping[int, Manifest]) -> list[int]:
    """The steps of the deltas that are orphaned."""
    return [manifest.step for manifest in manifests.values() if is_orphaned(manifests, manifest)]


def ancestors(digests: Mapping[int, str], manifest: Manifest) -> list[int]:
    """The steps that a checkpoint depends on, keyframe first; those that are gone or were saved again are left out.

    Args:
        digests: `Manifest.digest` by step of every checkpoint.
    """
    return [base.step for base in manifest.bases if digests.get(base.step) == base.digest]


def describe_steps(manifests: Mapping[int, Manifest]) -> str:
    """The steps there are, for a message."""
    steps = sorted(manifests)
    if not steps:
        return "a step, but there is none yet"
    return "one of " + ", ".join(map(str, steps if len(steps) < 8 else [*steps[:3], "...", *steps[-3:]]))


def directory_chain(directory: AnyDirectory, payload: Payload) -> tuple[ChainFile, ...]:
    """The files that one payload of a framework's directory is decoded from.

    On this machine all of them lie in that directory. In a bucket, which has no links, bases are where deltas say;
    their headers are read.

    Raises:
        ChainError: in a bucket, a base is missing, or is another than the delta was made against.
        FormatError, StorageError: in a bucket, a header cannot be read.
    """
    storage, expected = directory_storage(directory), "a file its manifest names"
    own = ChainFile(payload.digest, storage, (payload.name,), expected, payload.size, is_payload=True)
    if payload.bases and not isinstance(storage, LocalStorage):
        # Bases in a bucket are found by the names that the headers have of them
        where = own.storage.describe(payload.name)
        try:
            files = file_chain(where)
        except ChainError as error:
            do = "restore another checkpoint; in a bucket a delta needs the directories of its bases"
            raise ChainError(error.where, found=error.found, expected=error.expected, do=do) from error
        sizes = {**dict(payload.bases), payload.digest: payload.size}
        if [file.digest for file in files] != [*sizes]:
            found, expected = "a file with other bases than its manifest names", f"the {len(sizes)} files of its chain"
            raise ChainError(where, found=found, expected=expected, do=VERIFY_ADVICE)
        return tuple(replace(file, size=sizes[file.digest]) for file in files)
    do = f"copy the directory with its folder `{layout.BASES}`, or restore another checkpoint"
    bases = (
        ChainFile(base, storage, (layout.base_name(base),), expected, size, advice=do) for base, size in payload.bases
    )
    return (*bases, own)


def file_chain(where: AnyPlace, base: AnyPlace | None = None) -> tuple[ChainFile, ...]:
    """The files that a single file is decoded from, each found by the name that its child has of it.

    Args:
        where: the last file.
        base: where its base is now; None: where the file says.

    Raises:
        NotFoundError: there is no such file.
        ChainError: a base is missing, or is another than the delta was made against.
        FormatError: a header is damaged, or is not one of ours.
        StorageError: reading failed.
    """
    place = place_file(where)
    reader = read_header(place)
    files = [_single_file(place, reader, is_payload=True)]
    while reader.parent is not None:
        name, digest = reader.parent["name"], reader.parent["digest"]
        if digest in {file.digest for file in files}:
            raise ChainError(str(where), found="a chain that leads back to itself", do=VERIFY_ADVICE)
        is_given = base is not None and len(files) == 1
        candidates = [place_file(base)] if base is not None and is_given else place.candidates(name)
        place, reader = _find_base(candidates, digest, place)
        files.append(_single_file(place, reader))
    return tuple(reversed(files))


def read_header(where: AnyPlace) -> FileReader:
    """The header of a single file; the file is closed again.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it is damaged, or is not one of ours; the message says what it is instead.
        StorageError: reading failed.
    """
    place = place_file(where)
    try:
        with place.open() as source:
            reader = FileReader(source, str(place))
    except (NotFoundError, CorruptError, TruncatedError) as error:
        result = None if place.path is None else identify(place.path)
        if result is None:
            raise
        error_class = FormatError if result.is_foreign and isinstance(error, FormatError) else type(error)
        expected = "a file that shrinkpoint saved"
        raise error_class(str(place), found=result.description, expected=expected, do=result.do) from error
    if reader.parent is not None and not all(type(reader.parent.get(key)) is str for key in ("name", "digest")):
        found, expected = f"a parent {reader.parent!a:.60}", "an object with a name and a digest"
        raise CorruptError(str(place), found=found, expected=expected, do=VERIFY_ADVICE)
    return reader


def _single_file(place: FilePlace, header: FileReader, *, is_payload: bool = False) -> ChainFile:
    # Only a keyframe's header is kept: what has been read of it need not be read again, and the others are verified.
    storage, expected = place.storage, "as it was a moment ago"
    keyframe_header = header if header.parent is None else None
    return ChainFile(header.digest, storage, (place.key,), expected, header=keyframe_header, is_payload=is_payload)


def _find_base(candidates: Sequence[FilePlace], digest: str, child: FilePlace) -> tuple[FilePlace, FileReader]:
    error: ChainError | None = None
    for place in candidates:
        if not place.exists:
            continue
        reader = read_header(place)
        if reader.digest == digest:
            return place, reader
        found, expected = f"a file with digest {reader.digest}", f"{digest}, which {child} needs"
        error = error or ChainError(str(place), found=found, expected=expected, do=BASE_ADVICE)
    expected = f"the base of {child}, with digest {digest}"
    where, found = (
        (str(candidates[0]), "no such file") if candidates else (str(child), "a base that is not found by its name")
    )
    raise error or ChainError(where, found=found, expected=expected, do=BASE_ADVICE)
