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


def test_the_steps_of_a_store_are_offered(tmp_path: Path, store: Path) -> None:
    bash("shrinkpoint --install-completion; true", tmp_path)
    assert completed(f"shrinkpoint show {store} --step ", tmp_path) == ["10", "20", "30", "40"]
    assert completed(f"shrinkpoint forget {store} 3", tmp_path) == ["30"]
    zsh = f'_TYPER_COMPLETE_ARGS="shrinkpoint show {store} --step 4" _SHRINKPOINT_COMPLETE=complete_zsh shrinkpoint'
    assert '"40"' in bash(f"env {zsh}", tmp_path)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_takes_its_script(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(tmp_path), "SHELL": "/bin/zsh", "TERM": "dumb"}
    shown = subprocess.run(
        ["zsh", "-c", "shrinkpoint --show-completion; true"], env=env, capture_output=True, text=True
    )
    assert "#compdef shrinkpoint" in shown.stdout
    (tmp_path / "_shrinkpoint").write_text(shown.stdout)
    done = subprocess.run(["zsh", "-n", tmp_path / "_shrinkpoint"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_show_completion_prints_what_install_completion_writes(tmp_path: Path) -> None:
    shown = bash("shrinkpoint --show-completion; true", tmp_path)
    assert list(tmp_path.iterdir()) == [] and "_shrinkpoint_completion" in shown
    bash("shrinkpoint --install-completion; true", tmp_path)
    (script,) = tmp_path.rglob("shrinkpoint.sh")
    assert script.read_text().strip() == shown.strip()
