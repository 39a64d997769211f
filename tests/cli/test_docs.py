"""docs/cli.md names every command, every option and every exit code, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from shrinkpoint.cli.app import app
from shrinkpoint.cli.console import ExitCode

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
SECTIONS = {match[1]: match[2] for match in re.finditer(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)}


def test_every_option_of_every_command_has_its_row(run):
    for command in app.registered_commands:
        help_text = run(command.name, "--help", columns=200).stdout
        real = set(re.findall(r"--[a-z-]+", help_text[help_text.index("Options") :])) - {"--help"}
        documented = set(re.findall(r"^\| `(--[a-z-]+)", SECTIONS[command.name], re.MULTILINE))
        assert documented == real, command.name


def test_every_command_has_its_section_and_its_row():
    names = {command.name for command in app.registered_commands}
    assert names <= SECTIONS.keys()
    assert set(re.findall(r"^\| \[`(\w+)`\]", TEXT, re.MULTILINE)) == names


def test_every_exit_code_has_its_row():
    codes = TEXT[TEXT.index("## Exit codes") : TEXT.index("An error is one line")]
    assert [int(code) for code in re.findall(r"^\| ([0-9]+) \|", codes, re.MULTILINE)] == [
        int(code) for code in ExitCode
    ]
