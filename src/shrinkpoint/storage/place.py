"""A user's path as one of a file system of this machine; what is somewhere else is refused before anything happens."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shrinkpoint.errors import PolicyError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[:/]")
"""How URLs begin, also once pathlib has taken one of the slashes, and chains of fsspec; a drive has one letter."""
_SCHEMES = re.compile(
    r"(^|/)(abfss?|adl|az|cos|dbfs|file|ftp|gcs|gdrive|gs|hdfs|hf|https?|memory|oci|oss|s3[an]?|scp|sftp|smb|ssh|wasbs?"
    r"|webdav|webhdfs):/"
)
"""What no directory is called that somebody means, also below others: what was joined to a URL is one."""
_DO = (
    "save to a local or mounted directory, and copy what is to be kept elsewhere from there, such as with "
    "`aws s3 sync` or `rclone`"
)


class PathTypeError(PolicyError, TypeError):
    """What is no path at all."""


def is_url(given: object) -> bool:
    """Whether a path names something on another machine, or in memory: in that case pathlib would make a directory
    that is called `s3:`.

    >>> [is_url(text) for text in ("s3://bucket/run", "s3:/bucket/run", "gs::x", "C:/run", "runs/a:b", "./http/x")]
    [True, True, True, False, False, False]
    """
    if not isinstance(given, str | os.PathLike):
        return False
    text = os.fspath(given)
    return isinstance(text, str) and bool(_URL.match(text) or _SCHEMES.search(text))


def local_path(given: object, what: str = "path", *, directory: bool = False) -> Path:
    """A path as it was given, once it is known to be one of a file system of this machine.

    Args:
        what: the argument, for messages.
        directory: what stands there must be a directory, or nothing.

    Raises:
        PolicyError: a URL, an empty string, a file where a directory should be; also a TypeError where it is no path.
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        do = "pass a string or a pathlib.Path"
        raise PathTypeError(what, found=f"{given!r:.200}", expected="a path", do=do)
    if is_url(text):
        do = "leave `file://` away" if text.startswith("file:") else _DO
        raise PolicyError(what, found=f"the URL {text!r}", expected="a path on a file system of this machine", do=do)
    if not text or "\0" in text:
        raise PolicyError(what, found=repr(text), expected="the name of a file or a directory", do="name one")
    path = Path(text)
    if directory and os.path.lexists(path) and not path.is_dir():
        raise PolicyError(what, found=f"{text!r}, which is no directory", expected="a directory", do="name another one")
    return path
