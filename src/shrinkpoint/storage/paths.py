"""Checks of paths and of URLs of object storage that a caller gives, and opening of regular files.

Only regular files are opened: reading a pipe, a socket or a device would wait.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard
from urllib.parse import urlsplit

from shrinkpoint.errors import PolicyError

_FILE_TYPES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link to nothing",
    stat.S_IFREG: "a file",
}


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor; an `opener` for `open`. It never waits.

    Raises:
        OSError: there is no such file, or it is something else.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def is_regular(path: Path) -> bool:
    """True if a path is a regular file itself; a symbolic link to one is not."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def what_is_at(path: Path) -> str:
    """Kind of a path, for messages; symbolic links are followed."""
    for status in (path.stat, path.lstat):
        try:
            return _FILE_TYPES.get(stat.S_IFMT(status().st_mode), "no regular file")
        except OSError:
            continue
    return "no such file"


def through_link(path: Path) -> Path:
    """The file that is written where a path is a symbolic link, which stays; the path itself if it is none."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path  # noqa: PTH114 (no name is an error)


def keep_mode(old: Path, new: Path) -> None:
    """Let the same users read what is about to replace a file or a directory."""
    with suppress(OSError):  # there is none, or the file system has no modes
        new.chmod(old.stat().st_mode & 0o777)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[:/]")
"""The beginning of URLs, also after pathlib has removed one of the slashes, and of chained fsspec URLs; a drive has
one letter."""
_URL_SCHEMES = re.compile(
    r"(^|/)(abfss?|adl|az|cos|dbfs|file|ftp|gcs|gdrive|gs|hdfs|hf|https?|memory|oci|oss|s3[an]?|scp|sftp|smb|ssh|wasbs?"
    r"|webdav|webhdfs):/"
)
"""Names of URL schemes, which are not names of directories, also below others: paths may be joined to a URL."""
_DO = (
    "save to a local directory and copy it with `rclone`, or pass a URL that begins with s3://, gs:// or az:// to "
    "`CheckpointManager`, `Store`, `save`, `load`, `dcp.Writer`, Accelerate's `save_state` or Lightning's `ShrinkIO`"
)


class PathTypeError(PolicyError, TypeError):
    """An argument that is not a path."""


def is_url(value: object) -> bool:
    """True if a path is a URL, of which pathlib would make a directory called `s3:`.

    >>> [is_url(text) for text in ("s3://bucket/run", "s3:/bucket/run", "gs::x", "C:/run", "runs/a:b", "./http/x")]
    [True, True, True, False, False, False]
    """
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    return isinstance(text, str) and bool(_URL.match(text) or _URL_SCHEMES.search(text))


def hide_credentials(url: str) -> str:
    """A URL as messages may repeat it: without the user, the password, the query and the fragment that it may have.

    >>> hide_credentials("https://me:secret/1@host/run?X-Amz-Signature=2"), hide_credentials("runs/s3:/me:1@bucket")
    ('https://***@host/run?***', 'runs/s3:/***@bucket')
    """
    return re.sub(r"[?#].*", "?***", re.sub(r"(:/+).*@", r"\1***@", url, flags=re.DOTALL), flags=re.DOTALL)


def local_path(value: object, argument: str = "path", *, directory: bool = False) -> Path:
    """Return `value` as a path, if it is one in a file system of this machine.

    Args:
        argument: its name, for messages.
        directory: a file at this path is refused.

    Raises:
        PolicyError: a URL, which the message repeats without credentials; an empty string, or one that no name may be;
            a file instead of a directory; also a TypeError if it is not a path.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        do = "pass a string or a pathlib.Path"
        raise PathTypeError(argument, found=f"{value!r:.200}", expected="a path", do=do)
    if is_url(text):
        do = "leave `file://` out" if text.startswith("file:") else _DO
        expected = "a path on a file system of this machine"
        raise PolicyError(argument, found=f"the URL {hide_credentials(text)!r}", expected=expected, do=do)
    if not text or "\0" in text:
        raise PolicyError(argument, found=repr(text), expected="the name of a file or a directory", do="name one")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        expected, do = "a name that the file system can write", "leave out invalid characters"
        raise PolicyError(argument, found=f"{text!r:.200}", expected=expected, do=do) from error
    path = Path(text)
    if directory and os.path.lexists(path) and not path.is_dir():
        found = f"{text!r}, which is no directory"
        raise PolicyError(argument, found=found, expected="a directory", do="choose another name")
    return path


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key for sorting names with numbers in them: checkpoint-1000 comes after checkpoint-200.

    >>> sorted(["step-10", "step-9", "step-best"], key=natural_key)
    ['step-9', 'step-10', 'step-best']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


