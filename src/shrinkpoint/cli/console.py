"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from shrinkpoint.cli.exits import Code
from shrinkpoint.cli.words import printable

_UNBOUNDED = 100_000


class Out(Console):
    """Rich's console, except that a reader who left (`| head`) ends the command with the code of SIGPIPE."""

    def on_broken_pipe(self) -> NoReturn:
        close_pipe()
        raise typer.Exit(Code.BROKEN_PIPE)


def close_pipe() -> None:
    """Point stdout at nothing, so that flushing it at exit does not complain a second time."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def out() -> Out:
    """Stdout. Lines for a program (no terminal, no COLUMNS) are never cut to a width."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Out(width=None if bounded else _UNBOUNDED, highlight=False, soft_wrap=False)


def say(line: str, style: str = "") -> None:
    """One line to stdout, never folded, so that a path can be copied; never markup, so that brackets stay brackets."""
    out().print(Text(printable(line), style=style), soft_wrap=True)


def note(line: str, kind: str = "note", style: str = "yellow") -> None:
    """One line to stderr, whatever the width: a log keeps it whole."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{kind}: ", style), printable(line)), soft_wrap=True)


def emit(document: Any) -> None:
    """`document` as JSON to stdout, and nothing else; floats that JSON cannot say become "nan", "inf", "-inf"."""
    sys.stdout.write(json.dumps(_plain(document), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@contextlib.contextmanager
def waiting(title: str) -> Iterator[None]:
    """A spinner on stderr while something takes long, and nothing where stderr is not a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(printable(title))):
        yield
