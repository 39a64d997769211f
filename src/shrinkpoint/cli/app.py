"""The application: its commands, its own options, and how errors become exit codes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from shrinkpoint import __version__
from shrinkpoint.cli import compact, convert, diff, export, forget, list, prune, report, show, verify
from shrinkpoint.cli.console import ExitCode, close_pipe, exit_code_of, print_note, turn_pager_off
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.storage import is_object_url, local_path
from shrinkpoint.validate import MAX_BYTES_VARIABLE

_TRACEBACK_VARIABLE = "SHRINKPOINT_TRACEBACK"
_NO_PAGER = "--no-pager"
_MAX_BYTES = "--max-bytes"
EPILOG = (
    "Exit codes: 0 success, 1 findings or differences, 2 usage, 3 not found, 4 corrupt or broken chain, "
    "5 locked, 6 storage, 7 other."
)


class ErrorHandlingGroup(TyperGroup):
    """Turns errors of commands into one line on stderr and an exit code; `--traceback` also prints the traceback."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """Accepts `--traceback` and `--no-pager` anywhere on the line, so that they can be appended to a command."""
        if "--traceback" in args:
            ctx.meta[_TRACEBACK_VARIABLE] = True
        if _NO_PAGER in args:
            turn_pager_off()
        args = [arg for arg in args if arg not in ("--traceback", _NO_PAGER)]
        args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{_MAX_BYTES}=") else [arg])]
        if _MAX_BYTES in args and len(args) > (at := args.index(_MAX_BYTES)) + 1:
            ctx.meta[_MAX_BYTES] = args[at + 1]
            args = args[:at] + args[at + 2 :]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _memory_limit(ctx.meta.get(_MAX_BYTES)):
                return super().invoke(ctx)
        except BrokenPipeError:
            close_pipe()
            raise typer.Exit(ExitCode.BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except (ShrinkpointError, OSError) as error:
            if _TRACEBACK_VARIABLE in ctx.meta or os.environ.get(_TRACEBACK_VARIABLE, "") not in ("", "0"):
                traceback.print_exc()
            text = str(error)
            if not isinstance(error, ShrinkpointError):  # of the operating system, in the form of a StorageError
                text = f"{error.filename or 'storage'}: {error.strerror or error}"
            print_note(text, "error", "bold red")
            raise typer.Exit(exit_code_of(error)) from None


@contextmanager
def _memory_limit(max_bytes: str | None) -> Iterator[None]:
    """Sets the environment variable for the time of a command, where the command line gives a limit."""
    before = os.environ.get(MAX_BYTES_VARIABLE)
    if max_bytes is not None:
        os.environ[MAX_BYTES_VARIABLE] = max_bytes
    try:
        yield
    finally:
        if max_bytes is not None:
            os.environ.pop(MAX_BYTES_VARIABLE)
            os.environ.update({} if before is None else {MAX_BYTES_VARIABLE: before})


app = typer.Typer(
    cls=ErrorHandlingGroup,
    name="shrinkpoint",
    help="List, check, compare, convert and prune compressed checkpoints.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"shrinkpoint {__version__}")
        raise typer.Exit()


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--traceback",
            help=f"Print the traceback of an error (anywhere on the line; or set {_TRACEBACK_VARIABLE}=1).",
        ),
    ] = False,
    no_pager: Annotated[
        bool, typer.Option(_NO_PAGER, help="Do not use a pager (anywhere on the line; or set PAGER=cat).")
    ] = False,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            _MAX_BYTES,
            metavar="N",
            help=f"Memory that the tensors of one file may take (anywhere on the line; or set {MAX_BYTES_VARIABLE}).",
        ),
    ] = None,
) -> None:
    pass


def refuse_urls(command: Callable[..., Any], *, takes_buckets: bool) -> Callable[..., Any]:
    """Wraps a command so that it refuses URLs as arguments and as options that are paths.

    Args:
        takes_buckets: its arguments may be URLs of object storage.
    """
    hints = get_type_hints(command, include_extras=True)
    arguments = {
        name
        for name, hint in hints.items()
        if any(isinstance(item, typer.models.ArgumentInfo) for item in getattr(hint, "__metadata__", ()))
    }

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            for item in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
                if takes_buckets and name in arguments and is_object_url(item):
                    continue
                if isinstance(item, Path) or (name in arguments and isinstance(item, str)):
                    local_path(item, name)
        return command(*args, **kwargs)

    return run


for _module in (list, show, report, verify, diff, export, convert, forget, prune, compact):
    app.command(name=_module.__name__.rpartition(".")[2])(refuse_urls(_module.command, takes_buckets=True))
