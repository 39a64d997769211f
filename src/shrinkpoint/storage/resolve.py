"""The storage that a path or a URL names."""

from __future__ import annotations

import os
from typing import TypeGuard

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage.base import Storage, check_key
from shrinkpoint.storage.local import LocalStorage
from shrinkpoint.storage.object_url import ObjectUrl, is_object_url, parse_object_url
from shrinkpoint.storage.paths import local_path


def resolve_storage(where: str | os.PathLike[str] | Storage, argument: str = "path") -> Storage:
    """The storage of a directory or a URL, which need not exist yet; a storage is returned as it is.

    Args:
        argument: its name, for messages.

    Raises:
        PolicyError: a file instead of a directory, or a URL that is not one of object storage.
        MissingExtraError: a URL, and what reaches it is not installed.
    """
    if _is_storage(where):
        return where
    if is_object_url(where):
        from shrinkpoint.storage.object_storage import ObjectStorage

        return ObjectStorage(where)
    return LocalStorage(local_path(where, argument, directory=True))


def split_object_url(url: str | os.PathLike[str], argument: str = "path") -> tuple[Storage, str]:
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
    return ObjectStorage(str(ObjectUrl(place.scheme, place.bucket))), check_key(place.prefix)


def _is_storage(where: object) -> TypeGuard[Storage]:
    return not isinstance(where, str | os.PathLike) and hasattr(where, "remove_stale")
