"""Limits on the memory that a file may ask for, checked before anything is allocated.

A few bytes can decode to many: zeros, copies, values that have not changed. Files of real states are far below these
limits; a state of nothing but constants may exceed them, and the error names the argument that raises the limit.
"""

from __future__ import annotations

import os

from shrinkpoint.errors import CorruptError, PolicyError

MIN_LIMIT = 1 << 30
"""Bytes of tensors that any file may hold, however small it is."""
MAX_EXPANSION = 1000
"""Bytes of tensors that each stored byte of a chain may decode to, beyond that."""
ENV_VARIABLE = "SHRINKPOINT_MAX_BYTES"
"""The environment variable that is used where a caller gives no limit, for frameworks and the command line."""

_DO = "if you trust it, pass max_bytes=, or set " + ENV_VARIABLE


class Allowance:
    """Limits what the files of one chain may allocate, keyframe first.

    Args:
        max_bytes: limit on the bytes of tensors in any one file, copies in its tree included; None: the value of the
            environment variable `SHRINKPOINT_MAX_BYTES`, else 1 GiB, or 1000 times the bytes of the files so far if
            that is more.

    Attributes:
        max_copy_bytes: bytes of the limit that the last file's tensors leave for copies in its tree.

    Raises:
        PolicyError: the limit is not a whole number above 0.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._limit = _resolve_limit(max_bytes)
        self._stored = 0
        self.max_copy_bytes = self._limit or MIN_LIMIT

    def admit(self, where: str, stored: int, raw: int) -> None:
        """Count a file that is about to be decoded.

        Args:
            where: its name in messages.
            stored: its size in bytes.
            raw: bytes of the tensors that its header announces.

        Raises:
            CorruptError: the tensors exceed the limit.
        """
        self._stored += stored
        limit = self._limit or max(MIN_LIMIT, MAX_EXPANSION * self._stored)
        if raw > limit:
            raise CorruptError(
                where,
                found=f"{raw} bytes of tensors in a chain of {self._stored} bytes",
                expected=f"at most {limit}",
                do=_DO,
            )
        self.max_copy_bytes = limit - raw


def _resolve_limit(max_bytes: int | None) -> int | None:
    if max_bytes is None:
        text = os.environ.get(ENV_VARIABLE, "")
        if not text:
            return None
        if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 20 or not int(text):
            raise PolicyError(
                ENV_VARIABLE, found=repr(text[:40]), expected="a whole number of bytes", do="mend or unset it"
            )
        return int(text)
    if type(max_bytes) is not int or max_bytes < 1:
        raise PolicyError(
            "max_bytes",
            found=repr(max_bytes)[:40],
            expected="a whole number of bytes, or None",
            do="say how much memory the tensors of one file may take",
        )
    return max_bytes
