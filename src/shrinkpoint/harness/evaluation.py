"""A quality by its name on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from shrinkpoint.errors import PolicyError


def named(text: str) -> Callable[[Any], Any]:
    """The function that `module:function` says; modules of the current directory are found too.

    Raises:
        PolicyError: there is no such module or function.
    """
    module, colon, name = text.partition(":")
    do = "write module:function, for example quality:evaluate for evaluate() in quality.py"
    if not (module and colon and name):
        raise PolicyError("evaluate", found=repr(text), expected="module:function", do=do)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise PolicyError("evaluate", found=said, expected=f"{text} to be there", do=do) from error
    if not callable(found):
        raise PolicyError("evaluate", found=f"a {type(found).__name__}", expected="a function of a state", do=do)
    return found  # type: ignore[no-any-return]
