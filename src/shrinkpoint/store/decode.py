"""Decode a checkpoint of a store or of a directory: from its keyframe, delta by delta."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from shrinkpoint.codec.reference import Reference
from shrinkpoint.container import FileReader
from shrinkpoint.errors import NotFoundError
from shrinkpoint.storage import Source, Storage
from shrinkpoint.store import chain
from shrinkpoint.store.allowance import Allowance
from shrinkpoint.store.chain import read_chain_file
from shrinkpoint.store.checkpoint_file import DecodedFile, decode_records
from shrinkpoint.store.directory import payload_files, read_directory_file, read_directory_manifest, verify_file_header
from shrinkpoint.store.manifest import ChainLink, Manifest


def decode_chain(
    storage: Storage, manifest: Manifest, *, threads: int | None = None, max_bytes: int | None = None
) -> DecodedFile:
    """Decode the payload of `manifest`; at most two states are in memory at a time.

    Args:
        max_bytes: as of `Allowance`.

    Raises:
        ChainError: a base is missing, or none found is the one the delta was made against.
        FormatError: bytes are at fault.
        StorageError: reading failed.
    """
    for _, decoded in iter_chain(storage, manifest, threads=threads, max_bytes=max_bytes):
        last = decoded
    return last


def iter_chain(
    storage: Storage, manifest: Manifest, *, threads: int | None = None, max_bytes: int | None = None
) -> Iterator[tuple[ChainLink, DecodedFile]]:
    """Every file of the chain with its content, keyframe first; raises as `decode_chain` does."""
    reference: Reference | None = None
    allowance = Allowance(max_bytes)
    for base in chain.chain_links(manifest):
        read = partial(decode_records, reference=reference, threads=threads, allowance=allowance)
        decoded = read_chain_file(storage, manifest, base, read)
        reference = decoded.reference
        yield base, decoded


def decode_directory(
    directory: str | Path, rank: int = 0, *, threads: int | None = None, max_bytes: int | None = None
) -> DecodedFile:
    """One payload's content, its chain decoded from the keyframe on; at most two states are in memory at a time.

    Args:
        max_bytes: as of `Allowance`.

    Raises:
        NotFoundError: there is no manifest, or no payload of this rank.
        ChainError, FormatError, StorageError: as `folder.check`.
    """
    payloads = read_directory_manifest(directory).payloads
    if not 0 <= rank < len(payloads):
        found, expected = f"no payload of rank {rank}", f"a rank below {len(payloads)}"
        raise NotFoundError(str(directory), found=found, expected=expected, do="name one of its ranks")
    decoded: DecodedFile | None = None
    allowance = Allowance(max_bytes)
    for key, digest, size in payload_files(payloads[rank]):
        reference = None if decoded is None else decoded.reference
        read = partial(decode_records, reference=reference, threads=threads, allowance=allowance)
        decoded = read_directory_file(directory, key, partial(_decode_verified, digest=digest, size=size, read=read))
    assert decoded is not None
    return decoded


def _decode_verified(
    source: Source, where: str, *, digest: str, size: int, read: Callable[[FileReader], DecodedFile]
) -> DecodedFile:
    return read(verify_file_header(source, where, digest, size))
