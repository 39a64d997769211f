"""Decode a checkpoint that lies in a folder of a framework's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shrinkpoint.codec import Reference
from shrinkpoint.errors import NotFoundError
from shrinkpoint.storage import Source
from shrinkpoint.store.file import Decoded, read_file
from shrinkpoint.store.folder import files, read_manifest, using, vouched


def decode(folder: str | Path, rank: int = 0, *, threads: int | None = None) -> Decoded:
    """One payload's content, its chain decoded from the keyframe on; at most two states are in memory at a time.

    Raises:
        NotFoundError: there is no manifest, or no payload of this rank.
        ChainError, FormatError, StorageError: as `folder.check`.
    """
    payloads = read_manifest(folder).payloads
    if not 0 <= rank < len(payloads):
        found, expected = f"no payload of rank {rank}", f"a rank below {len(payloads)}"
        raise NotFoundError(str(folder), found=found, expected=expected, do="name one of its ranks")
    decoded: Decoded | None = None
    for key, digest, size in files(payloads[rank]):
        reference = None if decoded is None else decoded.reference
        decoded = using(folder, key, partial(_read, digest=digest, size=size, reference=reference, threads=threads))
    assert decoded is not None
    return decoded


def _read(
    source: Source, where: str, *, digest: str, size: int, reference: Reference | None, threads: int | None
) -> Decoded:
    vouched(source, where, digest, size)
    return read_file(source, where, reference, threads=threads)
