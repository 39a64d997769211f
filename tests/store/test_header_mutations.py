"""Every header and manifest with a right digest is read as it was saved, or refused with an error of our tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers.paths import TESTS
from helpers.timeouts import PATIENCE

PROGRAM = TESTS / "helpers" / "header_fuzz.py"
CASES = int(os.environ.get("SHRINKPOINT_FUZZ_CASES", "150"))
NIGHTLY_CASES = int(os.environ.get("SHRINKPOINT_FUZZ_CASES", "2000"))


def run(count: int, seed: int) -> None:
    """Without room for arenas of malloc's own, the limit of address space is one of memory."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, PROGRAM, str(count), str(seed)]
    patience = PATIENCE + count / 5  # a slow and busy machine does more than five cases a second
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience, check=False)
    assert done.stdout, f"ended by {done.returncode}: {done.stderr[-2000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == [] and done.returncode == 0
    assert {kind.split(":")[0] for kind in found["outcomes"]} == {"one_file", "one_store", "one_folder"}


def test_a_changed_header_is_read_as_it_was_saved_or_an_error_of_ours():
    run(CASES, 1)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_many_changed_headers():
    run(NIGHTLY_CASES, int(os.environ.get("SHRINKPOINT_FUZZ_SEED", "2")))
