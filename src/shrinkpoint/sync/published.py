"""The list of what is published in one place: the newest version, and the files that decode to it. No torch.

A version exists when `published.json` names it: its files are written before. Each file is whole (a keyframe) or a
delta against the version before, and a version may have both: who follows takes the delta, who joins the keyframe.
Ranks that publish together write a part each in place of a file.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shrinkpoint.container.strict_json import expect_type
from shrinkpoint.errors import VERSION_ADVICE, CorruptError, TruncatedError, VersionError
from shrinkpoint.guard import read_guard
from shrinkpoint.storage import Storage
from shrinkpoint.store.manifest import dump_with_digest, load_with_digest
from shrinkpoint.tensors.info import JSON

KEY = "published.json"
FORMAT = 1
_TOKEN_FORMAT = 2
"""The format of a list in which a file has a token: a reader of format 1 would look for other names."""
_PARTS_FORMAT = 3
"""The format of a list in which a file is a set of parts."""
_TOKEN = re.compile("[0-9a-f]{16}")
MAX_VERSION = 10**12
"""Versions are below this number: names of files have twelve digits."""
MAX_BYTES = 1 << 24
"""A reader refuses a larger `published.json`."""
_PREFIX = "version-"
_DO = "publish again, or publish in another place"


class StoredPart(NamedTuple):
    """One object in the storage."""

    size: int  # In bytes
    digest: str  # Of its header, which authenticates every other byte
    token: str = ""  # Random hex in its name, in a bucket; "" elsewhere


@dataclass(frozen=True, order=True)
class VersionFile:
    """A keyframe or a delta of a version: one file, or a part of each rank that published it.

    Attributes:
        version: that it decodes to.
        base: the version that it is a delta against; -1 for a keyframe.
        size, digest, token: of the file; of parts, their size together, "" and "".
        parts: by rank; () for one file.
    """

    version: int
    base: int
    size: int
    digest: str
    token: str = ""
    parts: tuple[StoredPart, ...] = ()

    @classmethod
    def from_parts(cls, version: int, base: int, parts: Sequence[StoredPart]) -> VersionFile:
        return cls(version, base, sum(part.size for part in parts), "", parts=tuple(parts))

    @property
    def stored(self) -> tuple[tuple[str, StoredPart], ...]:
        """Every object with its key in the storage."""
        if not self.parts:
            return ((file_key(self.version, self.base, self.token), StoredPart(self.size, self.digest, self.token)),)
        keys = (file_key(self.version, self.base, part.token, rank) for rank, part in enumerate(self.parts))
        return tuple(zip(keys, self.parts, strict=True))

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.stored)

    @property
    def is_keyframe(self) -> bool:
        return self.base < 0


def file_key(version: int, base: int = -1, token: str = "", rank: int | None = None) -> str:
    """The key of a version's keyframe, or of its delta against `base`; with a rank, of that rank's part."""
    suffix = ("" if base < 0 else f"-from-{base:012d}") + ("" if rank is None else f"-part-{rank:05d}")
    return f"{_PREFIX}{version:012d}{suffix}{'-' if token else ''}{token}.safetensors"


def new_token(storage: Storage) -> str:
    """The token of a file that is written: no publisher that stood still has one of this name on the way."""
    return secrets.token_hex(8) if getattr(storage, "lock_expires", False) else ""


def is_own_key(key: str) -> bool:
    """True if a file of the place is one of ours."""
    return key.startswith(_PREFIX) and key.endswith(".safetensors")


@dataclass(frozen=True)
class Published:
    """The content of `published.json`.

    Attributes:
        id: random hex of this series of versions.
        version: the newest.
        files: of which versions are decoded, by rising version, a keyframe behind the delta to it.
    """

    id: str
    version: int
    files: tuple[VersionFile, ...]

    def to_bytes(self) -> bytes:
        files = []
        for file in self.files:
            if file.parts:
                content: list[JSON] = [[_part_to_json(part) for part in file.parts]]
            else:
                content = _part_to_json(StoredPart(file.size, file.digest, file.token))
            files.append([file.version, file.base, *content])
        number = _TOKEN_FORMAT if any(file.token for file in self.files) else FORMAT
        number = _PARTS_FORMAT if any(file.parts for file in self.files) else number
        return dump_with_digest({"format": number, "id": self.id, "version": self.version, "files": files})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Published:
        """Parse and verify.

        Raises:
            CorruptError: the bytes are at fault; VersionError: a newer release wrote them.
        """
        try:
            document = load_with_digest(data, where)
        except (CorruptError, TruncatedError) as error:
            raise type(error)(where, found=error.found, expected=error.expected, do=_DO) from error
        if document.get("format") not in (FORMAT, _TOKEN_FORMAT, _PARTS_FORMAT):
            found, expected = f"format {document.get('format')!a:.20}", f"{FORMAT} to {_PARTS_FORMAT}"
            raise VersionError(where, found=found, expected=expected, do=VERSION_ADVICE)
        with read_guard(where):
            files = tuple(_file_from_json(row, where) for row in expect_type(document["files"], list, where, "files"))
            published = cls(expect_type(document["id"], str, where, "an id"), _count(document["version"], where), files)
            if published.version >= MAX_VERSION or not any(file.version == published.version for file in files):
                raise ValueError("no file of the newest version")
            if any(file.version > published.version or file.base >= file.version for file in files):
                raise ValueError("versions that do not rise")
            if len({(file.version, file.base) for file in files}) < len(files):
                raise ValueError("a file that is named twice")
            _check_parts(files)
        return published

    def routes(self, held: int | None) -> Iterator[tuple[VersionFile, ...]]:
        """The routes to the newest version, the one with the fewest bytes first; each a sequence of files to decode.

        Args:
            held: the version that deltas may begin with; None: none.
        """
        keyframes = {file.version: file for file in self.files if file.is_keyframe}
        deltas_by_version = {file.version: file for file in self.files if not file.is_keyframe}
        # The deltas back from the newest version, and the routes over the first ones of them. A route keeps only how
        # many deltas it has: lists of them would have as many files as the square of those that are named here.
        deltas, found = list[VersionFile](), list[_Route]()
        version, nbytes = self.version, 0
        while True:
            if version == held:
                found.append(_Route(nbytes, len(deltas)))
                break
            if version in keyframes:
                keyframe = keyframes[version]
                found.append(_Route(nbytes + keyframe.size, len(deltas), (keyframe,)))
            if version not in deltas_by_version:
                break
            deltas.append(deltas_by_version[version])
            version, nbytes = deltas[-1].base, nbytes + deltas[-1].size
        for route in sorted(found, key=lambda route: (route.nbytes, route.num_deltas + len(route.keyframe))):
            yield (*route.keyframe, *reversed(deltas[: route.num_deltas]))

    def deltas_behind_keyframe(self) -> tuple[VersionFile, ...]:
        """The deltas that a process which joins now decodes after the newest keyframe."""
        newest = max((file.version for file in self.files if file.is_keyframe), default=-1)
        return tuple(file for file in self.files if file.version > newest)

    def without_old(self, keep: int) -> Published:
        """This without what nobody needs: keyframes but the newest, and deltas older than `keep` versions and it."""
        newest = max((file.version for file in self.files if file.is_keyframe), default=-1)
        versions = sorted({file.version for file in self.files})
        oldest = min(versions[-keep:][0], newest + 1)
        files = [
            file for file in self.files if (file.version == newest if file.is_keyframe else file.version >= oldest)
        ]
        return replace(self, files=tuple(files))


class _Route(NamedTuple):
    """A route to the newest version."""

    nbytes: int  # Of all its files
    num_deltas: int  # So many of the newest deltas
    keyframe: tuple[VersionFile, ...] = ()  # That they begin with; none where they begin with the version that is held


def _check_parts(files: Sequence[VersionFile]) -> None:
    """Raise ValueError unless the files of a version, and their bases, have as many parts."""
    counts: dict[int, int] = {}
    for file in files:
        if counts.setdefault(file.version, len(file.parts)) != len(file.parts):
            raise ValueError("files of one version in different parts")
    if any(counts.get(file.base, len(file.parts)) != len(file.parts) for file in files):
        raise ValueError("a delta in other parts than its base")


def _part_to_json(part: StoredPart) -> list[JSON]:
    return [part.size, part.digest, *([part.token] if part.token else [])]


def _file_from_json(row: JSON, where: str) -> VersionFile:
    version, base, *content = expect_type(row, list, where, "a file")
    if type(base) is not int or base < -1:
        raise ValueError(f"a base {base!a:.20}")
    version = _count(version, where)
    if len(content) == 1:
        rows = expect_type(content[0], list, where, "the parts")
        if not rows:
            raise ValueError("no parts")
        return VersionFile.from_parts(version, base, [_part_from_json(part, where) for part in rows])
    return VersionFile(version, base, *_part_from_json(content, where))


def _part_from_json(row: JSON, where: str) -> StoredPart:
    size, digest, *tokens = expect_type(row, list, where, "a part")
    if not (type(digest) is str and len(digest) == 32 and set(digest) <= set("0123456789abcdef")):
        raise ValueError(f"a digest {digest!a:.40}")
    if len(tokens) > 1 or not all(type(token) is str and _TOKEN.fullmatch(token) for token in tokens):
        raise ValueError(f"tokens {tokens!a:.40}")
    return StoredPart(_count(size, where), digest, *tokens)


def _count(value: JSON, where: str) -> int:
    number = expect_type(value, int, where, "a count")
    if not 0 <= number < 1 << 63:
        raise ValueError(f"a count of {number}"[:60])
    return number
