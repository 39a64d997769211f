"""Find a file of a chain, and make sure that it is the one. No torch: nothing is decoded here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shrinkpoint.container import Reader
from shrinkpoint.errors import ChainError, CorruptError, FormatError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.storage import Source, Storage
from shrinkpoint.store.listing import places
from shrinkpoint.store.manifest import Base, Manifest

T = TypeVar("T")


def resolve(storage: Storage, manifest: Manifest, base: Base, use: Callable[[Reader], T]) -> T:
    """Read the right file of a chain from the first place that holds it: one's own link, then the sibling's file.

    A place whose file is damaged is passed over, since the next may hold a copy that is not.

    Raises:
        ChainError, FormatError, StorageError: no place does; the error of the first that has a file, if any has.
    """
    error: ShrinkpointError | None = None
    for key in places(manifest, base):
        where = storage.describe(key)
        try:
            with storage.open(key) as source:
                return use(vouch(source, where, manifest, base))
        except NotFoundError:
            continue
        except (ChainError, FormatError, StorageError) as other:
            error = error or other
    raise error or _missing(storage, manifest, base)


def vouch(source: Source, where: str, manifest: Manifest, base: Base) -> Reader:
    """Check the header of a file of a chain, and that it is the file the manifest speaks of.

    Raises:
        ChainError: a base has another digest.
        CorruptError: so has the checkpoint's own payload.
        FormatError: the header is damaged, or the file too short.
    """
    reader = Reader(source, where)
    if reader.digest == base.digest:
        return reader
    found, expected = f"header digest {reader.digest}", base.digest
    if base.step == manifest.step:
        raise CorruptError(where, found=found, expected=f"{expected}, which its manifest records", do=_DO)
    expected += f", the base of step {manifest.step} from step {base.step}"
    raise ChainError(where, found=found, expected=expected, do=_DO)


_DO = "restore another checkpoint; `verify` says which are whole"


def _missing(storage: Storage, manifest: Manifest, base: Base) -> ShrinkpointError:
    where = ", ".join(storage.describe(key) for key in places(manifest, base))
    if base.step == manifest.step:
        return CorruptError(where, found="no such file", expected="the payload its manifest names", do=_DO)
    expected = f"the base of step {manifest.step}: the file of step {base.step} with header digest {base.digest}"
    return ChainError(where, found="no such file", expected=expected, do=_DO)
