"""Runs a program on several processes and returns the results of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from helpers.paths import TESTS
from helpers.timeouts import PATIENCE

_FORKED = """

import os, sys, traceback

width, folder = int(sys.argv[1]), sys.argv[2]
children = []
for rank in range(width):  # forked, as importing torch takes longer than all the rest
    children.append(os.fork())
    if children[-1] == 0:
        try:
            of_rank(rank, width, folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def ranks(program: str, width: int, folder: Path, *, timeout: float = PATIENCE) -> list[dict]:
    """The results that each of `width` processes wrote to `{folder}/{rank}.json`.

    Args:
        program: defines `of_rank(rank, width, folder)`.
        timeout: seconds for all of them.
    """
    command = [sys.executable, "-c", textwrap.dedent(program) + _FORKED, str(width), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            _, text = parent.communicate(timeout=timeout)
        except BaseException:
            os.killpg(parent.pid, signal.SIGKILL)  # ranks that wait for each other would outlive the test
            raise
    assert parent.returncode == 0, text
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(width)]
