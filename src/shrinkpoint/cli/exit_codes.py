"""The exit codes of the commands."""

from __future__ import annotations

from enum import IntEnum

from shrinkpoint import errors


class ExitCode(IntEnum):
    """Exit codes for scripts; docs/cli.md explains each."""

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


_CODE_OF_ERROR: tuple[tuple[type[Exception], ExitCode], ...] = (
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.FormatError, ExitCode.CORRUPT),
    (errors.ChainError, ExitCode.CORRUPT),
    (errors.LockedError, ExitCode.LOCKED),
    (errors.StorageError, ExitCode.STORAGE),
    (errors.PolicyError, ExitCode.USAGE),
    (errors.ShrinkpointError, ExitCode.OTHER),
    (OSError, ExitCode.STORAGE),
)


def exit_code_of(error: errors.ShrinkpointError | OSError) -> ExitCode:
    """The exit code for an error: that of the first class it is an instance of, special classes first.

    >>> exit_code_of(errors.NoSpaceError("run", found="a full disk")).name
    'STORAGE'
    """
    return next(code for kind, code in _CODE_OF_ERROR if isinstance(error, kind))
