"""The command itself, as a user calls it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shrinkpoint.cli.app import app


@pytest.fixture
def convert():
    """convert(source, out, *options) -> what it says as JSON; anything but success is an error."""

    def call(*arguments: object) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["convert", *map(str, arguments), "--json"], prog_name="shrinkpoint")
        assert result.exit_code == 0, result.output
        said: dict[str, Any] = json.loads(result.stdout)
        return said

    return call
