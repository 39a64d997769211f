"""URLs of object storage: S3 and what speaks its protocol, Google Cloud, Azure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard
from urllib.parse import urlsplit

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage.paths import hide_credentials

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
        raise PolicyError(argument, found=found, expected=expected, do="write such a URL")
    expected = f"{match[1]}://bucket/path, and nothing else"
    parts = urlsplit(f"{match[1]}://{match[2]}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        do = "give credentials in the environment variables of the service, such as AWS_ACCESS_KEY_ID"
        raise PolicyError(argument, found="a URL with a user, a query or a fragment", expected=expected, do=do)
    prefix = parts.path.strip("/")
    if not parts.netloc or "\0" in prefix or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise PolicyError(argument, found=found, expected=expected, do="name a bucket and a path")
    return ObjectUrl(match[1], parts.netloc, prefix)
