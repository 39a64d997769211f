"""Decode a checkpoint that lies in a folder of a framework's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from shrinkpoint.container import Reader
from shrinkpoint.errors import NotFoundError
from shrinkpoint.storage import Source
from shrinkpoint.store.allowance import Allowance
from shrinkpoint.store.file import Decoded, decode_records
from shrinkpoint.store.folder import files, read_manifest, using, vouched


def decode(folder: str | Path, rank: int = 0, *, threads: int | None = None, max_bytes: int | None = None) -> Decoded:
    """One payload's content, its chain decoded from the keyframe on; at most two states are in memory at a time.

    Args:
        max_bytes: as of `Allowance`.

    Raises:
        NotFoundError: there is no manifest, or no payload of this rank.
        ChainError, FormatError, StorageError: as `folder.check`.
    """
    payloads = read_manifest(folder).payloads
    if not 0 <= rank < len(payloads):
        found, expected = f"no payload of rank {rank}", f"a rank below {len(payloads)}"
        raise NotFoundError(str(folder), found=found, expected=expected, do="name one of its ranks")
    decoded: Decoded | None = None
    allowance = Allowance(max_bytes)
    for key, digest, size in files(payloads[rank]):
        reference = None if decoded is None else decoded.reference
        read = partial(decode_records, reference=reference, threads=threads, allowance=allowance)
        decoded = using(folder, key, partial(_read, digest=digest, size=size, read=read))
    assert decoded is not None
    return decoded


def _read(source: Source, where: str, *, digest: str, size: int, read: Callable[[Reader], Decoded]) -> Decoded:
    return read(vouched(source, where, digest, size))
