"""Place of a single file, in a directory or in a bucket, and candidates for the files that it names."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import (
    LocalStorage,
    ObjectCache,
    ObjectUrl,
    Source,
    Storage,
    is_object_url,
    is_url,
    local_path,
    split_object_url,
    through_link,
)


@dataclass(frozen=True)
class FilePlace:
    """A file that exists or not."""

    storage: Storage  # of its directory; of its bucket
    key: str  # its name there
    path: Path | None = None  # where it lies on this machine; None in a bucket

    def __str__(self) -> str:
        return self.storage.describe(self.key)

    @property
    def exists(self) -> bool:
        """True if there is such a file or object; raises StorageError if the bucket cannot be asked."""
        if self.path is None:
            return getattr(self.storage, "version")(self.key) is not None  # noqa: B009
        with suppress(OSError):  # a name too long for this file system, a directory that may not be entered
            return self.path.is_file()
        return False

    def open(self) -> Source:
        return self.storage.open(self.key)

    def is_same(self, other: FilePlace) -> bool:
        """True if both are one file."""
        if self.path is None or other.path is None:
            return str(self) == str(other)
        with suppress(OSError):
            return self.path.samefile(other.path)
        return False

    def name_for(self, child: FilePlace) -> str:
        """The name by which a file that is written can refer to this one: relative, if both can be moved together."""
        if self.path is not None and child.path is not None:
            return self.path.name if self.path.parent == child.path.parent else str(self.path)
        if self.path is None and child.path is None and self._bucket == child._bucket:
            return posixpath.relpath(self.key, posixpath.dirname(child.key))
        return str(self)

    def candidates(self, name: str) -> Sequence[FilePlace]:
        """Candidates for a file that this one names relative to the directory in which it was written.

        Of a file in a bucket: in this bucket. Of another one: on this machine.
        """
        if is_url(name):
            return []
        directories = [posixpath.dirname(self.key)]
        if self.path is not None:
            directories = [os.fspath(path.parent) for path in (self.path, through_link(self.path))]
        # Of the file, or `bases` of a later step with a link to it.
        names = (
            os.path.join(head, tail)  # noqa: PTH118
            for directory in directories
            for head, tail in ((directory, name), (directory, Path(name).name), (os.path.dirname(directory), name))  # noqa: PTH120
        )
        places = []
        for path in dict.fromkeys(names):
            if self.path is not None and _can_be_file(Path(path)):
                places.append(place_file(Path(path)))
            elif self.path is None and not posixpath.isabs(name):
                places.append(FilePlace(self.storage, posixpath.normpath(path)))
        return [place for place in places if str(place) != str(self)]

    @property
    def _bucket(self) -> str:
        return self.storage.describe()


AnyPlace: TypeAlias = str | Path | FilePlace


def _can_be_file(path: Path) -> bool:
    """True if a path ends with a name; "/" and "a/.." do not."""
    return path.name not in ("", "..")


def find_object(url: ObjectUrl) -> FilePlace | None:
    """The object that a URL names; None if there is none.

    Raises:
        StorageError: the service cannot be asked.
    """
    place = place_file(str(url)) if url.prefix else None
    return place if place is not None and place.exists else None


def place_file(where: AnyPlace, argument: str = "path", *, cache: str | Path | ObjectCache | None = None) -> FilePlace:
    """The place that a path or a URL of object storage names.

    Raises:
        PolicyError: neither a path of this machine nor such a URL, or one that can only be a directory.
        MissingExtraError: a URL, and what reaches it is not installed.
    """
    if isinstance(where, FilePlace):
        return where
    if is_object_url(where):
        storage, key = split_object_url(where, argument, cache=cache)
        return FilePlace(storage, key)
    path = local_path(where, argument).absolute()
    if not _can_be_file(path):
        raise PolicyError(str(where), found="a directory", expected="the name of a file", do="name a file in it")
    return FilePlace(LocalStorage(path.parent), path.name, path)
