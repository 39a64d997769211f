"""Schemes by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.cnr import CNR
from shrinkpoint.schemes.excp import ExCP
from shrinkpoint.schemes.fisher import Fisher
from shrinkpoint.schemes.gobo import GOBO
from shrinkpoint.schemes.inshrinkerator import Inshrinkerator
from shrinkpoint.schemes.lc_checkpoint import LCCheckpoint
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.partial import SCAR, TOPN
from shrinkpoint.schemes.qd import QD

_SCHEMES: dict[str, Callable[..., Scheme]] = {
    Lossless.id: Lossless, Inshrinkerator.id: Inshrinkerator, QD.id: QD, CNR.id: CNR, GOBO.id: GOBO,
    Fisher.id: Fisher, LCCheckpoint.id: LCCheckpoint, SCAR.id: SCAR, TOPN.id: TOPN, ExCP.id: ExCP,
}  # fmt: skip
"""A scheme that has a bound for what it loses raises, by its name alone, what it needs; the others take their authors'
settings."""


def named(scheme: str | Scheme) -> Scheme:
    """A scheme of this name, with its default settings; a scheme itself stays as it is.

    Raises:
        PolicyError: a name nobody knows.
    """
    return kind(scheme)() if isinstance(scheme, str) else scheme


def kind(name: str) -> Callable[..., Scheme]:
    """What makes schemes of this name.

    Raises:
        PolicyError: a name nobody knows.
    """
    if name not in _SCHEMES:
        expected = " or ".join(map(repr, _SCHEMES))
        raise PolicyError("scheme", found=repr(name), expected=expected, do="name a known one")
    return _SCHEMES[name]
