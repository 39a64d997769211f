"""Prints results to stdout, and everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from shrinkpoint.cli.exit_codes import ExitCode
from shrinkpoint.cli.humanize import printable
from shrinkpoint.store.manifest import json_safe

_UNBOUNDED_WIDTH = 100_000


class PipeSafeConsole(Console):
    """A console of rich that ends the command with the exit code of SIGPIPE if the reader has closed the pipe."""

    def on_broken_pipe(self) -> NoReturn:
        close_pipe()
        raise typer.Exit(ExitCode.BROKEN_PIPE)


def close_pipe() -> None:
    """Redirects stdout to the null device, so that flushing it at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_console() -> PipeSafeConsole:
    """A console on stdout; lines for a program (no terminal, no COLUMNS) are never cut to a width."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return PipeSafeConsole(width=None if bounded else _UNBOUNDED_WIDTH, highlight=False, soft_wrap=False)


def print_line(line: str, style: str = "") -> None:
    """Prints one line to stdout: never folded, so that a path can be copied, and never read as markup."""
    stdout_console().print(Text(printable(line), style=style), soft_wrap=True)


def print_note(line: str, label: str = "note", style: str = "yellow") -> None:
    """Prints one line to stderr, never folded."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{label}: ", style), printable(line)), soft_wrap=True)


def print_json(document: Any) -> None:
    """Prints a document as JSON to stdout; floats that JSON does not have become "nan", "inf" and "-inf"."""
    sys.stdout.write(json.dumps(json_safe(document), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def spinner(title: str) -> Iterator[None]:
    """Shows a spinner on stderr during the block if stderr is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(printable(title))):
        yield
