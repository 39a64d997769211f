"""A command line inside this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import typer
from typer.testing import CliRunner


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str


def invoke(app: typer.Typer, *arguments: object, columns: int = 80, env: Mapping[str, str] | None = None) -> Outcome:
    settings = {"COLUMNS": str(columns), "SHRINKPOINT_TRACEBACK": "", **(env or {})}
    result = CliRunner().invoke(app, [str(one) for one in arguments], env=settings, prog_name=app.info.name)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)
