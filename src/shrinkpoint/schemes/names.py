"""Schemes by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.lossless import Lossless

_SCHEMES: dict[str, Callable[[], Scheme]] = {Lossless.id: Lossless}


def named(scheme: str | Scheme) -> Scheme:
    """A scheme of this name, with its default settings; a scheme itself stays as it is.

    Raises:
        PolicyError: a name nobody knows.
    """
    if not isinstance(scheme, str):
        return scheme
    if scheme not in _SCHEMES:
        expected = " or ".join(map(repr, _SCHEMES))
        raise PolicyError("scheme", found=repr(scheme), expected=expected, do="name a known one")
    return _SCHEMES[scheme]()
