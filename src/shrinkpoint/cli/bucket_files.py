"""Files of a bucket for commands that need paths: copied to a temporary directory, or written there and uploaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.progress import track
from shrinkpoint.storage import LocalStorage, Storage, copy_object, is_object_url, resolve_storage
from shrinkpoint.storage.paths import ObjectUrl, parse_object_url
from shrinkpoint.store.file_place import find_object, place_file


@contextmanager
def local_copy(where: Path) -> Iterator[Path]:
    """The path itself; for a URL, a copy of the object, or of all objects below it, until the block ends.

    The copy lies in the temporary directory (`TMPDIR`), under the last part of the URL.

    Raises:
        NotFoundError: there is no such object, and none below it.
        StorageError: reading or writing failed.
    """
    if not is_object_url(where):
        yield where
        return
    url = parse_object_url(where)
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-") as directory:
        path = Path(directory, url.name or url.bucket)
        target, copied = LocalStorage(path.parent), False
        if (place := find_object(url)) is not None:
            _copy(place.storage, place.key, target, path.name)
            copied = True
        else:
            storage = resolve_storage(str(url))
            for key in track(storage.list(), "fetching"):
                _copy(storage, key, target, f"{path.name}/{key}")
                copied = True
        if not copied:
            raise NotFoundError(str(url), found="no such object, and none below it", do="check the URL")
        yield path


@contextmanager
def local_target(where: Path, *, force: bool) -> Iterator[Path]:
    """The path itself; for a URL, a path in a temporary directory: what the block writes there is uploaded at its end.

    Args:
        force: objects that are there may be replaced.

    Raises:
        PolicyError: there is something already; nothing has been written.
        StorageError: writing failed; a part of the objects may be there.
    """
    if not is_object_url(where):
        yield where
        return
    url = parse_object_url(where)
    if not force and has_objects(url):
        do = "add --force to replace it"
        raise PolicyError(str(url), found="a URL that exists", expected="a new name", do=do)
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-") as directory:
        path = Path(directory, url.name or url.bucket)
        yield path
        source = LocalStorage(path.parent)
        for key in track(source.list(), "uploading"):
            place = place_file(str(url / key.partition("/")[2] if "/" in key else url))
            _copy(source, key, place.storage, place.key)


def has_objects(url: ObjectUrl) -> bool:
    """True if there is an object of this name, or one below it."""
    return find_object(url) is not None or bool(resolve_storage(str(url)).list())


def shown_name(name: str, path: Path, where: Path) -> str:
    """The name of a file at or below a path of this module, as that of the path or the URL that it stands for."""
    return name.replace(str(path), show_place(where), 1) if is_object_url(where) else name


def show_place(where: Path) -> str:
    """A path or a URL in messages: pathlib has removed a slash of it."""
    return str(parse_object_url(where)) if is_object_url(where) else str(where)


def _copy(source: Storage, key: str, target: Storage, name: str) -> None:
    with source.open(key) as data:
        copy_object(data, target, name)
