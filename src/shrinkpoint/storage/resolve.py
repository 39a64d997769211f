"""The storage that a path or a URL names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias, TypeGuard

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage.base import Storage, check_key
from shrinkpoint.storage.local import LocalStorage
from shrinkpoint.storage.object_cache import ObjectCache
from shrinkpoint.storage.paths import ObjectUrl, is_object_url, local_path, parse_object_url

AnyDirectory: TypeAlias = str | os.PathLike[str] | ObjectUrl  # A directory of this machine, or a place in a bucket


def resolve_directory(where: AnyDirectory, argument: str = "directory") -> Path | ObjectUrl:
    """The absolute path of a directory, or the place that a URL names.

    Raises:
        PolicyError: neither a path of this machine nor a URL of object storage.
    """
    if isinstance(where, ObjectUrl):
        return where
    return parse_object_url(where, argument) if is_object_url(where) else local_path(where, argument).absolute()


def directory_storage(where: AnyDirectory) -> Storage:
    """The storage of a directory, or of a place in a bucket; a path that is a file is not refused.

    Raises:
        PolicyError: neither a path of this machine nor a URL of object storage.
        MissingExtraError: a URL, and obstore is not installed.
    """
    if isinstance(where, ObjectUrl) or is_object_url(where):
        return resolve_storage(str(where), "directory")
    return LocalStorage(local_path(where, "directory"))


def resolve_storage(
    where: str | os.PathLike[str] | Storage, argument: str = "path", *, cache: str | Path | ObjectCache | None = None
) -> Storage:
    """The storage of a directory or a URL, which need not exist yet; a storage is returned as it is.

    Args:
        argument: its name, for messages.
        cache: of a URL: a directory on this machine for what is read and written, or an `ObjectCache`; None: that of
            the environment variable `SHRINKPOINT_CACHE`, if it is set.

    Raises:
        PolicyError: a file instead of a directory, or a URL that is not one of object storage; a cache of a storage.
        MissingExtraError: a URL, and what reaches it is not installed.
    """
    if _is_storage(where):
        if cache is not None:
            found, do = "a cache beside a storage object", "pass it to the storage: ObjectStorage(url, cache=...)"
            raise PolicyError("cache", found=found, expected="a URL with cache=", do=do)
        return where
    if is_object_url(where):
        from shrinkpoint.storage.object_storage import ObjectStorage

        return ObjectStorage(where, cache=cache)
    return LocalStorage(local_path(where, argument, directory=True))


def split_object_url(
    url: str | os.PathLike[str], argument: str = "path", *, cache: str | Path | ObjectCache | None = None
) -> tuple[Storage, str]:
    """The storage of the bucket that a URL names, and the key of the object in it.

    Raises:
        PolicyError: no such URL, or one that names no object.
        MissingExtraError: obstore is not installed.
    """
    from shrinkpoint.storage.object_storage import ObjectStorage

    place = parse_object_url(url, argument)
    if not place.prefix:
        expected, do = f"{place}/name", "name the object"
        raise PolicyError(argument, found=f"the bucket {str(place)!r}", expected=expected, do=do)
    return ObjectStorage(str(ObjectUrl(place.scheme, place.bucket)), cache=cache), check_key(place.prefix)


def _is_storage(where: object) -> TypeGuard[Storage]:
    return not isinstance(where, str | os.PathLike) and hasattr(where, "remove_stale")