OBJECT_SCHEMES = ("s3", "gs", "az")
"""Schemes of the URLs of object storage: Amazon S3 and all that speaks its protocol, Google Cloud Storage, Azure."""
_OBJECT_URL = re.compile(rf"({'|'.join(OBJECT_SCHEMES)}):/{{1,2}}(.*)", re.DOTALL)


@dataclass(frozen=True)
class ObjectUrl:
    """A place in a bucket.

    Attributes:
        scheme: one of `OBJECT_SCHEMES`.
        bucket: its name; of a container on Azure.
        prefix: how all keys below begin, without a "/" at either end; "" for the whole bucket.
    """

    scheme: str
    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def __truediv__(self, name: str) -> ObjectUrl:
        """A place below this one, as of a path."""
        return ObjectUrl(self.scheme, self.bucket, f"{self.prefix}/{name}".strip("/"))

    def relative_to(self, other: ObjectUrl) -> str:
        """The path of this place below another one; "" if it is that one."""
        return self.prefix[len(other.prefix) :].strip("/")

    @property
    def name(self) -> str:
        """The last part of the path; "" of a whole bucket."""
        return self.prefix.rpartition("/")[2]

    @property
    def parent(self) -> ObjectUrl:
        """The place that holds this one, as of a path; the whole bucket is its own parent."""
        return ObjectUrl(self.scheme, self.bucket, self.prefix.rpartition("/")[0])


def is_object_url(value: object) -> TypeGuard[str | Path]:
    """True if a path is a URL of object storage; also after pathlib has removed one of its slashes.

    >>> [is_object_url(text) for text in ("s3://bucket/run", "s3:/bucket", "gs://b", "hdfs://b", "runs/s3")]
    [True, True, True, False, False]
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(text, str) and bool(_OBJECT_URL.match(text))


def parse_object_url(value: str | os.PathLike[str], argument: str = "url") -> ObjectUrl:
    """The place that a URL names.

    >>> str(parse_object_url("s3:/bucket/run/"))
    's3://bucket/run'

    Raises:
        PolicyError: it is no URL of object storage, names no bucket, or says more than a bucket and a path. The message
            does not repeat a URL that may hold credentials.
    """
    match, found = _OBJECT_URL.fullmatch(os.fspath(value)), f"{hide_credentials(os.fspath(value))!r:.200}"
    if match is None:
        expected = "one of " + ", ".join(f"{scheme}://bucket/path" for scheme in OBJECT_SCHEMES)
        raise PolicyError(argument, found=found, expected=expected, do="pass such a URL")
    expected = f"{match[1]}://bucket/path, and nothing else"
    parts = urlsplit(f"{match[1]}://{match[2]}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        do = "give credentials in the environment variables of the service, such as AWS_ACCESS_KEY_ID"
        raise PolicyError(argument, found="a URL with a user, a query or a fragment", expected=expected, do=do)
    prefix = parts.path.strip("/")
    if not parts.netloc or "\0" in prefix or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise PolicyError(argument, found=found, expected=expected, do="name a bucket and a path")
    return ObjectUrl(match[1], parts.netloc, prefix)
