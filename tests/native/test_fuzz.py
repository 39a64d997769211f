"""The native core under sanitizers; `make fuzz` runs longer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-fsanitize=address,undefined", "-pthread"]


def missing(where: Path) -> str | None:
    """Why the sanitizers cannot be used here, or None."""
    for tool in ("make", "g++"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    source, program = where / "probe.cpp", where / "probe"
    source.write_text("int main() { return 0; }\n")
    for command in (["g++", *FLAGS, str(source), "-o", str(program)], [str(program)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return f"sanitizers do not work: {done.stderr.strip()[:200]}"
    return None


def test_no_stream_makes_the_native_core_leave_its_buffers(tmp_path: Path) -> None:
    reason = missing(tmp_path)
    if reason is not None:
        pytest.skip(reason)
    command = ["make", "-s", "-j2", "fuzz", "CXX=g++", "SECONDS=10", "SEED=1", f"FUZZ={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "seed 1:" in done.stdout
