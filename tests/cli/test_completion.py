"""Completion by the shell, in a real bash with a home directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


def bash(script: str, home: Path) -> str:
    """What a script prints; `shrinkpoint` is that of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(home), "SHELL": "/bin/bash", "TERM": "dumb"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def completed(line: str, home: Path) -> list[str]:
    """What a bash that has read its start file offers after a line."""
    words = line.split(" ")
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shrinkpoint_completion shrinkpoint"
    return bash(f'. ~/.bashrc; {ask}; echo "${{COMPREPLY[@]}}"', home).split()


def test_an_installed_completion_offers_commands_and_options(tmp_path: Path) -> None:
    bash("shrinkpoint --install-completion; true", tmp_path)
    assert completed("shrinkpoint ver", tmp_path) == ["verify"]
    assert {"--deep", "--json"} <= {*completed("shrinkpoint verify --", tmp_path)}


def test_show_completion_prints_what_install_completion_writes(tmp_path: Path) -> None:
    shown = bash("shrinkpoint --show-completion; true", tmp_path)
    assert list(tmp_path.iterdir()) == [] and "_shrinkpoint_completion" in shown
    bash("shrinkpoint --install-completion; true", tmp_path)
    (script,) = tmp_path.rglob("shrinkpoint.sh")
    assert script.read_text().strip() == shown.strip()
