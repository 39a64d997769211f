"""What the exit code of a command says."""

from __future__ import annotations

from enum import IntEnum

from shrinkpoint import errors


class Code(IntEnum):
    """Exit codes, for scripts; docs/cli.md explains each."""

    FINE = 0
    FINDINGS = 1
    USAGE = 2
    NOT_FOUND = 3
    CORRUPT = 4
    LOCKED = 5
    STORAGE = 6
    OTHER = 7
    INTERRUPTED = 130
    BROKEN_PIPE = 141


_CODES: tuple[tuple[type[Exception], Code], ...] = (
    (errors.NotFoundError, Code.NOT_FOUND),
    (errors.FormatError, Code.CORRUPT),
    (errors.ChainError, Code.CORRUPT),
    (errors.LockedError, Code.LOCKED),
    (errors.StorageError, Code.STORAGE),
    (errors.PolicyError, Code.USAGE),
    (errors.ShrinkpointError, Code.OTHER),
    (OSError, Code.STORAGE),
)


def code_of(error: errors.ShrinkpointError | OSError) -> Code:
    """The exit code for an error: that of the nearest class of the tree.

    >>> code_of(errors.NoSpaceError("run", found="no room")).name
    'STORAGE'
    """
    return next(code for kind, code in _CODES if isinstance(error, kind))
