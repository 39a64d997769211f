"""The command line: one command a file, nothing that the library could not do."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from shrinkpoint import __version__


def main() -> None:
    """Run `shrinkpoint`; the console script and `python -m shrinkpoint` both start here."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        if sys.argv[1:] == ["--version"]:
            sys.stdout.write(f"shrinkpoint {__version__}\n")
            raise SystemExit(0) from None
        sys.stderr.write(f'error: the command line needs {missing.name}: pip install "shrinkpoint[cli]"\n')
        raise SystemExit(2) from None
    from shrinkpoint.cli.app import app

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it: `>&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115

    if isinstance(sys.stdout, io.TextIOWrapper):  # paths and names may have characters that a terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")

    app(prog_name="shrinkpoint")
