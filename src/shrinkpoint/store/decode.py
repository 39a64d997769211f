"""Decode a checkpoint of a store, of a directory or of single files: from its keyframe, delta by delta."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import NotFoundError
from shrinkpoint.store.chain import ChainFile, directory_chain
from shrinkpoint.store.checkpoint_file import Allowance, DecodedFile, decode_records
from shrinkpoint.store.directory import read_directory_manifest


def decode_chain(
    chain: Iterable[ChainFile], *, threads: int | None = None, max_bytes: int | None = None
) -> DecodedFile:
    """Decode the last file of a chain; at most two states are in memory at a time.

    Args:
        chain: keyframe first; from `store_chain`, `directory_chain` or `file_chain`.
        threads: native threads; None: every core.
        max_bytes: limit on the bytes of tensors in one file; None: the default of `Allowance`.

    Raises:
        ChainError: a base is missing, or none found is the one the delta was made against.
        FormatError: bytes are at fault.
        StorageError: reading failed.
    """
    decoded: DecodedFile | None = None
    for _, content in iter_chain(chain, threads=threads, max_bytes=max_bytes):
        decoded = content
    assert decoded is not None
    return decoded


def iter_chain(
    chain: Iterable[ChainFile], *, threads: int | None = None, max_bytes: int | None = None
) -> Iterator[tuple[ChainFile, DecodedFile]]:
    """Every file of a chain with its content, keyframe first; raises as `decode_chain` does."""
    reference: Reference | None = None
    allowance = Allowance(max_bytes)
    for file in chain:
        decoded = file.read(partial(decode_records, reference=reference, threads=threads, allowance=allowance))
        reference = decoded.reference
        yield file, decoded


def decode_directory(
    directory: str | Path, rank: int = 0, *, threads: int | None = None, max_bytes: int | None = None
) -> DecodedFile:
    """Decode one payload of a framework's directory.

    Raises:
        NotFoundError: there is no manifest, or no payload of this rank.
        ChainError, FormatError, StorageError: as `decode_chain`.
    """
    payloads = read_directory_manifest(directory).payloads
    if not 0 <= rank < len(payloads):
        found, expected = f"no payload of rank {rank}", f"a rank below {len(payloads)}"
        raise NotFoundError(str(directory), found=found, expected=expected, do="name one of its ranks")
    return decode_chain(directory_chain(directory, payloads[rank]), threads=threads, max_bytes=max_bytes)
