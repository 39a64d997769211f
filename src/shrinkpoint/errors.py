"""The exceptions of this library, as one tree.

    ShrinkpointError
    ├── FormatError            the bytes of a file are wrong
    │   ├── CorruptError       they contradict themselves or a digest
    │   ├── TruncatedError     they end too early
    │   └── VersionError       a newer release wrote them
    ├── ChainError             a base is missing, or is not the one a delta was made against
    ├── NotFoundError          no such checkpoint, no such tensor (KeyError, FileNotFoundError)
    ├── StateError             a state holds something that cannot be stored (TypeError)
    ├── MismatchError          a checkpoint does not fit what it is restored into (ValueError, RuntimeError)
    ├── PolicyError            a request that cannot be met (ValueError)
    ├── StorageError           reading or writing failed (OSError)
    │   └── NoSpaceError       the place is full
    ├── LockedError            another process is saving here
    ├── MembershipError        replicas or ranks that work together are gone
    └── MissingExtraError      a package that an extra of this one installs is not there (ModuleNotFoundError)

Those in brackets are bases, too. The parts of a message are attributes, too: `where`, `found`, `expected` and `do`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

RESTORE_ADVICE = "restore another checkpoint, or fetch an intact copy of this file"
VERIFY_ADVICE = "restore another checkpoint; `shrinkpoint verify` lists all damage"
VERSION_ADVICE = "read it with the release that wrote it, or a newer one"
BASE_ADVICE = "pass the path of the base as base=, or load through its store"


class ShrinkpointError(Exception):
    """Root of the tree.

    Args:
        where: the file, key or path inside a state that is at fault.
        found: what was found there.
        expected: what was expected instead.
        do: what the user can do next.
    """

    def __init__(self, where: str, *, found: str, do: str, expected: str = "") -> None:
        self.where, self.found, self.expected, self.do = where, found, expected, do
        problem = f"{found}; expected {expected}" if expected else found
        self.message = f"{where}: {problem}. {do[:1].upper()}{do[1:]}"
        super().__init__(self.message)

    def __str__(self) -> str:  # KeyError would print the repr, OSError would look for an errno
        return self.message

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only arguments do not survive the default pickling
        return partial(type(self), self.where, found=self.found, expected=self.expected, do=self.do), ()


class FormatError(ShrinkpointError):
    """The bytes of a file are wrong."""


class CorruptError(FormatError):
    """Bytes contradict themselves or their digest."""


class TruncatedError(FormatError):
    """A file ends before what its header announces."""


class VersionError(FormatError):
    """A newer release wrote this, in a format that this one does not know."""


class ChainError(ShrinkpointError):
    """A delta's base is missing, or is not the one the delta was made against."""


class NotFoundError(ShrinkpointError, KeyError, FileNotFoundError):
    """No such checkpoint, file or tensor."""


class StateError(ShrinkpointError, TypeError):
    """A state holds something that cannot be stored; `where` is its path inside the state."""


class MismatchError(ShrinkpointError, ValueError, RuntimeError):
    """A checkpoint does not fit the object it is restored into. torch's `load_state_dict` raises a RuntimeError."""


class PolicyError(ShrinkpointError, ValueError):
    """A request that cannot be met."""


class StorageError(ShrinkpointError, OSError):
    """Reading or writing failed; the cause is chained."""


class NoSpaceError(StorageError):
    """No space is left for a checkpoint."""


class LockedError(ShrinkpointError):
    """Another process is saving to this store."""


class MembershipError(ShrinkpointError):
    """torchft formed no quorum of the replicas that train together, or a rank that publishes or follows has died."""


class MissingExtraError(ShrinkpointError, ModuleNotFoundError):
    """A package that this part needs is not installed; `do` is the command that installs it."""


def error_text(error: BaseException) -> str:
    """The type of an error of others, and the beginning of its text, for a message."""
    return f"{type(error).__name__}: {str(error)[:200]}"


class LossWarning(UserWarning):
    """A lossy checkpoint was written that may have lost too much."""


class UnmeasuredLossWarning(LossWarning):
    """A lossy checkpoint was written without measuring its effect on the loss; raised once in a run."""


class UserLine(NamedTuple):
    """A line of the program that uses this library, as `warnings.warn_explicit` takes it."""

    filename: str
    lineno: int
    module: str
    registry: dict[Any, Any]


_PASSED_MODULES = ("shrinkpoint.", "torch.", "contextlib")
"""Beginnings of the names of modules that no warning names: this library, and what decorates its functions."""
_WARNED_LINE: ContextVar[UserLine | None] = ContextVar("_WARNED_LINE", default=None)


@contextmanager
def warn_at(line: UserLine) -> Iterator[None]:
    """Make warnings name this line, in a thread that the user's program did not start."""
    token = _WARNED_LINE.set(line)
    try:
        yield
    finally:
        _WARNED_LINE.reset(token)


def find_user_line() -> UserLine:
    """The line that called into this library, however many of its frames lie between; or that of `warn_at`."""
    if (line := _WARNED_LINE.get()) is not None:
        return line
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED_MODULES):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return UserLine(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""), registry)


def warn_user(text: str, category: type[Warning] = LossWarning) -> None:
    """Warn at the line of the user's program that called into this library."""
    warnings.warn_explicit(text, category, *find_user_line())


EXTRAS = {
    "accelerate": ("accelerate",),
    "cli": ("typer", "rich"),
    "cloud": ("obstore",),
    "elastic": ("torchft", "opentelemetry"),
    "lightning": ("lightning", "torchmetrics"),
    "torchtitan": ("torchtitan", "spmd_types", "torchdata", "tyro"),
    "transformers": ("transformers", "accelerate"),
}
"""Packages that each extra installs and that may be missing without it."""


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error to raise for a failed import: with the command that helps if `extra` brings the package, else `error`.

    >>> missing_extra(ModuleNotFoundError("...", name="transformers.utils"), "transformers").do
    'run pip install "shrinkpoint[transformers]"'
    """
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtraError) or package not in EXTRAS[extra]:
        return error
    do = f'run pip install "shrinkpoint[{extra}]"'
    missing = MissingExtraError(package, found="not installed", expected=f"a package of the extra {extra!r}", do=do)
    missing.name = error.name
    return missing
