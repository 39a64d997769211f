"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout and nothing else.")]
StepOption = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help="Which checkpoint of a store; the newest if not given.")
]
ThresholdOption = Annotated[
    str,
    typer.Option(
        "--threshold", metavar="SHARE", help="How much worse a checkpoint may be, for schemes that measure: 1%, or .01."
    ),
]
HigherIsBetterOption = Annotated[
    bool, typer.Option("--higher-is-better", help="--evaluate returns a score, not a loss.")
]


def parse_share(text: str) -> float:
    """Reads what `--threshold` says: "1%" and ".01" alike.

    Raises:
        PolicyError: the text is no share.
    """
    try:
        value: float | str = float(text)
    except ValueError:
        value = text
    return validate.check_fraction("--threshold", value, allow_zero=True)


def import_function(text: str) -> Callable[[Any], Any]:
    """Imports the function that `module:function` names; modules of the current directory are found too.

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
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise PolicyError("evaluate", found=message, expected=f"{text} to be there", do=do) from error
    if not callable(function):
        raise PolicyError("evaluate", found=f"a {type(function).__name__}", expected="a function of a state", do=do)
    return function  # type: ignore[no-any-return]
